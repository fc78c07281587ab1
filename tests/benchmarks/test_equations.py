"""Networks that solve equations: the references are right, methods minimise the same sum, validation chooses."""

from dataclasses import replace
from math import pi

import physics_methods
import pytest
import soap
import torch
from bounds import check_within, eps
from equations import ALLEN_CAHN, BURGERS, EQUATIONS, HELMHOLTZ, by_autograd, by_func
from page import BEGIN, END
from physics import OURS, Found, best_setting, least_error, main
from physics_methods import ENGD_RATES, OUR_RATES, contenders, residuals

import functional_jd as jd

SMALL = replace(HELMHOLTZ, widths=(5,), counts=(20, 8))
POINTS, SHAPES = SMALL.points(), [p.shape for p in SMALL.network(0)]


@pytest.mark.parametrize("equation", [e for e in EQUATIONS if e is not ALLEN_CAHN], ids=lambda e: e.name)
@pytest.mark.parametrize("slopes", [by_func, by_autograd])
def test_the_solution_leaves_nothing(equation, slopes):
    x = equation.inside(100, seed=1)
    terms = slopes(equation.solution, x, equation.axes)
    size = max(term.abs().max() for term in (terms[0], *terms[1].values()))
    assert equation.left(equation.solution(x), *terms, x).abs().max() < 1e-6 * size


def test_burgers_is_as_steep_as_in_the_literature():
    """Basdevant et al., 1986: the steepest slope is 152.00516, at x = 0 and t = 1.6037 / pi."""
    at = torch.tensor([[1.6037 / pi, 0.0]]).double()
    slope = torch.func.jacrev(lambda x: BURGERS.solution(x).sum())(at)[0, 1]
    assert float(slope) == pytest.approx(-152.00516, abs=1e-4)


def test_differences_of_the_solution_of_allen_and_cahn_satisfy_the_equation():
    x, h = ALLEN_CAHN.inside(200, seed=0) * 0.98 + torch.tensor([0.01, 0.0]), 1e-4
    t_step, x_step = torch.tensor([h, 0.0]).double(), torch.tensor([0.0, h]).double()
    u = ALLEN_CAHN.solution(x)
    slope = (ALLEN_CAHN.solution(x + t_step) - ALLEN_CAHN.solution(x - t_step)) / (2 * h)
    bend = (ALLEN_CAHN.solution(x + x_step) - 2 * u + ALLEN_CAHN.solution(x - x_step)) / h**2
    terms = slope, -1e-4 * bend, 5 * u**3 - 5 * u
    assert sum(terms).abs().max() < 1e-3 * max(term.abs().max() for term in terms)


def flat(params):
    return torch.cat([p.detach().flatten() for p in params])


def leaves(vector):
    return [piece.view(shape) for piece, shape in zip(vector.split([s.numel() for s in SHAPES]), SHAPES, strict=True)]


def all_residuals(vector):
    inside, edge, known = POINTS
    within = SMALL.inside_residual(leaves(vector), inside, by_func)
    beside = SMALL.value(leaves(vector), edge) - known
    return torch.cat([within / 20**0.5, beside * (100 / 8) ** 0.5])


def loss(vector):
    return sum(SMALL.losses(leaves(vector), POINTS, by_func).values())


@pytest.mark.parametrize("rates", [OUR_RATES, ENGD_RATES], ids=["ours", "ENGD-W"])
@pytest.mark.parametrize("damping", [1e-1, 1e-3, 1e-6])
def test_a_step_for_residuals_is_a_dense_step_of_gauss_and_newton(rates, damping):
    advance = residuals(SMALL, jd.natural_gradient(damping), rates, seed=0)
    here = flat(SMALL.network(0))
    for _ in range(3):
        there = flat(advance(0.0))
        r, J = all_residuals(here), torch.func.jacfwd(all_residuals)(here)
        check_within(r.square().sum(), loss(here), 64 * eps() * loss(here))
        stacked = torch.cat([J, damping**0.5 * torch.eye(len(here)).double()])
        direction = torch.linalg.lstsq(stacked, torch.cat([r, torch.zeros(len(here)).double()])).solution
        expected = min((here - rate * direction for rate in rates), key=lambda vector: float(loss(vector)))
        # The system is solved by its Gramian, which squares the condition, at most |J|^2 / damping.
        condition = float(torch.linalg.matrix_norm(J, 2)) ** 2 / damping + 1
        check_within(there, expected, min(64 * eps() * condition, eps() ** 0.5) * (1 + direction.norm()))
        here = there


@pytest.mark.parametrize("method", ["Adam", "SOAP", "LBFGS", "ENGD-W", "natural_gradient", "levenberg_marquardt"])
def test_all_start_from_the_same_network_and_lower_the_same_sum(method, monkeypatch):
    monkeypatch.setattr(torch, "compile", lambda step, fullgraph: step)
    physics_methods.forget()
    advance = next(iter(contenders(SMALL)[method].values()))(0)
    for step in range(8):
        params = advance(step / 8)
    physics_methods.forget()
    assert loss(flat(params).double()) < loss(flat(SMALL.network(0)))


def test_soap_is_adam_where_the_factors_are_diagonal():
    curvatures = torch.tensor([0.2, 1.0, 3.0]).double()
    vector = torch.tensor([1.0, -2.0, 1.5]).double()
    both = (vector, lambda leaf: curvatures * leaf), (vector.diag(), lambda leaf: (curvatures * leaf.diagonal()).diag())
    for leaf, gradient in both:
        theirs, moments = leaf.clone().requires_grad_(), soap.start(gradient(leaf))
        optimizer = torch.optim.Adam([theirs], lr=0.05, betas=soap.BETAS[:2], eps=1e-8)
        for t in range(1, 31):
            now = torch.tensor(float(t)).double()
            leaf, moments = soap.advance(leaf, gradient(leaf), moments, torch.tensor(0.05).double(), now)
            moments = soap.turned(moments) if t % soap.EVERY == 0 else moments
            theirs.grad = gradient(theirs.detach())
            optimizer.step()
        torch.testing.assert_close(leaf, theirs.detach())


def test_the_error_is_that_of_the_moment_that_validation_chooses(monkeypatch):
    monkeypatch.setattr("physics._LOOKS", 4)
    errors = {"validation": (0.9, 0.3, 0.2, 0.4), "test": (0.8, 0.1, 0.5, 0.6)}
    made = type("Made", (), {"error": lambda self, step, split: errors[split][step]})()
    steps, ticks = iter(range(9)), iter(range(99))
    found = least_error(made, lambda share: next(steps), 4.0, clock=lambda: float(next(ticks)))  # a second each
    assert found == (0.2, 0.5)  # not the least test error, 0.1


def test_the_first_seed_chooses_the_setting_and_every_seed_is_shown():
    errors = {"small": {0: (0.3, 0.1), 1: (9, 9)}, "middle": {0: (0.2, 0.4), 1: (0.5, 0.6)}, "large": {0: (0.25, 0.2)}}

    def maker(setting):
        def make(seed):
            method = lambda _: None
            method.errors = errors[setting].get(seed)
            return method

        return make

    found = best_setting({name: maker(name) for name in errors}, lambda method: method.errors, seeds=(0, 1))
    assert found == Found("middle", False, [0.4, 0.6])


def test_both_pages_get_their_tables(tmp_path, monkeypatch):
    found = {"Adam": Found("rate 0.01", True, [0.4]), OURS: Found("damping 0.001", False, [0.001])}
    monkeypatch.setattr("physics.race", lambda equation, seconds: found)
    pages = tmp_path / "tests" / "benchmarks" / "REPORT.md", tmp_path / "docs" / "guides" / "physics.md"
    for page, name in zip(pages, ("equations", "errors"), strict=True):
        page.parent.mkdir(parents=True)
        page.write_text(f"before\n{BEGIN.format(name).replace('page.py', 'physics.py')}\n{END.format(name)}\nafter\n")
    main(["6", "--root", str(tmp_path)])
    assert "rate 0.01 (the end of its grid)" in pages[0].read_text()
    assert "Reached: 1/200 on Helmholtz (1/400)" in pages[1].read_text()
