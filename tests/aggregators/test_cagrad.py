"""CAGrad: certified by weak duality, by other solvers, and by the peer."""

import numpy as np
import pytest
import torch
from bounds import check_within, cone_bound, eps, half_the_digits
from hypothesis import given
from hypothesis import strategies as st
from scipy.optimize import nnls
from sequences import integer_jacobians, random_rows

import functional_jd as jd
from functional_jd.aggregators.mean import mean

# Within this distance of zero, a convex combination of unit rows counts as zero.
STATIONARY = 1e-6
radii = st.sampled_from([0.1, 0.4, 0.5, 0.9, 1.0, 2.0, 10.0])


def direction(J, c=0.5):
    return jd.aggregate(jd.cagrad(c), J).direction


def certified(J, c):
    """Is the direction in the ball, and is no gain below what the weights prove to be the greatest least gain?

    For all d in the ball and w in the simplex, `min_i <g_i, d> <= <g_w, g_0> + c |g_0| |g_w|`. Every row is compared at
    its own norm, else the long ones hide the short ones.
    """
    weights, d = jd.aggregate(jd.cagrad(c), J).weights, direction(J, c)
    norms, mean = torch.linalg.vector_norm(J, dim=1), J.mean(0)
    rounding = 64 * sum(J.shape) * eps() * float(weights @ norms)  # of the sums that the mean and the direction are
    w = weights - 1 / len(J)
    assert w.min() >= -64 * sum(J.shape) * eps() * weights.max()
    w = w / w.sum()
    bound = w @ J @ mean + c * mean.norm() * (w @ J).norm()
    assert abs((d - mean).norm() - c * mean.norm()) <= rounding * (1 + c)
    assert ((J @ d - bound) / norms).min() >= -rounding


@given(integer_jacobians(), radii)
def test_the_greatest_least_gain_or_nothing_if_all_gain_zero_at_best(J, c):
    x = J.mean(0)
    d = direction(J, c)
    assert (d - x).norm() <= c * x.norm() + half_the_digits(x.norm()) or (d == 0).all()
    if (d != 0).any():
        w = jd.aggregate(jd.cagrad(c), J).weights - 1 / len(J)
        bound = w @ J @ x + c * x.norm() * (w @ J).norm()
        assert (J @ d * w.sum()).min() >= bound - half_the_digits(w.sum() * J.norm() * x.norm())
    elif x.norm() > 0:
        N = torch.nn.functional.normalize(J, dim=1)
        last = torch.cat([N.T, torch.ones(1, len(J), dtype=torch.float64)])
        target = np.append(np.zeros(J.shape[1]), 1.0)
        assert nnls(last.numpy(), target)[1] <= STATIONARY or (J == 0).all(1).any()  # stationary
        shift, distance = nnls(N.T.numpy(), -x.numpy())
        assert (N @ (x + torch.from_numpy(shift) @ N)).min() >= -cone_bound(J) * x.norm()
        length = float((torch.from_numpy(shift) @ N).norm())
        assert abs(length**2 + distance**2 - x.norm() ** 2) <= half_the_digits(x.norm() ** 2)  # the nearest of all
        assert length <= c * float(x.norm()) * (1 + STATIONARY)  # the ball holds a direction without conflicts


@pytest.mark.parametrize("c", [0.1, 0.5, 0.9, 2.0, 10.0])
@pytest.mark.parametrize("m", [1, 2, 3, 5, 8, 16, 32, 64])
def test_certified_to_rounding(m, c):
    J = random_rows(m, m + 5)
    shifted = J - 0.9 * J.mean(0)
    generator = torch.Generator().manual_seed(m)
    spread = 10 ** (24 * torch.rand(m, 1, generator=generator, dtype=torch.float64) - 12)
    for rows in (J, shifted, spread * J, spread * shifted, torch.cat([J, J])):
        certified(rows, c)


@given(integer_jacobians())
def test_no_radius_is_the_mean(J):
    assert torch.equal(jd.aggregate(jd.cagrad(0), J).weights, jd.aggregate(mean(), J).weights)
    c = 1e-9
    tiny = direction(J, c)
    assert (tiny == 0).all() or (tiny - J.mean(0)).norm() <= c * J.mean(0).norm() + 64 * eps() * J.norm()


@pytest.mark.parametrize("m", [1, 2, 7, 30])
def test_stationary_rows_give_nothing_in_a_large_ball(m):
    J = random_rows(m, m + 2)
    positive = torch.linspace(1, 2, m, dtype=torch.float64).unsqueeze(1)
    for rows in (torch.cat([J, -2 * J]), torch.cat([J, -(positive * J).sum(0, keepdim=True)]), torch.cat([J, 0 * J])):
        assert (direction(rows, 1.5) == 0).all()
    assert (direction(torch.cat([J, -J]), 0.5) == 0).all()
    assert (direction(0 * J, 0.5) == 0).all()


def test_a_small_ball_may_have_to_conflict():
    # Around -0.5, within 0.25: the least of d and -2 d is greatest at -0.25.
    torch.testing.assert_close(direction(torch.tensor([[1.0], [-2.0]]), 0.5), torch.tensor([-0.25]))


@pytest.mark.parametrize("c", [0.5, 0.95, 2.0, 10.0])
def test_rows_of_low_rank_stay_in_the_ball_and_conflict_no_more_than_they_must(c):
    for seed, rank in ((0, 1), (1, 3), (2, 32), (3, 32)):
        J = random_rows(64, rank, seed=seed) @ random_rows(rank, 40, seed=9)
        x, d = J.mean(0), direction(J, c)
        assert (d == 0).all() or (d - x).norm() <= c * x.norm() + half_the_digits(x.norm())
        if c > 1:
            assert (J @ d >= -half_the_digits(x.norm()) * torch.linalg.vector_norm(J, dim=1)).all()


def test_a_tensor_of_zero_is_the_mean_with_the_slope_on_its_right():
    J = random_rows(4, 5, seed=3)
    zero, step = torch.zeros((), dtype=torch.float64), 1e-4
    f = lambda c: direction(J, c)
    torch.testing.assert_close(f(zero), J.mean(0))
    # For so small a ball only the row with the smallest gain matters: the direction is linear in c.
    slope = (f(step) - J.mean(0)) / step
    torch.testing.assert_close(slope.norm(), J.mean(0).norm())
    rounding = 16 * sum(J.shape) * eps() * J.norm()
    check_within(torch.func.jacfwd(f)(zero), slope, rounding / step)
    for c in (1e-12, 1e-9, 1e-8, 1e-6):
        check_within((f(torch.tensor(c).double()) - J.mean(0)) / c, slope, rounding * (1 / c + 1 / step))
