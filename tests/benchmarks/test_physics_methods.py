"""The methods that are raced: steps for residuals are those of Gauss and Newton; all minimize the same sum."""

from dataclasses import replace

import physics_methods
import pytest
import torch
from equations import HELMHOLTZ, by_func
from physics_methods import ENGD_RATES, OUR_RATES, adam, contenders, residuals, with_soap

import functional_jd as jd

SMALL = replace(HELMHOLTZ, widths=(5,), counts=(20, 8))
POINTS, SHAPES = SMALL.points(), [p.shape for p in SMALL.network(0)]


@pytest.fixture(autouse=True)
def eager(monkeypatch):
    """Nothing is compiled here: the sum is the same."""
    monkeypatch.setattr(torch, "compile", lambda step, fullgraph: step)
    physics_methods.forget()
    yield
    physics_methods.forget()


def flat(params):
    return torch.cat([p.detach().flatten() for p in params])


def leaves(vector):
    pieces = vector.split([shape.numel() for shape in SHAPES])
    return [piece.view(shape) for piece, shape in zip(pieces, SHAPES, strict=True)]


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
        torch.testing.assert_close(r.square().sum(), loss(here))
        ridge = damping**0.5 * torch.eye(len(here)).double()
        direction = torch.linalg.lstsq(torch.cat([J, ridge]), torch.cat([r, torch.zeros(len(here)).double()])).solution
        expected = min((here - rate * direction for rate in rates), key=lambda vector: float(loss(vector)))
        torch.testing.assert_close(there, expected, rtol=1e-5, atol=1e-7)
        here = there


@pytest.mark.parametrize("method", ["Adam", "SOAP", "LBFGS", "ENGD-W", "natural_gradient", "levenberg_marquardt"])
def test_all_start_from_the_same_network_and_lower_the_same_sum(method):
    settings = contenders(SMALL)[method]
    advance = next(iter(settings.values()))(0)
    for step in range(8):
        params = advance(step / 8)
    start, end = loss(flat(SMALL.network(0))), loss(flat(params).double())
    assert end < start


def test_rates_of_first_order_methods_fall_to_zero():
    for make in (adam, with_soap):
        advance = make(SMALL, 0.1, 0)
        lengths, before = [], flat(advance(0.0))
        for share in (0.0, 0.5, 1.0):
            after = flat(advance(share))
            lengths.append((after - before).abs().max())
            before = after
        assert lengths[2] < 1e-6 < lengths[1] < lengths[0]


def test_adam_is_that_of_torch():
    advance = adam(SMALL, 0.01, 0)
    params = [p.float().requires_grad_() for p in SMALL.network(0)]
    optimizer = torch.optim.Adam(params, lr=0.01)
    points = tuple(x.float() for x in POINTS)
    for _ in range(5):
        optimizer.zero_grad()
        sum(SMALL.losses(params, points, by_func).values()).backward()
        optimizer.step()
        found = advance(0.0)
    torch.testing.assert_close(flat(found), flat(params), rtol=1e-3, atol=1e-5)
