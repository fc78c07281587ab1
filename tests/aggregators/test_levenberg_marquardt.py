"""Levenberg-Marquardt: Nielsen's update by hand, bad starts that recover, and steps that are taken back."""

import numpy as np
import pytest
import torch
from bounds import check_stable, check_within, eps
from sequences import random_rows

import functional_jd as fj


def by_hand(x, damping, ones, take_back=False):
    """Parameters and dampings in the space of parameters, in NumPy, in as many steps as there are rows of ones.

    Nielsen's own method takes back a step that makes the residuals larger, and then tries a larger damping from there.
    The ones may be moved, to see what roundings do: of the values, of which the gain is a small difference, and of the
    Gramian, of which the rule makes its weights: a solver is as if its matrix were off by roundings of its norm.
    """
    growth, value, predicted, dampings = 2.0, None, None, []
    for one, *others in ones:
        r, J = residuals(x), slopes(x)
        if value is not None:
            q = (value - one * (r @ r) / 2) / predicted
            damping, growth = (
                (damping * max(1 / 3, 1 - (2 * min(q, 1) - 1) ** 3), 2) if q > 0 else (damping * growth, 2 * growth)
            )
        G, eye = J @ J.T, np.eye(2)
        rounding = np.linalg.norm(G) * (np.reshape(others, (2, 2)) - 1)
        rounded = np.linalg.solve(G + rounding + damping * eye, r)
        step = np.linalg.solve(J.T @ J + damping * eye, J.T @ r)
        step = step + J.T @ (rounded - np.linalg.solve(G + damping * eye, r))
        value = one * (r @ r) / 2
        predicted = value - ((r - J @ step) @ (r - J @ step)) / 2
        dampings.append(damping)
        x = x if take_back and (residuals(x - step) ** 2).sum() >= r @ r else x - step
    return x, dampings


def rosenbrock(p, i):
    return torch.where(i == 0, 10 * (p["x"][1] - p["x"][0] ** 2), 1 - p["x"][0])


def trained(damping, n, optimizer=None):
    params, index = {"x": torch.tensor([-1.2, 1.0], dtype=torch.float64)}, torch.arange(2)
    rule = fj.levenberg_marquardt(damping)
    how = {"losses": fj.per_example(rosenbrock), "aggregator": rule, "optimizer": optimizer or fj.sgd(1.0)}
    state, dampings = fj.train_state(params, index, **how), []
    for _ in range(n):
        state, _ = fj.step(state, index, **how)
        dampings.append(float(state.aggregator.damping))
    return state.params["x"], dampings


def residuals(x):
    return np.array([10 * (x[1] - x[0] ** 2), 1 - x[0]])


def slopes(x):
    return np.array([[-20 * x[0], 10.0], [-1.0, 0.0]])


@pytest.mark.parametrize("damping", [1e-2, 1.0, 100.0])
def test_equal_to_the_update_by_hand(damping):
    def expected(start, damping, ones):
        x, dampings = by_hand(start.numpy(), damping.item(), ones.numpy())
        return torch.from_numpy(x), torch.tensor(dampings, dtype=torch.float64)

    x, dampings = trained(damping, 6)
    found = (x, torch.tensor(dampings, dtype=torch.float64))
    given = (torch.tensor([-1.2, 1.0], dtype=torch.float64), torch.tensor(damping, dtype=torch.float64))
    check_stable(found, expected, *given, torch.ones(6, 5, dtype=torch.float64))


@pytest.mark.parametrize("damping", [1e-9, 1e9])
def test_a_bad_start_recovers(damping):
    x, _ = trained(damping, 100)
    # At (1, 1), residuals are off by the roundings of 10 (1 - 1) and of 1 - 1, parameters by the inverse times these.
    inverse = torch.tensor([[-20.0, 10.0], [-1.0, 0.0]], dtype=torch.float64).inverse()
    check_within(x, torch.ones(2), 32 * eps() * (inverse.abs() @ torch.tensor([20.0, 2.0], dtype=torch.float64)))


def test_with_the_rates_1_and_0_failed_steps_are_taken_back():
    found, dampings = trained(1e-3, 12, optimizer=fj.line_search(fj.sgd(1.0), [1.0, 0.0]))
    expected, others = by_hand(np.array([-1.2, 1.0]), 1e-3, np.ones((12, 5)), take_back=True)
    assert (np.diff(others) > 0).sum() >= 3
    # A damping follows from a gain, which is a small difference of two values, in each of 12 steps.
    assert dampings == pytest.approx(others, rel=12 * 2**18 * eps())
    check_within(found, torch.from_numpy(expected), 12 * 2**18 * eps())


def test_the_damping_stays_above_the_rounding_of_the_gramian():
    J = random_rows(3, 5)
    G, r = J @ J.T, torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64)
    least = 8 * 3 * eps() * G.diagonal().amax()
    rule = fj.levenberg_marquardt(float(1.5 * least))
    w, state = rule.update((G, r), rule.init((G, r)))
    assert state.damping == float(1.5 * least)
    _, state = rule.update((G, r - G @ w), state)  # as predicted: a third would be below
    assert state.damping == least
