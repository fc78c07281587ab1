"""ConFIG: the pseudo-inverse of the unit rows themselves, the peer's numbers, derivatives by differences."""

import numpy as np
import pytest
import torch
from bounds import check_within, eps, gramian_bound
from hypothesis import assume, given
from hypothesis import strategies as st
from sequences import DEPENDENT, J3, differences, integer_jacobians
from torch.func import jacfwd, jacrev

from functional_jd.aggregation.aggregate import aggregate
from functional_jd.aggregators.config import config


def direction(J, preference=None):
    return aggregate(config(preference), J).direction


def reference(J, u):
    """As the paper writes it: NumPy's pseudo-inverse of the unit rows, by singular values."""
    norms = np.linalg.norm(J, axis=1, keepdims=True)
    best = np.linalg.pinv(J / np.where(norms == 0, 1, norms), rcond=1e-8) @ u
    unit = best / np.linalg.norm(best) if np.linalg.norm(best) > 1e-8 else 0 * best
    return torch.from_numpy((J @ unit).sum() * unit)


@given(integer_jacobians(), st.integers(1, 5))
def test_it_is_the_pseudo_inverse_of_the_unit_rows(J, heavy):
    u = np.array([float(heavy)] + [1.0] * (len(J) - 1))
    expected = reference(J.numpy(), u)
    torch.testing.assert_close(direction(J, torch.from_numpy(u)), expected, rtol=1e-7, atol=1e-7)


@given(integer_jacobians(), st.integers(-60, 60))
def test_independent_rows_have_equal_cosines_whatever_their_norms(J, exponent):
    assume(np.linalg.matrix_rank(J) == len(J))
    J = torch.cat([J[:1] * 2.0**exponent, J[1:]])
    d = direction(J)
    cosines = torch.nn.functional.normalize(J, dim=1, eps=0) @ d / d.norm()
    assert (cosines > 0).all()
    check_within(cosines, cosines.mean().expand_as(cosines), gramian_bound(J))


def test_published_value():
    J = torch.tensor([[-4.0, 1, 1], [6, 1, 1]])
    torch.testing.assert_close(direction(J), torch.tensor([0.1588, 2.0706, 2.0706]), rtol=0, atol=1e-4)


# TorchJD 0.18, ConFIG(pref_vector)(J), float64.
@pytest.mark.parametrize(
    ("J", "preference", "expected"),
    [
        (J3, None, [3.675160465653483, 1.4658987475504446, -1.7392615501315276, 0.8312680564704343]),
        (J3, [1.0, 2, 0], [4 / 3, 5 / 3, -7 / 3, 1.0]),
        (DEPENDENT, None, [1.4530392462756851, 3.6208004827445803]),
        (DEPENDENT, [1.0, 2, 0], [-0.5491796789846518, 2.048509474153692]),
    ],
)
def test_the_peer_agrees(J, preference, expected):
    torch.testing.assert_close(direction(J, preference), torch.tensor(expected, dtype=torch.float64))


@pytest.mark.parametrize("J", [J3, DEPENDENT])
@pytest.mark.parametrize("size", [1e-300, 1e-160, 1e160, 1e300])
def test_only_ratios_of_the_preference_matter(J, size):
    u = torch.tensor([1.0, 2, 0.5], dtype=torch.float64)
    torch.testing.assert_close(direction(J, size * u), direction(J, u), rtol=1e-12, atol=0)


def test_zero_opposite_and_one_row():
    g = torch.tensor([[3.0, 4.0]], dtype=torch.float64)
    torch.testing.assert_close(direction(g), g[0])
    torch.testing.assert_close(direction(torch.cat([g, 0 * g])), g[0])
    assert (direction(0 * g) == 0).all()
    assert (direction(torch.cat([g, -g / 3])) == 0).all()


@pytest.mark.parametrize(
    "J", [J3, DEPENDENT, torch.eye(3, dtype=torch.float64)], ids=["independent", "dependent", "orthonormal"]
)
def test_derivatives_are_those_of_differences(J):
    torch.testing.assert_close(jacrev(direction)(J), differences(direction, J), rtol=1e-6, atol=1e-8)
    torch.testing.assert_close(jacfwd(direction)(J), differences(direction, J), rtol=1e-6, atol=1e-8)
    first = jacrev(lambda J: direction(J)[0])
    torch.testing.assert_close(jacrev(first)(J), differences(first, J), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("angle", [1e-2, 1e-3, 1e-4])
def test_derivatives_are_accurate_where_two_rows_are_nearly_parallel(angle):
    half, norms = torch.tensor(angle / 2, dtype=torch.float64), torch.tensor([[2.0], [3.0]], dtype=torch.float64)

    def turned(x):  # the first row turns away from the second one by x
        angles = torch.stack([half + x, -half])
        return direction(norms * torch.stack([angles.cos(), angles.sin()], dim=1))

    # Halfway between both rows, as long as the projections of both on it: `5 cos(half + x / 2)` at the angle x / 2.
    expected = 2.5 * torch.stack([-half.sin(), half.cos()])
    slope = jacfwd(turned)(torch.zeros((), dtype=torch.float64))
    check_within(slope, expected, 64 * eps() / angle**3)  # what rounding of the cosines does to them
