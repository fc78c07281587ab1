"""Two ranks as forks of one process, which has loaded what both need."""

import multiprocessing
import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

RANKS = 2


def meet(rank, folder):
    """Start the group of both."""
    store = Path(folder, "store").as_uri()
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=RANKS, timeout=timedelta(minutes=5))


def run(main, *args, ranks=RANKS):
    """`main(rank, *args)` on each of the ranks, and the end of this process with the worse of their codes."""
    torch.set_num_threads(1)
    fork = multiprocessing.get_context("fork")
    processes = [fork.Process(target=main, args=(rank, *args)) for rank in range(ranks)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    sys.exit(max(abs(process.exitcode) for process in processes))
