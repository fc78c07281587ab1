"""Aligned-MTL: the polar factor of the Jacobian itself, the peer's numbers, derivatives by differences."""

import pytest
import torch
from bounds import check_derivatives, check_within, eps, product_bound
from sequences import J3
from torch.func import jacrev

from functional_jd.aggregation.aggregate import aggregate
from functional_jd.aggregators.aligned_mtl import aligned_mtl


def direction(J, preference=None, scale_mode="min"):
    return aggregate(aligned_mtl(preference, scale_mode), J).direction


@pytest.mark.parametrize("scale", [1e-150, 1e-18, 1e18, 1e150])
def test_it_scales_as_the_jacobian_does(scale):
    weights = aggregate(aligned_mtl(), J3).weights
    bound = 4 * torch.linalg.cond(J3) ** 2 * product_bound(weights, J3)
    check_within(direction(scale * J3) / scale, direction(J3), bound)


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
    check_derivatives(jacrev(direction)(J), direction, J)
    J = torch.eye(3, dtype=torch.float64)
    rmse = lambda J: direction(J, None, "rmse")
    check_derivatives(jacrev(rmse)(J), rmse, J)
    assert jacrev(direction)(J).isfinite().all()
