"""Balancers of physics-informed losses, against their papers' formulas in NumPy."""

import numpy as np
import pytest
import torch
from bounds import eps
from scipy.special import softmax

import functional_jd as jd
from functional_jd import aggregators

CALLS = np.array([[1.0, 2.0, 8.0], [1.5, 1.8, 4.0], [0.5, 2.0, 1.0], [0.4, 1.0, 2.0]])
KEY = jd.random.key(0)


def weights_of(rule, calls=CALLS):
    state, found = None, []
    for values in calls:
        result = jd.aggregate(rule, torch.eye(len(values)), state, losses=torch.from_numpy(values))
        found.append(result.weights.numpy())
        state = result.state
    return np.array(found)


@pytest.mark.parametrize("variant", ["original", "normalized", "loss_weighted"])
def test_softadapt_is_the_softmax_of_the_change(variant):
    change = np.diff(CALLS, axis=0, prepend=CALLS[:1])
    if variant == "normalized":
        change = change / np.maximum(np.abs(change).sum(1, keepdims=True), 1e-300)
    expected = softmax(0.1 * change, axis=1)
    if variant == "loss_weighted":
        expected = expected * CALLS / (expected * CALLS).sum(1, keepdims=True)
    np.testing.assert_allclose(weights_of(aggregators.softadapt(0.1, variant)), expected, rtol=2**12 * eps())


@pytest.mark.parametrize("rho", [0.0, 1.0])
def test_relobralo_compares_with_the_last_and_the_first_call(rho):
    expected, weights = [], np.ones(3)
    for values, last in zip(CALLS, [CALLS[0], *CALLS[:-1]], strict=True):
        since = lambda past, values=values: 3 * softmax(values / (0.5 * past))
        history = rho * weights + (1 - rho) * since(CALLS[0])
        weights = 0.9 * history + 0.1 * since(last)
        expected.append(weights)
    np.testing.assert_allclose(weights_of(aggregators.relobralo(KEY, 0.5, 0.9, rho)), expected, rtol=2**12 * eps())


def test_relobralo_looks_back_as_often_as_it_should():
    calls = np.tile([[1.0, 2.0], [2.0, 1.0]], (200, 1))
    stays = np.isclose(np.diff(weights_of(aggregators.relobralo(KEY, 1.0, 1.0, 0.75), calls), axis=0), 0).all(1)
    assert 0.65 < stays.mean() < 0.9  # some looks back find the same weights


def residuals(w, x, edge):
    u = lambda x: torch.tanh(x * w["a"]) @ w["b"]
    return {"boundary": u(edge) - 1, "equation": 10 * u(x) - x.squeeze(1)}


PARAMS = {"a": torch.tensor([1.0, -0.5, 0.3], dtype=torch.float64), "b": torch.tensor([0.2, 1.0, -1.0]).double()}
BATCH = torch.linspace(0.1, 1, 7, dtype=torch.float64)[:, None], torch.tensor([[0.0], [1.0]], dtype=torch.float64)


def test_ntk_weights_are_ratios_of_traces_of_the_kernel():
    J, r = jd.jacobian_fn(residuals)(PARAMS, *BATCH)
    rows = torch.cat(list(J.values()), 1)
    K = rows @ rows.mT
    scales = {"boundary": K.trace() / K[:2, :2].trace(), "equation": K.trace() / K[2:, 2:].trace()}

    def weighted(w):
        found = residuals(w, *BATCH)
        return sum(scale.detach() * found[name].square().mean() / 2 for name, scale in scales.items())

    expected = torch.func.grad(weighted)(PARAMS)
    found = jd.aggregate(aggregators.ntk_weights(), J, losses=r)
    torch.testing.assert_close(found.direction, expected)
    method = {"losses": residuals, "aggregator": aggregators.ntk_weights(), "optimizer": jd.sgd(1.0)}
    state, info = jd.step(jd.train_state(PARAMS, *BATCH, **method), *BATCH, **method)
    torch.testing.assert_close(info.weights, found.weights)
    torch.testing.assert_close({k: PARAMS[k] - state.params[k] for k in PARAMS}, expected)


def test_annealing_is_the_ratio_of_the_largest_to_the_mean_entry():
    rows = torch.tensor([[4.0, -8.0, 0.0], [1.0, 1.0, -1.0], [0.0, 0.0, 3.0]], dtype=torch.float64)
    split = {"a": rows[:, :1], "b": rows[:, 1:]}
    rule, state, weights = aggregators.learning_rate_annealing(), None, np.ones(3)
    for call in range(4):
        factor = 0.5**call
        found = jd.aggregate(rule, {k: factor * v if k == "a" else v for k, v in split.items()}, state)
        magnitudes = np.abs(np.concatenate([factor * rows[:, :1], rows[:, 1:]], 1))
        weights = 0.9 * weights + 0.1 * magnitudes[0].max() / magnitudes.mean(1)
        weights[0] = 1
        np.testing.assert_allclose(found.weights, weights, rtol=2**12 * eps())
        state = found.state


def test_the_primary_loss_of_annealing_is_an_index_or_a_name():
    rows = torch.tensor([[4.0, -8.0, 0.0], [1.0, 1.0, -1.0], [0.0, 0.0, 3.0]], dtype=torch.float64)
    for primary, place in ((0, 0), (2, 2), ("b", 1)):
        rule = aggregators.learning_rate_annealing(primary, 0.0)
        weights = jd.aggregate(rule, rows, losses=dict.fromkeys("abc", rows[0, 0])).weights
        expected = rows[place].abs().max() / rows.abs().mean(1)
        torch.testing.assert_close(weights, expected.index_fill(0, torch.tensor(place), 1.0))
