"""A file of safetensors from the shards of two ranks, and back: `python tests/models/shard_files.py folder`."""

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from distributed.ranks import meet, on_ranks
from inputs import library
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.utils._pytree import tree_leaves

import functional_jd as fj
from functional_jd import distributed

STEPS, EXAMPLES = 3, 8


def problem():
    """Parameters, losses, and the batch of all ranks."""
    draw = torch.Generator().manual_seed(0)
    rand = lambda *shape: torch.randn(shape, dtype=torch.float64, generator=draw)
    params = {"w": rand(7, 5), "b": rand(7), "gain": rand()}
    losses = lambda p, x: (torch.tanh(x @ p["w"].mT + p["b"]) * p["gain"]).square().mean(0)[:3]
    return params, losses, rand(EXAMPLES, 5)


METHOD = {"aggregator": fj.nash_mtl(), "optimizer": fj.adamw(1e-2)}


def trained(params, x, losses, steps):
    state = fj.train_state(params, x, losses=losses, scale=fj.scale_state(), **METHOD)
    for _ in range(steps):
        state, _ = fj.step(state, x, losses=losses, **METHOD)
    return state


def main(rank, folder):
    files = library("safetensors.torch")
    meet(rank, 2, folder)
    mesh = init_device_mesh("cpu", (2,))
    params, losses, x = problem()
    own = {name: distribute_tensor(p, mesh, [Shard(0) if p.ndim else Replicate()]) for name, p in params.items()}
    sharded, part = distributed.sharded(losses, mesh), x.chunk(2)[rank]
    state = trained(own, part, sharded, STEPS)
    whole = fj.to_checkpoint(state, whole=True, **METHOD)
    if rank == 0:
        files.save_file(whole, Path(folder, "shards.safetensors"))
    dist.barrier()
    fresh = fj.train_state(own, part, losses=sharded, scale=fj.scale_state(), **METHOD)
    back = fj.from_checkpoint(files.load_file(Path(folder, "shards.safetensors")), like=fresh, **METHOD)
    shard = lambda x: x.to_local() if isinstance(x, DTensor) else x
    for x, y in zip(tree_leaves(back), tree_leaves(state), strict=True):
        assert type(x) is type(y)
        assert torch.equal(shard(x), shard(y))
    distributed.leave()


if __name__ == "__main__":
    on_ranks(main, *sys.argv[1:])
