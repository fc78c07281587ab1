"""The end of a program of several ranks."""

import gc
from contextlib import suppress

import torch.distributed as dist

from functional_jd.engines.group import known_group
from functional_jd.torch_compat.process_groups import forget_groups


def leave() -> None:
    """Wait for all ranks, and end all process groups with their threads: the last line of a program.

    In the place of `torch.distributed.destroy_process_group()`, which returns while threads of gloo are still running
    where meshes have been used: a process that ends meanwhile aborts on a busy machine ("terminate called without an
    active exception"). Meshes and groups are of no use afterwards. A rank that has gone, or that does not answer in
    time, is not waited for.

    Raises:
        ValueError: no process group.
    """
    known_group(None)
    # A rank that has got through closes its connections, which another may still be reading from.
    with suppress(RuntimeError):
        dist.barrier()
    forget_groups()
    dist.destroy_process_group()
    gc.collect()
