"""Loops of others on sharded modules, whose losses get their weights from a rule."""

import copy

import pytest
import torch
import weighted_trainer
from shard_models import EXAMPLES, close, mesh, mine
from shard_training import STEPS
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor

import functional_jd as fj
from functional_jd import distributed


def check_weights_serve_a_loop_with_fully_shard():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))
    apply, params = fj.functional(net), {name: p.detach().clone() for name, p in net.named_parameters()}
    x, y = torch.randn(EXAMPLES, 5), torch.randn(EXAMPLES, 3)
    losses = lambda params, x, y: ((apply(params, {}, x)[0] - y) ** 2).mean(0)
    how = {"losses": losses, "aggregator": fj.upgrad(), "optimizer": fj.sgd(0.5)}
    state = fj.train_state(params, x, y, **how)
    for _ in range(STEPS):
        state, info = fj.step(state, x, y, **how)
    net, values = weighted_trainer.train(net, mine((x, y)), mesh(), fj.upgrad(), STEPS)
    close(dict(net.named_parameters()), state.params)
    close(values, info.losses)


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))


def check_a_module_is_made_a_function_before_it_is_fully_sharded():
    words = "functional: expected a module without the hooks of fully_shard, found FSDP.*Call functional before fully_"
    net, x = network(), torch.randn(EXAMPLES, 5)
    apply, copied = fj.functional(net), fj.functional(copy.deepcopy(net))
    expected = copied(dict(net.named_parameters()), {}, x)[0]
    for part in (net[0], net):  # a part alone, and all
        fully_shard(part, mesh=mesh())
        with pytest.raises(ValueError, match=words):
            fj.functional(net)
    params = {name: p.full_tensor() for name, p in net.named_parameters()}
    with pytest.raises(ValueError, match=words):
        apply(params, {}, x)  # the same module, sharded after it was read
    close(copied(params, {}, x)[0], expected, 0)


def check_a_module_whose_parameters_are_distributed_is_a_function_of_them():
    net = network()
    params, x = {name: p.detach() for name, p in net.named_parameters()}, torch.randn(EXAMPLES, 5)
    expected = fj.jacobian_fn(lambda p, x: fj.functional(net)(p, {}, x)[0].square().mean(0))(params, x)
    own = network()
    for part in (own[0], own[2]):
        for name, p in list(part.named_parameters()):
            setattr(part, name, nn.Parameter(distribute_tensor(p.detach(), mesh(), [Shard(0)])))
    apply = fj.functional(own)
    losses = distributed.sharded(lambda p, x: apply(p, {}, x)[0].square().mean(0), mesh())
    found = fj.jacobian_fn(losses)(dict(own.named_parameters()), mine(x))
    close(found, expected)
    close(dict(own.named_parameters()), params, 0)
