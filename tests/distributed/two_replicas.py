"""Two targets, fitted by ranks with their own part of the data: as replicas, with sharded parameters, and by a loop
that calls `.backward()` itself, with plain `fully_shard`. On two ranks,

torchrun --standalone --nproc-per-node 2 tests/distributed/two_replicas.py

prints

2 replicas, 100 steps: losses 0.0003 and 0.0003
2 shards, 100 steps: losses 0.0003 and 0.0003
2 ranks with weights, 100 steps: losses 0.0003 and 0.0003
"""

import copy
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor

import functional_jd as fj
from functional_jd import distributed


def losses(params, x, y):
    return ((x @ params["w"] - y) ** 2).mean(0)


def train(params, batch, how, steps):
    """Train by steps; return the losses before the last one."""
    state = fj.train_state(params, *batch, **how)
    for _ in range(steps):
        state, info = fj.step(state, *batch, **how)
    return info.losses


def train_by_weights(net, batch, mesh, rule, steps):
    """Train the module in place; return its sharded form, and the losses before the last step."""
    apply = fj.functional(copy.deepcopy(net))  # the module as a function, before fully_shard adds its hooks
    net, (x, y) = fully_shard(net, mesh=mesh), batch
    losses_of = lambda output: ((output - y) ** 2).mean(0)
    losses = distributed.sharded(lambda params, x: losses_of(apply(params, {}, x)[0]), mesh)
    weights_of, memory = fj.weights_fn(losses, rule), None
    optimizer = torch.optim.SGD(net.parameters(), lr=0.5)
    for _ in range(steps):
        weights, values, memory = weights_of(dict(net.named_parameters()), x, state=memory)
        (weights * losses_of(net(x))).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return net, values


def main(steps=100):
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))  # "nccl", and tensors there, on GPUs
    x = torch.linspace(-1, 1, 8, dtype=torch.float64).reshape(4, 2)
    targets = torch.tensor([[1.0, 0.0], [2.0, -1.0]], dtype=torch.float64)
    mine = slice(dist.get_rank(), None, dist.get_world_size())
    batch, mesh = (x[mine], (x @ targets)[mine]), init_device_mesh("cpu", (dist.get_world_size(),))
    start, how = torch.zeros(2, 2, dtype=torch.float64), {"aggregator": fj.upgrad(), "optimizer": fj.sgd(0.5)}
    net = nn.Linear(2, 2, bias=False, dtype=torch.float64)
    nn.init.zeros_(net.weight)

    replicas = how | {"losses": losses, "engine": distributed.replicated()}
    shards = how | {"losses": distributed.sharded(losses, mesh)}
    found = {
        "replicas": train({"w": start}, batch, replicas, steps),
        "shards": train({"w": distribute_tensor(start, mesh, [Shard(0)])}, batch, shards, steps),
        "ranks with weights": train_by_weights(net, batch, mesh, fj.upgrad(), steps)[1],
    }
    if dist.get_rank() == 0:
        for name, (first, second) in found.items():
            print(f"{dist.get_world_size()} {name}, {steps} steps: losses {first:.4f} and {second:.4f}")
    distributed.leave()


if __name__ == "__main__":
    main()
