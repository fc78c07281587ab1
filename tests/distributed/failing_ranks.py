"""Three ranks without torchrun to end them: one hangs and then dies, one raises, and the first tells what it saw."""

import json
import multiprocessing
import os
import sys
import time
from datetime import timedelta
from functools import partial

import torch
import torch.distributed as dist
from ranks import started
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard, distribute_tensor

import functional_jd as fj
from functional_jd import distributed

WAYS = {"hangs": 1, "raises": 2, "dies": 1}
"""The rank beside the first."""

LONG = timedelta(minutes=10)
"""The patience of a group: a busy machine may leave a rank out for minutes."""

SHORT = timedelta(seconds=1)
"""That of the groups whose other rank hangs, once their step is prepared."""


def losses(p, x):
    if dist.get_rank() == 2 and (x < 0).any():
        raise RuntimeError("on this rank only")
    return (x @ p["w"]).square().mean(0)


def prepared(kind, group):
    """A step of replicas or of shards on these ranks, and its state."""
    params, x = {"w": torch.ones(3, 4)}, torch.ones(2, 3)
    how = {"losses": losses, "aggregator": fj.upgrad(), "optimizer": fj.sgd(0.1)}
    if kind == "shards":
        mesh = DeviceMesh.from_group(group, "cpu")
        params["w"], how["losses"] = distribute_tensor(params["w"], mesh, [Shard(0)]), distributed.sharded(losses, mesh)
    else:
        how["engine"] = distributed.replicated(group=group)
    state = fj.train_state(params, x, **how)
    return partial(fj.step, fj.step(state, x, **how)[0], **how)


def main(me, store, told_to_die):
    dist.init_process_group("gloo", init_method=store, rank=me, world_size=3, timeout=LONG)
    steps, hanging = {}, []
    for way, other in WAYS.items():
        for kind in ("replicas", "shards"):
            group = dist.new_group([0, other], timeout=LONG)
            if me in (0, other):
                steps[kind, way] = prepared(kind, group)
                hanging += [group] if way == "hangs" else []
    dist.barrier()
    for group in hanging:
        dist.distributed_c10d._set_pg_timeout(SHORT, group)
    if me == 1:
        told_to_die.wait()
        os._exit(3)
    x = torch.full((2, 3), 1.0 - me)  # negative on the one that raises
    for (kind, way), step in steps.items():
        if way == "dies":
            told_to_die.set()
        start = time.perf_counter()
        try:
            step(x)
            found = "no error"
        except RuntimeError as error:
            if me:
                os._exit(4)  # as the interpreter ends, without a traceback
            found = str(error)
        print(json.dumps([kind, way, found, time.perf_counter() - start]), flush=True)
    os._exit(0)


if __name__ == "__main__":
    told_to_die = multiprocessing.get_context("fork").Event()
    all_of_them = started(main, [(me, sys.argv[1], told_to_die) for me in range(3)])
    for process in all_of_them:
        process.join(LONG.total_seconds())
        process.kill()
    sys.exit([process.exitcode for process in all_of_them] != [0, 3, 4])
