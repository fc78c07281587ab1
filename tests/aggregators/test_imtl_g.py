"""IMTL-G: equal projections, the paper's closed form on the rows, the peer's numbers, derivatives by differences."""

import numpy as np
import pytest
import torch
from bounds import check_within, eps, gramian_bound, sum_bound
from hypothesis import assume, given
from sequences import DEPENDENT, J3, integer_jacobians
from torch.func import jacfwd

from functional_jd.aggregation.aggregate import aggregate
from functional_jd.aggregators.imtl_g import imtl_g


def direction(J):
    return aggregate(imtl_g(), J).direction


@given(integer_jacobians())
def test_independent_rows_are_projected_on_equally_by_weights_that_sum_to_one(J):
    assume(np.linalg.matrix_rank(J) == len(J))
    found = aggregate(imtl_g(), J)
    assume(found.weights.any())
    size = found.weights.abs().sum()
    assert abs(found.weights.sum() - 1) <= 4 * sum_bound(found.weights)
    projections = torch.nn.functional.normalize(J, dim=1) @ found.direction
    check_within(projections, projections.mean().expand_as(projections), gramian_bound(J, size * J.norm()))


@given(integer_jacobians(rows=(2, 6)).map(torch.Tensor.numpy))
def test_the_papers_closed_form_on_the_rows(J):
    assume(np.linalg.matrix_rank(J) == len(J))
    units = J / np.linalg.norm(J, axis=1, keepdims=True)
    U, D = units[:1] - units[1:], J[:1] - J[1:]
    assume(np.linalg.cond(U @ D.T) < 1e6)
    others = np.linalg.solve((D @ U.T).T, U @ J[0])  # the paper's alpha = g_1 U' (D U')^-1
    expected = np.concatenate([[1 - others.sum()], others])
    torch.testing.assert_close(
        aggregate(imtl_g(), torch.from_numpy(J)).weights, torch.from_numpy(expected), rtol=1e-7, atol=1e-7
    )


@given(integer_jacobians().map(torch.Tensor.numpy))
def test_dependent_rows_follow_numpys_pseudo_inverse_of_the_gramian(J):
    G = J @ J.T
    v = np.linalg.pinv(G, rcond=1e-10, hermitian=True) @ np.linalg.norm(J, axis=1)
    assume(abs(v.sum()) > 1e-6 * np.abs(v).sum())
    assume(np.abs(G @ v).max() > 1e-8)
    torch.testing.assert_close(direction(torch.from_numpy(J)), torch.from_numpy(v / v.sum() @ J), rtol=1e-6, atol=1e-6)


def test_published_value():
    J = torch.tensor([[-4.0, 1, 1], [6, 1, 1]])
    torch.testing.assert_close(direction(J), torch.tensor([0.0767, 1.0, 1.0]), rtol=0, atol=1e-4)


# TorchJD 0.18, IMTLG()(J), float64.
@pytest.mark.parametrize(
    ("J", "expected"),
    [
        (J3, [1.2307297640284434, 0.49089699253214925, -0.5824401348408894, 0.2783732434394071]),
        (DEPENDENT, [1.0773237463197796, 1.3690705014720885]),
    ],
)
def test_the_peer_agrees(J, expected):
    torch.testing.assert_close(direction(J), torch.tensor(expected, dtype=torch.float64))


@pytest.mark.parametrize("scale", [1e-18, 1e18])
def test_it_scales_as_the_jacobian_does_and_one_row_changes_the_length_only(scale):
    check_within(direction(scale * J3) / scale, direction(J3), gramian_bound(J3, direction(J3).abs().max()))
    turned = direction(torch.tensor([[scale], [1.0], [1.0]], dtype=torch.float64) * J3)
    unit = torch.nn.functional.normalize
    check_within(unit(turned, dim=0, eps=0), unit(direction(J3), dim=0), gramian_bound(J3))


def test_zero_equal_opposite_and_one_row():
    g = torch.tensor([[3.0, 4.0]], dtype=torch.float64)
    torch.testing.assert_close(direction(g), g[0])
    torch.testing.assert_close(direction(torch.cat([g, 0 * g])), g[0])
    torch.testing.assert_close(direction(torch.cat([g, g])), g[0])
    assert (direction(0 * g) == 0).all()
    assert (direction(torch.cat([g, -g])) == 0).all()


@pytest.mark.parametrize("exponent", [-100, -40, 0, 40, 100])
def test_rows_of_zeros_do_not_tell_what_is_short(exponent):
    J = torch.tensor([[0.0], [1.0], [1.0]], dtype=torch.float64) * 2.0**exponent
    torch.testing.assert_close(direction(J), J[1])


@pytest.mark.parametrize("angle", [1e-2, 1e-3, 1e-4])
def test_derivatives_are_accurate_where_two_rows_are_nearly_parallel(angle):
    half, norms = torch.tensor(angle / 2, dtype=torch.float64), torch.tensor([[2.0], [3.0]], dtype=torch.float64)

    def turned(x):  # the first row turns away from the second one by x
        angles = torch.stack([half + x, -half])
        return direction(norms * torch.stack([angles.cos(), angles.sin()], dim=1))

    # The weights stay 3/5 and 2/5: the direction is `12/5 cos(half + x / 2)` at the angle x / 2.
    expected = 1.2 * torch.stack([-half.sin(), half.cos()])
    slope = jacfwd(turned)(torch.zeros((), dtype=torch.float64))
    check_within(slope, expected, 64 * eps() / angle**3)  # what rounding of the cosines does to them
