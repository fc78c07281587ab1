"""The end of a program of several ranks."""

import gc

import torch.distributed as dist

from functional_jd.engines.group import known_group
from functional_jd.torch_compat.process_groups import forget_groups


def leave() -> None:
    """Wait for all ranks, and end all process groups with their threads: the last line of a program.

    In the place of `torch.distributed.destroy_process_group()`, which returns while threads of gloo are still running
    where meshes have been used: a process that ends meanwhile aborts on a busy machine ("terminate called without an
    active exception"). Meshes and groups are of no use afterwards.

    Raises:
        ValueError: no process group.
        RuntimeError: a rank stopped, or did not answer in time.
    """
    known_group(None)
    dist.barrier()
    forget_groups()
    dist.destroy_process_group()
    gc.collect()
