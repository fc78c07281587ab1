"""Levenberg-Marquardt: Nielsen's update by hand, bad starts that recover, transforms and derivatives."""

from functools import partial

import numpy as np
import pytest
import torch
from torch.utils._pytree import tree_map

import functional_jd as fj


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def by_hand(f, jacobian, x, damping, n):
    """Parameters and dampings in the space of parameters, in NumPy."""
    growth, value, predicted, dampings = 2.0, None, None, []
    for _ in range(n):
        r, J = f(x), jacobian(x)
        if value is not None:
            q = (value - r @ r / 2) / predicted
            damping, growth = (
                (damping * max(1 / 3, 1 - (2 * min(q, 1) - 1) ** 3), 2) if q > 0 else (damping * growth, 2 * growth)
            )
        step = np.linalg.solve(J.T @ J + damping * np.eye(len(x)), J.T @ r)
        value = r @ r / 2
        predicted = value - ((r - J @ step) @ (r - J @ step)) / 2
        dampings.append(damping)
        x = x - step
    return x, dampings


def rosenbrock(p, i):
    return torch.where(i == 0, 10 * (p["x"][1] - p["x"][0] ** 2), 1 - p["x"][0])


def trained(damping, n, x=(-1.2, 1.0), rule=None):
    params, index = {"x": torch.tensor(x, dtype=torch.float64)}, torch.arange(2)
    rule = fj.levenberg_marquardt(damping) if rule is None else rule
    how = {"losses": fj.per_example(rosenbrock), "aggregator": rule, "optimizer": fj.sgd(1.0)}
    state, dampings = fj.train_state(params, index, **how), []
    for _ in range(n):
        state, _ = fj.step(state, index, **how)
        if isinstance(state.aggregator, tuple) and state.aggregator:
            dampings.append(float(state.aggregator.damping))
    return state.params["x"], dampings


@pytest.mark.parametrize("damping", [1e-2, 1.0, 100.0])
def test_equal_to_the_update_by_hand(damping):
    f = lambda x: np.array([10 * (x[1] - x[0] ** 2), 1 - x[0]])
    jacobian = lambda x: np.array([[-20 * x[0], 10.0], [-1.0, 0.0]])
    expected, expected_dampings = by_hand(f, jacobian, np.array([-1.2, 1.0]), damping, 6)
    x, dampings = trained(damping, 6)
    np.testing.assert_allclose(dampings, expected_dampings, rtol=1e-6)
    np.testing.assert_allclose(x.numpy(), expected, rtol=1e-6)


@pytest.mark.parametrize("damping", [1e-9, 1.0, 1e9])
def test_a_bad_start_recovers(damping):
    x, _ = trained(damping, 100)
    torch.testing.assert_close(x, torch.ones(2, dtype=torch.float64), rtol=1e-6, atol=0)
    if damping == 1e9:  # where a fixed damping stays
        x, _ = trained(None, 100, rule=fj.natural_gradient(damping))
        assert (x - torch.tensor([-1.2, 1.0], dtype=torch.float64)).abs().max() < 1e-3


def three_steps(J, r, damping):
    rule, state = fj.levenberg_marquardt(damping), None
    found = []
    for k in range(3):
        result = fj.aggregate(rule, J * (1 + k), state, losses=r * (3 - k))
        state = result.state
        found.append(result.direction)
    return torch.stack(found)


def test_derivatives_are_those_of_finite_differences():
    inputs = (normal(3, 4), normal(3, seed=1), torch.tensor(0.5, dtype=torch.float64))
    assert torch.autograd.gradcheck(three_steps, [x.clone().requires_grad_() for x in inputs], check_forward_ad=True)


def test_sweeps_and_compiled_steps():
    J, r, dampings = normal(3, 4), normal(3, seed=1), torch.tensor([0.1, 1.0, 10.0], dtype=torch.float64)
    loop = torch.stack([three_steps(J, r, float(damping)) for damping in dampings])
    torch.testing.assert_close(torch.vmap(partial(three_steps, J, r))(dampings), loop)
    torch.compiler.reset()
    slopes = torch.vmap(torch.func.grad(lambda damping: three_steps(J, r, damping).square().sum()))
    torch.testing.assert_close(torch.compile(slopes, fullgraph=True, backend="aot_eager")(dampings), slopes(dampings))


def test_a_skipped_step_keeps_the_damping():
    params, index = {"x": torch.tensor([-1.2, 1.0], dtype=torch.float64)}, torch.arange(2)
    losses = fj.per_example(lambda p, i, bad: rosenbrock(p, i) + bad)
    how = {"losses": losses, "aggregator": fj.levenberg_marquardt(), "optimizer": fj.sgd(1.0)}
    good, bad = torch.zeros(2).double(), torch.tensor([0.0, torch.nan]).double()
    state, _ = fj.step(fj.train_state(params, index, good, **how), index, good, **how)
    skipped, info = fj.step(state, index, bad, **how)
    assert not info.moved
    assert all(map(torch.equal, skipped.aggregator, state.aggregator))


def test_dampings_are_checked():
    with pytest.raises(ValueError, match=r"levenberg_marquardt: damping must be positive and finite, found 0"):
        fj.levenberg_marquardt(0.0)
    assert tree_map(lambda x: x.shape, three_steps(normal(2, 2), normal(2), 1.0)) == (3, 2)
