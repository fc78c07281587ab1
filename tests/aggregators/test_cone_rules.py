"""UPGrad, PCD and CAGrad: slight conflicts, different norms, many rows; few rows are in `tests/exact`."""

import pytest
import torch
from bounds import check_within, cone_bound, eps, gramian_bound, half_the_digits, product_bound
from hypothesis import given
from sequences import integer_jacobians, random_rows

import functional_jd as jd
from functional_jd.testing.measures import distance_from_hull


def of_upgrad(J, preference=None):
    return jd.aggregate(jd.upgrad(preference), J).direction


def rounding(J):
    """How far two means of projected rows may lie apart."""
    return cone_bound(J) * float(torch.linalg.vector_norm(J, dim=1).mean())


@pytest.mark.parametrize("cosine", [1e-3, 1e-6, 1e-9, 1e-12])
@pytest.mark.parametrize("m", [2, 3, 30])
def test_the_slightest_conflict_counts(m, cosine):
    J = torch.eye(m, dtype=torch.float64)
    J[1, 0] = -cosine
    only_the_second = [float(i == 1) for i in range(m)]
    result = jd.aggregate(jd.upgrad(only_the_second), J)
    check_within(result.direction, torch.eye(m, dtype=torch.float64)[1], product_bound(result.weights, J))


@given(integer_jacobians())
def test_equal_to_the_mean_where_nothing_conflicts(J):
    for rule in (jd.upgrad(), jd.dualproj()):
        weights = jd.aggregate(rule, J.abs()).weights
        assert torch.equal(weights, torch.full((len(J),), 1 / len(J), dtype=torch.float64))


@given(integer_jacobians())
def test_a_row_of_zeros_counts_as_preferred_and_changes_nothing(J):
    m = len(J)
    padded = jd.aggregate(jd.upgrad(), torch.cat([J, torch.zeros_like(J[:1])]))
    check_within(padded.direction * (m + 1), of_upgrad(J) * m, m * rounding(J))
    assert padded.weights[m] == 1 / (m + 1)


@pytest.mark.parametrize("m", [2, 12, 40])
@pytest.mark.parametrize("tau", [0.0, 0.1])
def test_rows_of_very_different_norms_have_their_shares(m, tau):
    generator = torch.Generator().manual_seed(m)
    N = torch.nn.functional.normalize(torch.randn(m, m + 5, dtype=torch.float64, generator=generator))
    norms = 10 ** torch.linspace(-18, 18, m, dtype=torch.float64).flip(0)[torch.randperm(m, generator=generator)]
    weights = jd.aggregate(jd.pcd(tau), N * norms.unsqueeze(1)).weights
    steps = weights * norms / norms[0]  # of the unit rows, to a direction of length one
    multipliers = steps / steps[0]  # as the problem has them, where the first row counts one
    slack = (N @ (multipliers @ N) - tau)[1:]
    size = multipliers.abs().sum()
    rounding = float(gramian_bound(N))
    assert (steps @ N).norm() == pytest.approx(1, abs=rounding)
    assert multipliers.min() >= -rounding
    assert slack.min() >= -rounding * size
    assert (multipliers[1:] * slack).abs().max() <= rounding * size**2


def test_every_objective_has_its_own_share():
    # Both constraints bind: the second coordinate is 0.5, the third 0.25, and the first is free.
    J = torch.tensor([[1.0, 0.0, 0.0], [0.0, 1.0, 0.0], [0.0, 0.0, 1.0]], dtype=torch.float64)
    expected = torch.tensor([1.0, 0.5, 0.25], dtype=torch.float64)
    direction = jd.aggregate(jd.pcd([0.5, 0.25]), J).direction
    torch.testing.assert_close(direction, expected / expected.norm())


def of_cagrad(J, c=0.5):
    return jd.aggregate(jd.cagrad(c), J).direction


def certified(J, c):
    """Is the direction in the ball, and is no gain below what the weights prove to be the greatest least gain?

    For all d in the ball and w in the simplex, `min_i <g_i, d> <= <g_w, g_0> + c |g_0| |g_w|`. Every row is compared at
    its own norm, else the long ones hide the short ones.
    """
    weights, d = jd.aggregate(jd.cagrad(c), J).weights, of_cagrad(J, c)
    norms, mean = torch.linalg.vector_norm(J, dim=1), J.mean(0)
    rounding = 64 * sum(J.shape) * eps() * float(weights @ norms)  # of the sums that the mean and the direction are
    w = weights - 1 / len(J)
    assert w.min() >= -64 * sum(J.shape) * eps() * weights.max()
    w = w / w.sum()
    bound = w @ J @ mean + c * mean.norm() * (w @ J).norm()
    assert abs((d - mean).norm() - c * mean.norm()) <= rounding * (1 + c)
    assert ((J @ d - bound) / norms).min() >= -rounding


@pytest.mark.parametrize("c", [0.1, 0.5, 0.9, 2.0, 10.0])
@pytest.mark.parametrize("m", [1, 2, 3, 5, 8, 16, 32, 64])
def test_certified_to_rounding(m, c):
    J = random_rows(m, m + 5)
    shifted = J - 0.9 * J.mean(0)
    generator = torch.Generator().manual_seed(m)
    spread = 10 ** (24 * torch.rand(m, 1, generator=generator, dtype=torch.float64) - 12)
    for rows in (J, shifted, spread * J, spread * shifted, torch.cat([J, J])):
        certified(rows, c)


@pytest.mark.parametrize(("m", "n"), [(4, 2), (8, 4), (12, 6)])
def test_more_rows_than_parameters_are_certified_too(m, n):
    for seed in range(60):
        J = random_rows(m, n, seed=seed)
        for c in (0.8, 2.0, 5.0):
            if of_cagrad(J, c).any():  # else stationary
                certified(J, c)
        N = torch.nn.functional.normalize(J)
        if distance_from_hull(N[1:], torch.zeros(n)) < 1e-3:  # no direction has all shares
            continue
        multipliers = (weights := jd.aggregate(jd.pcd(0.1), N).weights) / weights[0]
        slack = (N @ (multipliers @ N) - 0.1)[1:]
        assert min(multipliers.min(), slack.min()) >= -(rounding := 1e3 * eps() * multipliers.abs().sum())
        assert (multipliers[1:] * slack).abs().max() <= rounding * multipliers.abs().sum()


@pytest.mark.parametrize(("m", "n", "apart"), [(3, 2, 1e-6), (6, 4, 1e-6), (8, 16, 1e-7)])
def test_rows_that_are_nearly_opposite_have_an_answer(m, n, apart):
    for seed in range(20):
        J = random_rows(m, n, seed=seed)
        J[1] = apart * J[1] - J[0]
        for rule in (jd.upgrad(), jd.dualproj(), jd.cagrad(2.0), jd.upgrad(solver="device")):
            assert jd.aggregate(rule, J).direction.isfinite().all()


@pytest.mark.parametrize("m", [2, 3, 5, 8])
def test_a_clipped_correction_has_no_larger_shares_than_the_preference(m):
    """By the formula, from the correction without a clip; its length stays."""
    J, c = random_rows(m, m + 3), 0.5
    u = torch.linspace(0.2, 1.0, m, dtype=torch.float64)
    center, free = u @ J, jd.aggregate(jd.cagrad(c, u), J).weights - u
    shares = torch.minimum(free / free.sum(), u / u.sum())
    assert shares.sum() < 0.999  # some are clipped
    expected = center + c * center.norm() * (shares @ J) / (shares @ J).norm()
    found = jd.aggregate(jd.cagrad(c, u, clip=True), J)
    # The search is exact to rounding, which the condition of the Gramian magnifies.
    limit = 64 * m * eps() * torch.linalg.cond(J @ J.T) * center.norm()
    check_within(found.direction, expected, limit)
    correction = found.weights - u
    assert (correction / correction.sum() <= u / u.sum() * (shares.sum() ** -1) + limit).all()


@given(integer_jacobians())
def test_no_radius_is_the_mean(J):
    assert torch.equal(jd.aggregate(jd.cagrad(0), J).weights, jd.aggregate(jd.mean(), J).weights)
    c = 1e-9
    tiny = of_cagrad(J, c)
    assert (tiny == 0).all() or (tiny - J.mean(0)).norm() <= c * J.mean(0).norm() + 64 * eps() * J.norm()


@pytest.mark.parametrize("m", [1, 2, 7, 30])
def test_stationary_rows_give_nothing_in_a_large_ball(m):
    J = random_rows(m, m + 2)
    positive = torch.linspace(1, 2, m, dtype=torch.float64).unsqueeze(1)
    for rows in (torch.cat([J, -2 * J]), torch.cat([J, -(positive * J).sum(0, keepdim=True)]), torch.cat([J, 0 * J])):
        assert (of_cagrad(rows, 1.5) == 0).all()
    assert (of_cagrad(torch.cat([J, -J]), 0.5) == 0).all()
    assert (of_cagrad(0 * J, 0.5) == 0).all()


@pytest.mark.parametrize("c", [0.5, 0.95, 2.0, 10.0])
def test_rows_of_low_rank_stay_in_the_ball_and_conflict_no_more_than_they_must(c):
    for seed, rank in ((0, 1), (1, 3), (2, 32), (3, 32)):
        J = random_rows(64, rank, seed=seed) @ random_rows(rank, 40, seed=9)
        x, d = J.mean(0), of_cagrad(J, c)
        assert (d == 0).all() or (d - x).norm() <= c * x.norm() + half_the_digits(x.norm())
        if c > 1:
            assert (J @ d >= -half_the_digits(x.norm()) * torch.linalg.vector_norm(J, dim=1)).all()


def test_a_tensor_of_zero_is_the_mean_with_the_slope_on_its_right():
    J = random_rows(4, 5, seed=3)
    zero, step = torch.zeros((), dtype=torch.float64), 1e-4
    f = lambda c: of_cagrad(J, c)
    torch.testing.assert_close(f(zero), J.mean(0))
    # For so small a ball only the row with the smallest gain matters: the direction is linear in c.
    slope = (f(step) - J.mean(0)) / step
    torch.testing.assert_close(slope.norm(), J.mean(0).norm())
    rounding = 16 * sum(J.shape) * eps() * J.norm()
    check_within(torch.func.jacfwd(f)(zero), slope, rounding / step)
    for c in (1e-12, 1e-9, 1e-8, 1e-6):
        check_within((f(torch.tensor(c).double()) - J.mean(0)) / c, slope, rounding * (1 / c + 1 / step))
