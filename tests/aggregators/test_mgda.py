"""MGDA: the least norm, certified by duality and by all faces of the simplex."""

from itertools import combinations

import pytest
import torch
from bounds import check_within, eps, half_the_digits, product_bound, sum_bound
from hypothesis import given
from sequences import integer_jacobians, random_rows

from functional_jd.aggregation.aggregate import aggregate
from functional_jd.aggregators.mgda import mgda


def direction(J):
    return aggregate(mgda(), J).direction


def gap(J):
    """By how much `<d, g_i> >= |d|^2` is missed, in units of the row and of the shortest one; weights checked too."""
    w = aggregate(mgda(), J).weights
    assert w.min() >= -4 * eps()
    assert abs(w.sum() - 1) <= 4 * len(w) * eps()
    norms, d = torch.linalg.vector_norm(J, dim=1), w @ J
    return float(((d @ d - J @ d) / norms).max() / norms.min())


def brute_force(J):
    """The shortest of the points of least norm of all faces."""
    best = J[0]
    for size in range(1, len(J) + 1):
        for chosen in combinations(range(len(J)), size):
            first, rest = J[chosen[0]], J[list(chosen[1:])] - J[chosen[0]]
            w = -torch.linalg.pinv(rest.T) @ first if size > 1 else first.new_zeros(0)
            point = first + w @ rest
            if (size == 1 or (w.min() >= -1e-9 and w.sum() <= 1 + 1e-9)) and point.norm() < best.norm():
                best = point
    return best


@given(integer_jacobians())
def test_equal_to_the_best_of_all_faces(J):
    check_within(direction(J), brute_force(J), half_the_digits(J.norm()))


@given(integer_jacobians())
def test_every_row_gains_the_square_of_the_length_and_weights_lie_in_the_simplex(J):
    w = aggregate(mgda(), J).weights
    d = w @ J
    assert (J @ d >= d @ d - half_the_digits(J.norm()) * torch.linalg.vector_norm(J, dim=1)).all()
    assert w.min() >= -1e-6
    assert abs(w.sum() - 1) <= 4 * sum_bound(w)


@pytest.mark.parametrize("m", [2, 3, 5, 8, 16, 32, 64, 128])
def test_the_duality_gap_is_rounding(m):
    J = random_rows(m, m + 5)
    spread = 10 ** torch.linspace(-12, 12, m, dtype=torch.float64).unsqueeze(1)
    shifted, low = J - 0.9 * J.mean(0), J[:, : m // 2 + 1] @ random_rows(m // 2 + 1, m + 5, seed=1)
    for rows in (J, shifted, J - J.mean(0), low, torch.cat([J, J]), torch.cat([J, -2 * J]), spread * shifted):
        assert gap(rows) <= 64 * sum(rows.shape) * eps()


@pytest.mark.parametrize("m", [64, 100, 128])
def test_weights_of_dependent_rows_stay_in_the_simplex(m):
    for seed in range(6):
        for rank in (1, 3, m // 2):
            J = random_rows(m, rank, seed=seed) @ random_rows(rank, rank + 4, seed=seed + 1)
            assert gap(J) <= 1e-10 * m


@pytest.mark.parametrize("dot", [-3.0, 0.5, 1.0, 3.0, 4.0])
def test_two_rows_in_closed_form(dot):
    J = torch.tensor([[1.0, 0], [dot, 2.0]], dtype=torch.float64)
    first = ((dot**2 + 4 - dot) / (1 + dot**2 + 4 - 2 * dot) if dot < 1 else 1.0) + 0.0
    expected = torch.tensor([first, 1 - first], dtype=torch.float64)
    check_within(aggregate(mgda(), J).weights, expected, 4 * eps() * torch.linalg.cond(J) ** 2)


def test_values():
    J = torch.tensor([[-4.0, 1, 1], [6, 1, 1]], dtype=torch.float64)
    weights = torch.tensor([0.6, 0.4], dtype=torch.float64)
    check_within(direction(J), weights @ J, 4 * product_bound(weights, J))
    # The hull of the orthogonal rows a_i e_i is nearest to zero at weights in proportion to 1 / a_i^2.
    weights = aggregate(mgda(), torch.diag(torch.tensor([1.0, 2, 4, 1e8]))).weights
    inverse = torch.tensor([1.0, 1 / 4, 1 / 16, 1e-16], dtype=torch.float64)
    check_within(weights, inverse / inverse.sum(), 64 * eps() * inverse)


@given(integer_jacobians())
def test_rows_of_zeros_share_all_the_weight(J):
    zero = (J == 0).all(1)
    if zero.any():
        assert (direction(J) == 0).all()
        torch.testing.assert_close(aggregate(mgda(), J).weights, zero.double() / zero.sum())


@pytest.mark.parametrize("m", [1, 2, 7, 30])
def test_stationary_rows_give_nothing(m):
    J = random_rows(m, m + 2)
    positive = torch.linspace(1, 2, m, dtype=torch.float64).unsqueeze(1)
    for rows in (torch.cat([J, -J]), torch.cat([J, -(positive * J).sum(0, keepdim=True)])):
        assert direction(rows).abs().max() <= 64 * sum(rows.shape) * eps() * rows.norm(dim=1).min()


def test_derivatives_are_those_of_finite_differences():
    for m in (1, 2, 3, 6):
        J = random_rows(m, m + 1, seed=m).requires_grad_()
        assert (aggregate(mgda(), J).weights > 0).sum() >= min(m, 2)
        assert torch.autograd.gradcheck(direction, J, check_forward_ad=True)
        assert torch.autograd.gradgradcheck(direction, J)


def test_half_the_squared_length_has_the_weights_as_derivative():
    # The envelope theorem: d/dJ min |w'J|^2 / 2 = w (w'J)'.
    J = random_rows(5, 7)
    result = aggregate(mgda(), J)
    gradient = torch.func.grad(lambda J: direction(J).square().sum() / 2)(J)
    torch.testing.assert_close(gradient, torch.outer(result.weights, result.direction))
