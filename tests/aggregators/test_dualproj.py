"""DualProj: the nearest direction without conflicts, by references on the rows themselves."""

import pytest
import torch
from bounds import check_within, cone_bound, projection_bound
from hypothesis import given
from scipy.optimize import nnls
from sequences import integer_jacobians, random_rows

from functional_jd.aggregation.aggregate import aggregate
from functional_jd.aggregators.dualproj import dualproj


def direction(J, preference=None):
    return aggregate(dualproj(preference), J).direction


def projection(J, x):
    """x projected on the dual cone of the rows, by non-negative least squares on the unit rows, and its rounding."""
    N = torch.nn.functional.normalize(J, dim=1)
    length = max(float(x.norm()), 1e-300)
    s = torch.from_numpy(nnls(N.T.numpy(), -(x / length).numpy(), maxiter=100 * len(J))[0])
    return x + length * s @ N, float(torch.linalg.vector_norm(J, dim=1).max()) * projection_bound(N, s)


def rounding(J, u=None):
    """How far two projections of the mean, or of `u @ J`, may lie apart: rows are added up first, then projected."""
    norms = torch.linalg.vector_norm(J, dim=1)
    return cone_bound(J) * float(norms.mean() if u is None else torch.tensor(u, dtype=torch.float64) @ norms)


@given(integer_jacobians())
def test_equal_to_the_mean_where_nothing_conflicts(J):
    assert torch.equal(aggregate(dualproj(), J.abs()).weights, torch.full((len(J),), 1 / len(J), dtype=torch.float64))


@pytest.mark.parametrize("m", [2, 5, 16, 64])
def test_exact_to_rounding(m):
    for J in (random_rows(m, m + 5), random_rows(m, m + 5) - 0.9 * random_rows(m, m + 5).mean(0)):
        check_within(direction(J), *projection(J, J.mean(0)))


@pytest.mark.parametrize("m", [5, 40])
def test_rows_of_very_different_norms_are_not_conflicted_with(m):
    generator = torch.Generator().manual_seed(m)
    J = torch.randn(m, m + 5, generator=generator, dtype=torch.float64)
    scaled = J * 10 ** (36 * torch.rand(m, 1, generator=generator, dtype=torch.float64) - 18)
    d = direction(scaled)
    expected, rounding = projection(scaled, scaled.mean(0))
    assert (J @ d / torch.linalg.vector_norm(J, dim=1)).min() >= -rounding
    check_within(d, expected, rounding)
