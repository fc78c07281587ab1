"""A loss that is not finite is flagged alone, and no scale moves."""

import pytest
import torch

import functional_jd as jd

X = torch.tensor([[0.5, -1.0, 0.3], [2.0, 0.2, 1.0], [-0.4, 0.1, 0.6], [1.0, 1.0, -0.7]])
W = torch.tensor([[0.1, -0.3], [0.2, 0.5], [-0.4, 0.7]])
NAMES = "abcd"


def hidden(params, x):
    return torch.tanh(x @ params["w"])


def named(params, x, poison):
    total = hidden(params, x).sum()
    return {name: total * (1 + i + poison[i]) for i, name in enumerate(NAMES)}


def joined(params, x, poison):
    return hidden(params, x).sum(1) + hidden(params, x).sum() * poison


def heads(own, features, x, poison):
    return {name: (features @ own[name]).sum() * (1 + poison[i]) for i, name in enumerate(NAMES)}


KINDS = {
    "named": (named, {"w": W}),
    "joined": (joined, {"w": W}),
    "per_example": (
        jd.per_example(lambda params, x, poison: hidden(params, x).square().sum() * (1 + poison)),
        {"w": W},
    ),
    "multitask": (
        jd.multitask(lambda shared, x, _: hidden(shared, x), heads),
        {"shared": {"w": W}, "heads": {name: torch.ones(2) for name in NAMES}},
    ),
}
RULES = {"upgrad": jd.upgrad(), "config": jd.config(), "mean": jd.mean(), "constant": jd.constant([1.0] * 4)}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rule", RULES)
def test_such_a_loss_is_flagged_alone_and_no_scale_moves(kind, rule):
    losses, params = KINDS[kind]
    scale = jd.scale_state(2.0**10, shape=(4,), growth_interval=1, growth_factor=1.0)
    for engine in ("jacobian", "gramian", "weighted"):
        if engine == ("weighted" if rule in ("upgrad", "config") else "gramian"):
            continue
        how = {"losses": losses, "aggregator": RULES[rule], "optimizer": jd.sgd(0.1), "engine": engine}
        state = jd.train_state(params, X, torch.zeros(4), scale=scale, **how)
        for bad in (torch.nan, torch.inf):
            after, info = jd.step(state, X, torch.tensor([0.0, 0.0, bad, 0.0]), **how)
            assert info.finite.tolist() == [True, True, False, True]
            assert not info.moved
            assert torch.equal(after.scale.scale, state.scale.scale)
            torch.testing.assert_close(after.params, state.params, rtol=0, atol=0)


@pytest.mark.parametrize("kind", ["named", "joined", "multitask"])
def test_a_scale_that_is_too_high_backs_off_alone(kind):
    losses, params = KINDS[kind]
    how = {"losses": losses, "aggregator": jd.upgrad(), "optimizer": jd.sgd(0.1), "engine": "jacobian"}
    scale = jd.scale_state(shape=(4,))._replace(scale=torch.tensor([4.0, 2.0**127, 4.0, 4.0]))
    state = jd.train_state(params, X, torch.zeros(4), scale=scale, **how)
    after, info = jd.step(state, X, torch.tensor([0.0, 100.0, 0.0, 0.0]), **how)
    assert info.finite.tolist() == [True, False, True, True]
    assert after.scale.scale.tolist() == [4.0, 2.0**126, 4.0, 4.0]
