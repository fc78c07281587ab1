"""The equations: solutions leave nothing, the difficulty is the usual one, and Burgers' shock is as steep as known."""

from functools import partial
from math import pi

import pytest
import torch
from equations import ALLEN_CAHN, BURGERS, EQUATIONS, HELMHOLTZ, by_autograd, by_func

SMOOTH = [equation for equation in EQUATIONS if equation is not ALLEN_CAHN]  # of that one differences are looked at


@pytest.mark.parametrize("equation", SMOOTH, ids=lambda equation: equation.name)
@pytest.mark.parametrize("slopes", [by_func, by_autograd])
def test_the_solution_leaves_nothing(equation, slopes):
    x = equation.inside(100, seed=1)
    terms = slopes(equation.solution, x, equation.axes)
    left = equation.left(equation.solution(x), *terms, x)
    size = max(term.abs().max() for term in (terms[0], *terms[1].values()))
    assert left.abs().max() < 1e-6 * size


def test_burgers_by_the_integral_of_cole_and_hopf():
    # u = -int sin(pi y) exp(-cos(pi y) / (2 pi nu) - (x - y)^2 / (4 nu t)) dy / int exp(...) dy, by another quadrature.
    nu = 0.01 / pi
    y = torch.linspace(-3, 3, 20001, dtype=torch.float64)  # nothing is left of the heights at both ends
    for t, x in BURGERS.inside(20, seed=2).tolist():
        power = -torch.cos(pi * y) / (2 * pi * nu) - (x - y) ** 2 / (4 * nu * t)
        heights = torch.exp(power - power.max())
        expected = -(torch.sin(pi * y) * heights).sum() / heights.sum()
        found = BURGERS.solution(torch.tensor([[t, x]]).double())
        torch.testing.assert_close(found[0], expected, rtol=1e-6, atol=1e-7)


def test_burgers_is_as_steep_as_in_the_literature():
    # Basdevant et al., 1986: the steepest slope is 152.00516, at x = 0 and t = 1.6037 / pi.
    at = torch.tensor([[1.6037 / pi, 0.0]]).double()
    slope = torch.func.jacrev(lambda x: BURGERS.solution(x).sum())(at)[0, 1]
    assert float(slope) == pytest.approx(-152.00516, abs=1e-4)


def test_the_difficulty_is_the_usual_one():
    x = torch.rand(20, 2).double()
    torch.testing.assert_close(HELMHOLTZ.solution(x), torch.sin(pi * x[:, 0]) * torch.sin(4 * pi * x[:, 1]))
    # u_xx + u_yy + k^2 u = f with k = 1: with u = 0 what is left is -f.
    zero, source = torch.zeros(20).double(), (1 - 17 * pi**2) * HELMHOLTZ.solution(x)
    torch.testing.assert_close(HELMHOLTZ.left(zero, zero, {0: zero, 1: zero}, x), -source)
    second, none = torch.ones(20).double(), torch.zeros(20, 2).double()
    for equation, factor in ((BURGERS, 0.01 / pi), (ALLEN_CAHN, 1e-4)):
        torch.testing.assert_close(equation.left(zero, none, {1: second}, x), -factor * second)


def test_networks_for_a_periodic_solution_are_periodic():
    params, x = ALLEN_CAHN.network(0), ALLEN_CAHN.inside(10, seed=3)
    u = partial(ALLEN_CAHN.value, params)
    torch.testing.assert_close(u(x + torch.tensor([0.0, 2.0])), u(x))
    torch.testing.assert_close(torch.stack([u(point) for point in x]), u(x))
    first, second = by_func(u, x, (1,))
    torch.testing.assert_close((first, second), by_autograd(u, x, (1,)))
    assert len(ALLEN_CAHN.points()[2]) == 100
    assert (ALLEN_CAHN.points()[1][:, 0] == 0).all()
