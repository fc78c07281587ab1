"""DualProj: the nearest direction without conflicts, by references on the rows themselves."""

from itertools import combinations

import pytest
import torch
from bounds import check_within, cone_bound, projection_bound
from hypothesis import assume, given
from hypothesis import strategies as st
from scipy.optimize import nnls
from sequences import integer_jacobians, random_rows

from functional_jd.aggregation.aggregate import aggregate
from functional_jd.aggregators.dualproj import dualproj


def conflicting_rows(m, n, seed=0):
    """The first row is long, and all others conflict with it."""
    J = random_rows(m, n, seed=seed)
    return torch.cat([5 * J[:1], J[1:] - 2 * J[:1]])


def direction(J, preference=None):
    return aggregate(dualproj(preference), J).direction


def projection(J, x):
    """x projected on the dual cone of the rows, by non-negative least squares on the unit rows, and its rounding."""
    N = torch.nn.functional.normalize(J, dim=1)
    length = max(float(x.norm()), 1e-300)
    s = torch.from_numpy(nnls(N.T.numpy(), -(x / length).numpy(), maxiter=100 * len(J))[0])
    return x + length * s @ N, float(torch.linalg.vector_norm(J, dim=1).max()) * projection_bound(N, s)


def brute_force(J, x):
    """The nearest of the projections on all faces of the cone that conflict with no row."""
    feasible = []
    for size in range(len(J) + 1):
        for chosen in combinations(range(len(J)), size):
            span = J[list(chosen)]
            y = x - torch.linalg.pinv(span) @ (span @ x) if chosen else x
            if (J @ y).min() >= -1e-9:
                feasible.append(y)
    return min(feasible, key=lambda y: float((y - x).norm()))


def rounding(J, u=None):
    """How far two projections of the mean, or of `u @ J`, may lie apart: rows are added up first, then projected."""
    norms = torch.linalg.vector_norm(J, dim=1)
    return cone_bound(J) * float(norms.mean() if u is None else torch.tensor(u, dtype=torch.float64) @ norms)


@given(integer_jacobians())
def test_equal_to_the_best_of_all_faces(J):
    check_within(direction(J), brute_force(J, J.mean(0)), rounding(J))


@given(integer_jacobians(), st.data())
def test_the_preferred_combination_is_what_is_projected(J, data):
    u = data.draw(st.lists(st.integers(0, 4).map(float), min_size=len(J), max_size=len(J)))
    assume(any(u))
    expected, _ = projection(J, torch.tensor(u, dtype=torch.float64) @ J)
    check_within(direction(J, u), expected, rounding(J, u))


@given(integer_jacobians())
def test_equal_to_the_mean_where_nothing_conflicts(J):
    assert torch.equal(aggregate(dualproj(), J.abs()).weights, torch.full((len(J),), 1 / len(J), dtype=torch.float64))


@given(integer_jacobians())
def test_a_row_of_zeros_changes_nothing(J):
    padded = direction(torch.cat([J, 0 * J[:1]]), [1.0] * len(J) + [3.0])
    check_within(padded, direction(J, [1.0] * len(J)), rounding(J, [1.0] * len(J)))


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


def test_a_row_of_zeros_does_not_set_the_scale():
    J = torch.cat([conflicting_rows(5, 7), torch.zeros(1, 7, dtype=torch.float64)])
    assert not torch.allclose(direction(J), J.mean(0))
    check_within(direction(1e-18 * J) * 1e18, direction(J), rounding(J))


def test_values():
    # By hand: the mean (1, 1, 1) conflicts with the first row by -2, of squared norm 18: add 2 / 18 of it.
    J = torch.tensor([[-4.0, 1, 1], [6, 1, 1]], dtype=torch.float64)
    torch.testing.assert_close(direction(J), torch.tensor([5, 10, 10], dtype=torch.float64) / 9)
    # The peer's value, with the 1e-4 that it adds to the diagonal.
    torch.testing.assert_close(direction(J), torch.tensor([0.5563, 1.1109, 1.1109]).double(), rtol=0, atol=1e-3)


def test_values_of_torchjd():
    # DualProj()(J) of TorchJD 0.18, as printed: its diagonal is off by 1e-4 of the trace.
    J = [[-3.0, 3, 0, 5, -2, 1], [4, -3, 5, -1, -1, 5], [2, 2, -4, -3, -3, -1]]
    J += [[-4, 3, 4, 1, -2, 2], [-5, -5, 5, -2, -4, 1], [-1, -4, 3, 4, 1, -1]]
    expected = torch.tensor([-0.70221, -0.20221, 1.23776, -0.03001, -2.53001, 0.93444], dtype=torch.float64)
    torch.testing.assert_close(direction(torch.tensor(J, dtype=torch.float64)), expected, rtol=0, atol=2e-3)


@pytest.mark.parametrize("m", [1, 2, 5, 20])
def test_degenerate_rows(m):
    g, side = random_rows(m, m + 2), torch.ones(m, 1, dtype=torch.float64)
    opposite = torch.cat([torch.cat([g, side], 1), torch.cat([-2 * g, side], 1)])
    expected, rounding = projection(opposite, opposite.mean(0))
    assert (opposite @ direction(opposite)).min() >= -rounding * opposite.norm(dim=1).max()
    check_within(direction(opposite), expected, rounding)
    stationary = torch.cat([g, -g.sum(0, keepdim=True)])
    u = torch.arange(1.0, m + 2, dtype=torch.float64)
    expected, rounding = projection(stationary, u @ stationary)
    assert direction(stationary, u.tolist()).abs().max() <= rounding * u.sum()
    assert (direction(0 * g) == 0).all()
    check_within(direction(torch.cat([g, g])), *projection(g, g.mean(0)))


def test_derivatives_are_those_of_finite_differences():
    for m in (1, 2, 3, 6):
        J = conflicting_rows(m, m + 1, seed=m).requires_grad_()
        u = torch.linspace(0.5, 1, m, dtype=torch.float64, requires_grad=True)
        assert m == 1 or not torch.allclose(direction(J, u), u @ J)
        assert torch.autograd.gradcheck(direction, (J, u), check_forward_ad=True)
        assert torch.autograd.gradgradcheck(direction, (J, u))
