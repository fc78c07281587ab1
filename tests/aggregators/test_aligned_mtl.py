"""Aligned-MTL: the polar factor of the Jacobian itself, the peer's numbers, derivatives by differences."""

import numpy as np
import pytest
import torch
from bounds import check_within, eps, product_bound
from hypothesis import given
from hypothesis import strategies as st
from scipy.linalg import polar
from sequences import DEPENDENT, J3, differences, integer_jacobians
from torch.func import jacrev

from functional_jd.aggregation.aggregate import aggregate
from functional_jd.aggregators.aligned_mtl import aligned_mtl


def direction(J, preference=None, scale_mode="min"):
    return aggregate(aligned_mtl(preference, scale_mode), J).direction


def reference(J, u, mode):
    """The nearest orthogonal rows of one length, from the singular values of the rows: no Gramian."""
    left, values, right = np.linalg.svd(J.numpy(), full_matrices=False)
    rank = (values > 1e-7 * values.max(initial=0)).sum()
    if rank == 0:
        return torch.zeros(J.shape[1], dtype=torch.float64)
    squares = np.sort(values[:rank] ** 2)
    scale = {"min": squares[0], "median": squares[(rank - 1) // 2], "rmse": squares.mean()}[mode] ** 0.5
    return torch.from_numpy(scale * np.asarray(u) @ left[:, :rank] @ right[:rank])


@given(integer_jacobians(), st.sampled_from(["min", "median", "rmse"]), st.integers(1, 5))
def test_it_is_the_scaled_polar_factor_of_the_rows(J, mode, heavy):
    u = [float(heavy)] + [1.0] * (len(J) - 1)
    torch.testing.assert_close(direction(J, u, mode), reference(J, u, mode), rtol=1e-9, atol=1e-9)


def test_scipy_has_the_same_polar_factor():
    unitary, _ = polar(J3.numpy())
    smallest = np.linalg.svd(J3.numpy(), compute_uv=False).min()
    torch.testing.assert_close(direction(J3), torch.from_numpy(smallest * unitary.mean(axis=0)))


@pytest.mark.parametrize(("mode", "expected"), [("min", [0.2133, 0.9673, 0.9673]), ("rmse", [0.5764, 2.6142, 2.6142])])
def test_published_values(mode, expected):
    J = torch.tensor([[-4.0, 1, 1], [6, 1, 1]])
    torch.testing.assert_close(direction(J, None, mode), torch.tensor(expected), rtol=0, atol=1e-4)


# TorchJD 0.18, AlignedMTL(pref_vector, scale_mode)(J), float64.
@pytest.mark.parametrize(
    ("J", "preference", "mode", "expected"),
    [
        (J3, None, "min", [0.9260187082005386, 0.5069782320503369, -0.37433932001106557, 0.0861972526122182]),
        (J3, None, "median", [1.2383652924668196, 0.6779822492218645, -0.5006041642594364, 0.11527163003908714]),
        (J3, None, "rmse", [1.317698271376313, 0.7214155978514816, -0.5326742003358573, 0.1226562376749627]),
        (J3, [1.0, 2, 0], "min", [1.3206243148495003, 2.6524227821221014, -3.025115683532896, 1.0003708981018269]),
        (DEPENDENT, None, "min", [0.6130746261453612, 0.937210655671094]),
        (DEPENDENT, [1.0, 2, 0], "min", [-0.8831879840834715, 4.018955980622486]),
    ],
)
def test_the_peer_agrees(J, preference, mode, expected):
    torch.testing.assert_close(direction(J, preference, mode), torch.tensor(expected, dtype=torch.float64))


@pytest.mark.parametrize("scale", [1e-150, 1e-18, 1e18, 1e150])
def test_it_scales_as_the_jacobian_does(scale):
    weights = aggregate(aligned_mtl(), J3).weights
    bound = 4 * torch.linalg.cond(J3) ** 2 * product_bound(weights, J3)
    check_within(direction(scale * J3) / scale, direction(J3), bound)


def test_zero_equal_and_opposite_rows_are_finite():
    assert (direction(torch.zeros(3, 2, dtype=torch.float64)) == 0).all()
    g = torch.tensor([3.0, 4.0], dtype=torch.float64)
    torch.testing.assert_close(direction(torch.stack([g, g])), g)  # one component, of length sqrt(2) |g|
    check_within(direction(torch.stack([g, -g])), 0 * g, 8 * eps() * g.norm())


@pytest.mark.parametrize("m", [2, 20])
def test_rows_of_very_different_lengths_count_as_dependent_from_the_bound_on(m):
    bound = 1 / (8 * m * eps()) ** 0.5
    assert bound == pytest.approx({2: 1.7e7, 20: 5e6}[m], rel=0.07)
    for factor, shares in ((0.99, True), (1.01, False)):
        lengths = torch.ones(m, dtype=torch.float64)
        lengths[0] = factor * bound
        found = direction(torch.diag(lengths))
        if shares:  # orthogonal rows: each has its share of the shortest length
            torch.testing.assert_close(found, torch.full_like(found, 1 / m))
        else:  # only the longest is left, and its length with it
            torch.testing.assert_close(found, torch.where(lengths > 1, lengths / m, 0))


def test_derivatives_are_right_where_other_eigenvalues_coincide():
    J = torch.diag(torch.tensor([1.0, 2, 2], dtype=torch.float64))  # the smallest is simple
    torch.testing.assert_close(jacrev(direction)(J), differences(direction, J), rtol=1e-7, atol=1e-8)
    J = torch.eye(3, dtype=torch.float64)
    rmse = lambda J: direction(J, None, "rmse")
    torch.testing.assert_close(jacrev(rmse)(J), differences(rmse, J), rtol=1e-7, atol=1e-8)
    assert jacrev(direction)(J).isfinite().all()
