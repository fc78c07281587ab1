"""CAGrad: certified by weak duality, by other solvers, and by the peer."""

import numpy as np
import pytest
import torch
from bounds import cone_bound, eps, half_the_digits
from hypothesis import given
from hypothesis import strategies as st
from scipy.optimize import minimize, nnls
from sequences import integer_jacobians, random_rows

from functional_jd.aggregation.aggregate import aggregate
from functional_jd.aggregators.cagrad import cagrad
from functional_jd.aggregators.mean import mean

radii = st.sampled_from([0.1, 0.4, 0.5, 0.9, 1.0, 2.0, 10.0])


def direction(J, c=0.5):
    return aggregate(cagrad(c), J).direction


def certified(J, c):
    """Is the direction in the ball, and is no gain below what the weights prove to be the greatest least gain?

    For all d in the ball and w in the simplex, `min_i <g_i, d> <= <g_w, g_0> + c |g_0| |g_w|`. Every row is compared at
    its own norm, else the long ones hide the short ones.
    """
    weights, d = aggregate(cagrad(c), J).weights, direction(J, c)
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
        w = aggregate(cagrad(c), J).weights - 1 / len(J)
        bound = w @ J @ x + c * x.norm() * (w @ J).norm()
        assert (J @ d * w.sum()).min() >= bound - half_the_digits(w.sum() * J.norm() * x.norm())
    elif x.norm() > 0:
        N = torch.nn.functional.normalize(J, dim=1)
        last = torch.cat([N.T, torch.ones(1, len(J), dtype=torch.float64)])
        target = np.append(np.zeros(J.shape[1]), 1.0)
        assert nnls(last.numpy(), target)[1] <= 1e-6 or (J == 0).all(1).any()  # stationary
        shift, distance = nnls(N.T.numpy(), -x.numpy())
        assert (N @ (x + torch.from_numpy(shift) @ N)).min() >= -cone_bound(J) * x.norm()
        length = float((torch.from_numpy(shift) @ N).norm())
        assert abs(length**2 + distance**2 - x.norm() ** 2) <= half_the_digits(x.norm() ** 2)  # the nearest of all
        assert length <= c * float(x.norm()) * (1 + 1e-6)  # the ball holds a direction without conflicts


@pytest.mark.parametrize("c", [0.1, 0.5, 0.9, 2.0, 10.0])
@pytest.mark.parametrize("m", [1, 2, 3, 5, 8, 16, 32, 64])
def test_certified_to_rounding(m, c):
    J = random_rows(m, m + 5)
    shifted = J - 0.9 * J.mean(0)
    generator = torch.Generator().manual_seed(m)
    spread = 10 ** (24 * torch.rand(m, 1, generator=generator, dtype=torch.float64) - 12)
    for rows in (J, shifted, spread * J, spread * shifted, torch.cat([J, J])):
        certified(rows, c)


@pytest.mark.parametrize("c", [0.3, 0.7, 1.5])
@pytest.mark.parametrize("m", [2, 3, 5])
def test_equal_to_the_best_of_many_starts_in_the_ball(m, c):
    J = random_rows(m, m + 1, seed=m)
    J = (J - 0.7 * J.mean(0)) / J.norm(dim=1, keepdim=True)
    x = J.mean(0)
    rows, centre, radius = J.numpy(), x.numpy(), c * float(x.norm())
    constraints = [
        {"type": "ineq", "fun": lambda z: rows @ z[1:] - z[0], "jac": lambda z: np.c_[-np.ones(m), rows]},
        {
            "type": "ineq",
            "fun": lambda z: 1 - ((z[1:] - centre) ** 2).sum() / radius**2,
            "jac": lambda z: np.append(0, -2 * (z[1:] - centre) / radius**2),
        },
    ]
    slope = np.append(-1.0, np.zeros(m + 1))
    found = [
        minimize(
            lambda z: -z[0],
            np.append(0, centre + start.numpy() * radius / 9),
            jac=lambda z: slope,
            constraints=constraints,
            method="SLSQP",
            options={"ftol": 1e-15, "maxiter": 500},
        )
        for start in random_rows(5, m + 1)
    ]
    best = max(found, key=lambda result: result.x[0] if result.success else -np.inf)
    d = direction(J, c)
    assert float((J @ d).min()) >= best.x[0] - 1e-10 * radius
    torch.testing.assert_close(d, torch.from_numpy(best.x[1:]), rtol=0, atol=1e-5 * radius)


def test_two_orthogonal_rows_in_closed_form():
    # For equal gains, d = t (1 / a, 1 / b), on the circle around (a, b) / 2 of radius c |(a, b)| / 2.
    for a, b, c in ((2.0, 3.0, 0.8), (1.0, 1.2, 0.5), (1e-6, 1.2e-6, 0.5)):
        p, r = 1 / a**2 + 1 / b**2, (1 - c**2) * (a**2 + b**2) / 4
        t = (1 + (1 - p * r) ** 0.5) / p
        expected = torch.tensor([t / a, t / b], dtype=torch.float64)
        torch.testing.assert_close(direction(torch.tensor([[a, 0], [0, b]], dtype=torch.float64), c), expected)
    # A row that is short enough gains least also where the whole radius is its own.
    expected = torch.tensor([0.5 + 0.7 * 2.5**0.5, 1.5], dtype=torch.float64)
    torch.testing.assert_close(direction(torch.tensor([[1.0, 0], [0, 3]]).double(), 0.7), expected)


def test_values_of_torchjd():
    # CAGrad(c=0.4)(J) and c=0.5 for the first, TorchJD 0.18; where its solver is exact to the digits printed.
    first = [[-4.0, 1, 1], [6, 1, 1]]
    second = [[5.0, 2, -4, -2], [3, -2, -1, -5], [1, 3, 4, -1]]
    third = [[-3.0, 3, 0, 5, -2, 1], [4, -3, 5, -1, -1, 5], [2, 2, -4, -3, -3, -1]]
    third += [[-4, 3, 4, 1, -2, 2], [-5, -5, 5, -2, -4, 1], [-1, -4, 3, 4, 1, -1]]
    for J, c, expected in (
        (first, 0.5, [0.1835, 1.2041, 1.2041]),
        (first, 0.4, [0.3468, 1.1633, 1.1633]),
        (second, 0.4, [3.31946, 1.95839, 0.94452, -2.98613]),
        (third, 0.4, [-0.74996, -0.24996, 1.33326, 0.04161, -2.45839, 0.95831]),
    ):
        found = direction(torch.tensor(J, dtype=torch.float64), c)
        torch.testing.assert_close(found, torch.tensor(expected, dtype=torch.float64), rtol=0, atol=1e-4)


@given(integer_jacobians())
def test_no_radius_is_the_mean(J):
    assert torch.equal(aggregate(cagrad(0), J).weights, aggregate(mean(), J).weights)
    tiny = direction(J, 1e-9)
    assert (tiny == 0).all() or (tiny - J.mean(0)).norm() <= 1.01e-9 * J.mean(0).norm()


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


def test_derivatives_are_those_of_finite_differences():
    for m, c in ((1, 0.5), (2, 0.5), (3, 0.9), (6, 0.4), (4, 2.0)):
        J = torch.nn.functional.normalize(random_rows(m, m + 1, seed=m), dim=1)
        J = (J * torch.linspace(1, 1.3, m, dtype=torch.float64).unsqueeze(1)).requires_grad_()
        assert m == 1 or (aggregate(cagrad(c), J).weights > 1 / m + 1e-3).sum() >= 2
        f = lambda J, c=c: direction(J, c)
        assert torch.autograd.gradcheck(f, J, check_forward_ad=True)
        assert m == 6 or torch.autograd.gradgradcheck(f, J)


@pytest.mark.parametrize("c", [0.5, 0.95, 2.0, 10.0])
def test_rows_of_low_rank_stay_in_the_ball_and_conflict_no_more_than_they_must(c):
    for seed, rank in ((0, 1), (1, 3), (2, 32), (3, 32)):
        J = random_rows(64, rank, seed=seed) @ random_rows(rank, 40, seed=9)
        x, d = J.mean(0), direction(J, c)
        assert (d == 0).all() or (d - x).norm() <= c * x.norm() + half_the_digits(x.norm())
        if c > 1:
            assert (J @ d >= -half_the_digits(x.norm()) * torch.linalg.vector_norm(J, dim=1)).all()


@pytest.mark.parametrize("c", [0.05, 0.4, 0.9, 2.5])
@pytest.mark.parametrize("m", [2, 3, 6])
def test_derivatives_in_c_are_those_of_differences(m, c):
    J = random_rows(m, m + 1, seed=m)
    J = J - 0.7 * J.mean(0)
    f, x, h = lambda c: direction(J, c), torch.tensor(c, dtype=torch.float64), 1e-5 * c
    slope = (f(c + h) - f(c - h)) / (2 * h)
    torch.testing.assert_close(torch.func.jacfwd(f)(x), slope, rtol=1e-6, atol=1e-8)
    torch.testing.assert_close(torch.func.jacrev(f)(x), slope, rtol=1e-6, atol=1e-8)
    second = (torch.func.jacfwd(f)(x + h) - torch.func.jacfwd(f)(x - h)) / (2 * h)
    torch.testing.assert_close(torch.func.jacrev(torch.func.jacfwd(f))(x), second, rtol=1e-6, atol=1e-7)


def test_a_tensor_of_zero_is_the_mean_with_the_slope_on_its_right():
    J = random_rows(4, 5, seed=3)
    zero, step = torch.zeros((), dtype=torch.float64), 1e-4
    f = lambda c: direction(J, c)
    torch.testing.assert_close(f(zero), J.mean(0))
    # For so small a ball only the row with the smallest gain matters: the direction is linear in c.
    slope = (f(step) - J.mean(0)) / step
    torch.testing.assert_close(slope.norm(), J.mean(0).norm())
    torch.testing.assert_close(torch.func.jacfwd(f)(zero), slope, rtol=1e-6, atol=1e-7)
    for c in (1e-12, 1e-9, 1e-8, 1e-6):
        torch.testing.assert_close(
            (f(torch.tensor(c).double()) - J.mean(0)) / c, slope, rtol=0, atol=16 * eps() / c + 1e-7
        )
