"""Public reports on functional calls, vmap, random numbers, checkpoints and gradients of examples: see README.md."""

from contextlib import nullcontext

import pytest
import torch
from bounds import check_within, eps
from torch import nn
from torch.nn import functional

import functional_jd as jd

DOUBLE = torch.float64


def values_of(module):
    return {name: p.detach().clone() for name, p in module.named_parameters()}


def taken(losses, params, *batch, rule=None, **start):
    """The direction of one step: by how much gradient descent with rate one moves each parameter."""
    how = {"losses": losses, "aggregator": rule or jd.total(), "optimizer": jd.sgd(1.0)}
    state, info = jd.step(jd.train_state(params, *batch, **how, **start), *batch, **how)
    assert info.moved
    return {name: params[name].detach() - state.params[name] for name in params}


def test_the_same_key_draws_the_same_mask_in_every_call_and_in_a_hessian():
    f, p = jd.random.keyed(lambda p: (functional.dropout(p, 0.5) ** 2).sum()), torch.ones(6)
    key = jd.random.key(3)
    assert f(key, p) == f(key, p)
    H = torch.func.hessian(lambda p: f(key, p))(p)
    mask = jd.random.keyed(lambda p: functional.dropout(p, 0.5))(key, p)
    assert torch.equal(H, torch.diag(2 * mask.square()))
    many = torch.vmap(torch.func.hessian(lambda p: f(key, p)), randomness="different")(p.expand(2, 6))
    assert torch.equal(many, H.expand(2, 6, 6))


@pytest.mark.parametrize("examples", [True, False])
def test_offloaded_activations_in_losses(examples):
    torch.manual_seed(0)
    net, x = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 2)).double(), torch.randn(6, 3, dtype=DOUBLE)
    apply, rule = jd.functional(net), jd.clipped(0.1) if examples else jd.upgrad()

    def losses_of(around):
        def loss(p, x):
            with around():
                return apply(p, {}, x)[0].square()

        return jd.per_example(lambda p, x: loss(p, x).sum()) if examples else lambda p, x: loss(p, x).mean(0)

    expected = taken(losses_of(nullcontext), values_of(net), x, rule=rule)
    slow = pytest.warns(jd.SlowPathWarning, match="saved tensor hooks") if examples else nullcontext()
    with slow:
        found = taken(losses_of(torch.autograd.graph.save_on_cpu), values_of(net), x, rule=rule)
    for name in expected:
        check_within(found[name], expected[name], 256 * eps() * (1 + expected[name].abs().max()))
