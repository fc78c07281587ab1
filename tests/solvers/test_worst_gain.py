"""The greatest least gain in a ball: its conditions, a bisection on the rows, and the operator."""

import pytest
import torch
from bounds import eps
from sequences import random_rows

from functional_jd.solvers import worst_gain
from functional_jd.solvers.worst_gain import worst_gain_multipliers


def problem(m, seed=0, spread=1.0):
    """Unit rows N, a unit vector x, sizes."""
    generator = torch.Generator().manual_seed(seed + m)
    N = torch.nn.functional.normalize(torch.randn(m, m + 2, generator=generator, dtype=torch.float64))
    x = torch.nn.functional.normalize(torch.randn(m + 2, generator=generator, dtype=torch.float64), dim=0)
    sizes = 10 ** (-spread * torch.rand(m, generator=generator, dtype=torch.float64))
    return N, x, sizes / sizes.max()


def solve(N, x, sizes, radius, solver="host"):
    return worst_gain_multipliers(N @ N.mT, (N @ x.unsqueeze(-1)).squeeze(-1), sizes, radius, solver)


def check_conditions(N, x, sizes, radius, solver="host"):
    v = solve(N, x, sizes, radius, solver)
    y = v @ N
    tau = (v @ (N @ (x + y))) / (v @ sizes)
    slack = N @ (x + y) - tau * sizes
    rounding = 64 * N.shape[1] * eps()
    assert abs(y.norm() - radius) <= rounding * v.sum()
    assert v.min() >= 0
    assert slack.min() >= -rounding * (1 + v.sum())
    assert (v * slack).abs().max() <= rounding * (1 + v.sum()) * v.max()


@pytest.mark.parametrize("radius", [1e-3, 0.5, 30.0])
@pytest.mark.parametrize("m", [1, 2, 7, 33])
@pytest.mark.parametrize("solver", ["host", "device"])
def test_the_conditions_hold(m, radius, solver):
    check_conditions(*problem(m, spread=12.0), radius, solver)


@pytest.mark.parametrize("radius", [10.0, 100.0])
def test_the_conditions_hold_far_out_in_few_dimensions(radius):
    for seed in range(12):
        N = random_rows(4, 3, seed=seed).abs()
        _, x, sizes = problem(4, seed, spread=0.0)
        check_conditions(torch.nn.functional.normalize(N), x[:3] / x[:3].norm(), sizes, radius)


def test_rows_that_cancel_have_no_answer_but_where_the_ball_is_too_small():
    N = torch.tensor([[1.0, 0], [-1, 0]], dtype=torch.float64)
    one = torch.ones(2, dtype=torch.float64)
    across, along = torch.tensor([[0.0, 1], [1, 0]], dtype=torch.float64)
    assert (solve(N, across, one, 0.5) == 0).all()
    assert (solve(N, along, one, 1.5) == 0).all()
    for radius in (0.1, 0.5):
        torch.testing.assert_close(solve(N, along, one, radius), torch.tensor([0, radius], dtype=torch.float64))


def test_rows_that_cancel_within_rounding_have_no_answer_either():
    for seed in range(6):
        unit = lambda *shape, seed=seed: torch.nn.functional.normalize(random_rows(*shape, seed=seed), dim=-1)
        in_few_dimensions, x, one = unit(33, 3), unit(3, seed=seed + 9), torch.ones(33, dtype=torch.float64)
        assert (solve(in_few_dimensions, x, one, 3.0) == 0).all()
        n, across = torch.linalg.qr(unit(4, 2))[0].unbind(1)
        nearly_opposite = torch.nn.functional.normalize(torch.stack([n, 7e-7 * across - n]))
        assert (solve(nearly_opposite, unit(4, seed=seed + 9), one[:2], 10.0) == 0).all()


def test_what_has_no_answer_has_derivatives_of_zero():
    N = torch.tensor([[1.0, 0], [-1, 0]], dtype=torch.float64)
    inputs = N, torch.tensor([0.0, 1], dtype=torch.float64), torch.ones(2, dtype=torch.float64)
    slopes = torch.func.grad(lambda inputs: solve(*inputs, 0.5).sum())(inputs)
    assert all(torch.equal(slope, torch.zeros_like(slope)) for slope in slopes)

    def total(inputs, radii):
        found = torch.vmap(lambda radius: solve(*inputs, radius))(radii)
        return torch.where(found.isfinite(), found, 0).sum()

    radii = torch.tensor([0.5, torch.nan], dtype=torch.float64)
    expected = torch.func.grad(total)(problem(5), radii[:1])
    torch.testing.assert_close(torch.func.grad(total)(problem(5), radii), expected)


def test_the_search_is_a_sound_operator():
    N, x, sizes = problem(4)
    torch.library.opcheck(worst_gain._opaque_search.op, (N @ N.T, N @ x, sizes, sizes.new_full((1,), 0.5)))
