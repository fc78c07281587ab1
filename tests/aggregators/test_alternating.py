"""Alternating: one objective a step, beside the algorithm written out, the authors' figures, and torch's Adam."""

from functools import partial

import numpy as np
import pytest
import torch
from bounds import check_within, eps
from hypothesis import given
from hypothesis import strategies as st
from simulated import simulated

import functional_jd as jd
from functional_jd import aggregators
from functional_jd.core.tree import tree_leaves, tree_map

TARGETS = torch.tensor([[1.0, 0.0, -1.0], [0.0, 2.0, 1.0], [-2.0, 1.0, 0.5]], dtype=torch.float64)
WEIGHTS = torch.tensor([1.0, 4.0, 0.25], dtype=torch.float64)
START = torch.tensor([0.5, -1.5, 2.0], dtype=torch.float64)


def distances(w):
    return WEIGHTS.to(w) * (w - TARGETS.to(w)).square().sum(1)


def method(rule, m=3, losses=distances, **hyper):
    aggregator, optimizer = aggregators.alternating(rule, m, **({"lr": 0.1} | hyper))
    return {"losses": losses, "aggregator": aggregator, "optimizer": optimizer}


def train(steps, how, start=START, *batch, take=None):
    state = jd.train_state(start, *batch, **how)
    for _ in range(steps):
        state, _ = (take or partial(jd.step, **how))(state, *batch)
    return state


@given(st.integers(1, 4), st.sampled_from([jd.mean, jd.upgrad, jd.config]), st.integers(0, 2**16))
def test_it_is_the_algorithm_of_the_paper_and_with_one_objective_adam(m, rule, seed):
    rng, n, steps, b1, b2 = np.random.default_rng(seed), 5, 7, 0.8, 0.95
    A, b = rng.normal(size=(m, n)), rng.normal(size=m)
    losses = lambda w: (torch.as_tensor(A) @ w - torch.as_tensor(b)).square()
    x, averages, first, second, t = rng.normal(size=n), np.zeros((m, n)), 0.0, 0.0, 0
    start = torch.as_tensor(x.copy())
    for k in range(steps):
        i = k % m
        averages[i] = b1 * averages[i] + (1 - b1) * 2 * (A[i] @ x - b[i]) * A[i]
        if k + 1 >= m:
            t += 1
            rows = [averages[j] / (1 - b1 ** len(range(j, k + 1, m))) for j in range(m)]
            d = jd.aggregate(rule(), torch.as_tensor(np.stack(rows))).direction.numpy()
            before, first = first, (1 - b1**t) * d
            second = b2 * second + (1 - b2) * ((first - b1 * before) / (1 - b1)) ** 2
            x = x - 0.1 * d / (np.sqrt(second / (1 - b2**t)) + 1e-3)
    found = train(steps, method(rule(), m, losses, betas=(b1, b2), eps=1e-3), start).params
    # A step divides by at least 1e-3 what is as large as the gradients, up to 1e3, and rules lose a few digits.
    check_within(found, torch.as_tensor(x), 2**20 * eps())


def test_a_step_is_one_backward_pass_whatever_the_rule():
    passes = []

    def counted(w):
        seen = w.clone()
        if seen.requires_grad:
            seen.register_hook(passes.append)
        return distances(seen)

    how = method(jd.config(), losses=counted)
    state = jd.train_state(START, **how)
    for _ in range(4):
        passes.clear()
        state, info = jd.step(state, **how)
        assert len(passes) == 1
    assert info.weights.tolist() == [1.0, 0.0, 0.0]


def test_losses_may_be_the_one_whose_turn_it_is():
    one = lambda w, k: {"now": distances(w)[k]}
    how = method(jd.config(), losses=lambda w, k, factor=1.0: {"now": one(w, k)["now"] * factor})
    state = jd.train_state(START, 0, **how)
    for k in range(8):
        factor = torch.nan if k == 4 else 1.0  # a step that is skipped takes no turn
        state, _ = jd.step(state, int(state.aggregator) % 3, factor, **how)
    assert torch.equal(state.params, train(7, method(jd.config())).params)


def test_a_rule_without_an_answer_moves_nothing():
    rule, answer = jd.mean(), torch.tensor(1.0, dtype=torch.float64)
    lost = rule._replace(update=lambda seen, state: (rule.update(seen, state)[0] * answer, state))
    how = method(lost)
    state = train(4, how)
    answer.fill_(torch.nan)
    after, _ = jd.step(state, **how)
    assert torch.equal(after.params, state.params)
    assert torch.equal(after.optimizer.second, state.optimizer.second)
    answer.fill_(1.0)
    assert jd.step(after, **how)[0].params.isfinite().all()


@pytest.mark.parametrize("spoiled", [0, 1, 2])
def test_a_skipped_step_takes_no_turn_and_moves_the_scale_of_no_other(spoiled):
    losses = lambda w, factor: distances(w) * factor
    how = method(jd.upgrad(), losses=losses)
    fine = torch.ones(3, dtype=torch.float64)
    state = jd.train_state(START, fine, scale=jd.scale_state(2.0**10, shape=(3,)), **how)
    for _ in range(4):
        state, _ = jd.step(state, fine, **how)
    again, info = jd.step(state, torch.where(torch.arange(3) == spoiled, torch.nan, fine), **how)
    assert info.finite.tolist() == [k != spoiled for k in range(3)]
    for old, new in zip(tree_leaves(state), tree_leaves(again._replace(scale=state.scale)), strict=True):
        assert torch.equal(old, new)
    assert jd.step(again, fine, **how)[1].weights.tolist() == [0.0, 1.0, 0.0]


def test_it_trains_the_trunk_of_multitask_losses():
    torch.manual_seed(0)
    start = {"shared": torch.randn(2, 3, dtype=torch.float64), "heads": {"a": torch.ones(2), "b": torch.ones(2)}}
    start = tree_map(lambda x: x.double(), start)
    x = torch.randn(5, 3, dtype=torch.float64)
    losses = jd.multitask(
        lambda shared, x: x @ shared.mT,
        lambda heads, h, x: {k: (h @ heads[k] - i).square().mean() for i, k in enumerate(heads)},
    )
    aggregator, trunk = aggregators.alternating(jd.config(), 2, lr=0.1)
    by_part = jd.by_label({"shared": trunk, "heads": jd.sgd(0.0)}, lambda name, leaf: name.split(".")[0])
    state = train(5, {"losses": losses, "aggregator": aggregator, "optimizer": by_part}, start, x)
    plain = lambda shared, x: losses({"shared": shared, "heads": start["heads"]}, x)
    expected = train(5, method(jd.config(), 2, plain), start["shared"], x)
    check_within(state.params["shared"], expected.params, 2**12 * eps())
    assert torch.equal(state.params["heads"]["a"], start["heads"]["a"])


@pytest.mark.parametrize("backend", ["eager", pytest.param("inductor", marks=pytest.mark.inductor)])
def test_compiled_steps_are_the_same(backend):
    how = method(jd.upgrad(), losses=lambda w, x: distances(w + x))
    take = jd.compiled(partial(jd.step, **how), backend=backend)
    found = train(6, how, START, torch.tensor(0.5), take=take)
    check_within(found.params, train(6, how, START, torch.tensor(0.5)).params, 2**10 * eps())


def test_transforms_go_through_its_steps():
    last = lambda rate: train(5, method(jd.upgrad(), lr=rate)).params.square().sum()
    rate, by = torch.tensor(0.1, dtype=torch.float64), 2.0**-16
    slope = torch.func.grad(last)(rate)
    difference = (last(rate + by) - last(rate - by)) / (2 * by)
    check_within(slope, difference, 2**10 * by**2 * (1 + slope.abs()))
    tangent = torch.func.jvp(last, (rate,), (torch.ones_like(rate),))[1]
    check_within(tangent, slope, 2**10 * eps() * (1 + slope.abs()))
    rates = torch.tensor([0.05, 0.1, 0.2], dtype=torch.float64)
    check_within(torch.vmap(last)(rates), torch.stack([last(r) for r in rates]), 2**10 * eps())


def test_an_accelerator_takes_the_same_steps_and_a_capture_of_one():
    def run(put, device=None):
        targets = put(TARGETS)
        how = method(jd.upgrad(), losses=lambda w: (w - targets).square().sum(1))
        scale = put(jd.scale_state(2.0**10, shape=(3,)))
        state = jd.train_state(put(START), scale=scale, **how)
        for _ in range(6):
            state, _ = jd.step(state, **how)
        if device:
            device.capturing = True
        return jd.step(state, **how)[0].params

    with simulated() as device:
        assert torch.equal(device.get(run(device.put, device)), run(lambda x: x))


def test_a_rule_keeps_its_memory_and_low_precision_its_averages():
    rule = jd.pcgrad(jd.random.key(0))
    state = train(5, method(rule))
    before = train(4, method(rule))
    assert not torch.equal(tree_leaves(state.optimizer.memory)[0], tree_leaves(before.optimizer.memory)[0])
    optimizer = aggregators.alternating(jd.upgrad(), 3)[1]
    params, averages = optimizer.update(START.half(), optimizer.init(START.half()), START.half())
    assert params.dtype == torch.float16
    assert averages.averages.dtype == averages.second.dtype == torch.float32


def test_other_losses_and_the_parameters_of_multitask_losses_are_refused():
    with pytest.raises(ValueError, match="alternating: rule must be a rule that needs no losses"):
        aggregators.alternating(jd.uw(), 3)
    with pytest.raises(ValueError, match=r"alternating: betas\[1\] must be"):
        aggregators.alternating(jd.mean(), 3, betas=(0.9, 1.0))
    with pytest.raises(ValueError, match="objectives must be 3, the number of losses, found 2"):
        train(1, method(jd.mean(), 2))
    optimizer = method(jd.mean())["optimizer"]
    for whole in (optimizer, jd.by_label({"all": optimizer}, lambda *_: "all")):
        with pytest.raises(ValueError, match="params must be those of the trunk of multitask losses"):
            whole.init({"shared": {"w": START}, "heads": {"a": START}})
