"""Loops of others on sharded modules, whose losses get their weights from a rule."""

import torch
import weighted_trainer
from shard_models import EXAMPLES, close, mesh, mine
from shard_training import STEPS
from torch import nn

import functional_jd as fj


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
    close(dict(net.named_parameters()), state.params, 1e-6)
    close(values, info.losses, 1e-6)
