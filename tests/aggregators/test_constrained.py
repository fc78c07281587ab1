"""Constraints: where SciPy leads, and the formula in NumPy."""

from functools import partial
from math import inf

import numpy as np
import pytest
import torch
from bounds import check_within, eps, half_the_digits
from hypothesis import given
from hypothesis import strategies as st
from scipy.optimize import minimize

import functional_jd as jd

BOUNDED = {
    "disc": ([lambda w: (w - torch.tensor([2.0, 1.0])).square().sum(), lambda w: w.square().sum()], [inf, 1.0], 2),
    "two bounds, one of them slack": (
        [lambda w: (w - 3).square().sum(), lambda w: w.sum(), lambda w: w.square().sum()],
        [inf, 2.0, 100.0],
        3,
    ),
    "Rosenbrock, the bound first": (
        [lambda w: w.square().sum(), lambda w: (1 - w[0]).square() + 10 * (w[1] - w[0].square()).square()],
        [1.0, inf],
        2,
    ),
}


@pytest.mark.parametrize("name", BOUNDED)
def test_it_leads_where_slsqp_does_and_rests_there(name):
    functions, bounds, n = BOUNDED[name]
    at = lambda x, i: float(functions[i](torch.tensor(x)))
    room = [{"type": "ineq", "fun": lambda x, i=i: bounds[i] - at(x, i)} for i, b in enumerate(bounds) if b < inf]
    options = {"ftol": 1e-14}
    expected = minimize(at, [0.0] * n, bounds.index(inf), method="SLSQP", constraints=room, options=options).x
    rule = jd.aggregators.constrained(bounds)
    how = {"losses": lambda w: [f(w) for f in functions], "optimizer": jd.sgd(0.02), "aggregator": rule}
    state = jd.train_state(torch.zeros(n, dtype=torch.float64), **how)
    take = jd.compiled(partial(jd.step, **how), backend="eager")
    for _ in range(3000):
        state, info = take(state)
    check_within(state.params, torch.tensor(expected), half_the_digits() * 4)  # SLSQP differentiates by differences
    check_within(info.weights, state.aggregator["multipliers"], half_the_digits() * 4)
    slack = torch.stack(list(info.losses)) < torch.tensor(bounds) - 0.5
    assert not state.aggregator["multipliers"][slack & (torch.tensor(bounds) < inf)].any()


@given(
    st.lists(st.lists(st.floats(-4, 4), min_size=3, max_size=3), min_size=1, max_size=6),
    st.lists(st.sampled_from([-1.0, 0.0, 2.0, inf]), min_size=3, max_size=3),
    st.floats(0.01, 4),
    st.floats(0, 4),
)
def test_weights_are_those_of_the_formula_by_hand(calls, bounds, rate, damping):
    rule, state, bounded = jd.aggregators.constrained(bounds, rate, damping), None, np.array(bounds) < inf
    multipliers = np.where(bounded, 0.0, 1.0)
    for values in calls:
        excess = np.where(bounded, np.array(values) - np.where(bounded, bounds, 0), 0)
        # A loss of exactly 0 is absent.
        multipliers = np.where(np.array(values) == 0, multipliers, np.maximum(0, multipliers + rate * excess))
        losses = torch.tensor(values, dtype=torch.float64)
        found = jd.aggregate(rule, torch.zeros(3, 2), state, losses=losses)
        state = found.state
        check_within(state["multipliers"], torch.from_numpy(multipliers), 2**8 * eps() * (1 + rate))
        if all(values):
            weights = np.maximum(0, multipliers + damping * excess)
            check_within(found.weights, torch.from_numpy(weights), 2**8 * eps() * (1 + rate + damping))


def test_one_bound_per_loss():
    with pytest.raises(ValueError, match="constrained: bounds must be one per row, found 1 and 2 rows"):
        jd.aggregate(jd.aggregators.constrained([0.5]), torch.ones(2, 2), losses=torch.ones(2))
    with pytest.raises(ValueError, match=r"constrained: bounds must be numbers, or math\.inf for none, found"):
        jd.aggregators.constrained([torch.nan, 0.5])
