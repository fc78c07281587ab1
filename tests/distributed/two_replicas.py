"""Two targets, fitted by ranks with their own part of the data: as replicas, and with sharded parameters. On two ranks,

torchrun --standalone --nproc-per-node 2 tests/distributed/two_replicas.py

prints

2 replicas, 100 steps: losses 0.0003 and 0.0003
2 shards, 100 steps: losses 0.0003 and 0.0003
"""

from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import functional_jd as fj
from functional_jd import distributed


def losses(params, x, y):
    return ((x @ params["w"] - y) ** 2).mean(0)


def train(params, batch, how, name, steps=100):
    state = fj.train_state(params, *batch, **how)
    for _ in range(steps):
        state, info = fj.step(state, *batch, **how)
    if dist.get_rank() == 0:
        first, second = info.losses.tolist()
        print(f"{dist.get_world_size()} {name}, {steps} steps: losses {first:.4f} and {second:.4f}")


def main():
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))  # "nccl", and tensors there, on GPUs
    x = torch.linspace(-1, 1, 8, dtype=torch.float64).reshape(4, 2)
    targets = torch.tensor([[1.0, 0.0], [2.0, -1.0]], dtype=torch.float64)
    mine = slice(dist.get_rank(), None, dist.get_world_size())
    batch = x[mine], (x @ targets)[mine]
    start, how = torch.zeros(2, 2, dtype=torch.float64), {"aggregator": fj.upgrad(), "optimizer": fj.sgd(0.5)}

    replicas = {"losses": losses, "engine": distributed.replicated()}
    train({"w": start}, batch, how | replicas, "replicas")

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    shards = {"losses": distributed.sharded(losses, mesh)}
    train({"w": distribute_tensor(start, mesh, [Shard(0)])}, batch, how | shards, "shards")
    distributed.leave()


if __name__ == "__main__":
    main()
