"""MGDA: the least norm, certified by duality and by all faces of the simplex."""

import pytest
import torch
from bounds import eps
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


def test_half_the_squared_length_has_the_weights_as_derivative():
    # The envelope theorem: d/dJ min |w'J|^2 / 2 = w (w'J)'.
    J = random_rows(5, 7)
    result = aggregate(mgda(), J)
    gradient = torch.func.grad(lambda J: direction(J).square().sum() / 2)(J)
    torch.testing.assert_close(gradient, torch.outer(result.weights, result.direction))
