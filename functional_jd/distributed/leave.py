"""The end of a program of several ranks.

A gloo thread that frees a tensor while Python ends waits for Python's lock in vain, and aborts the process: "terminate
called without an active exception". `destroy_process_group` joins the threads of a group without other references.
"""

import gc
import sys
from contextlib import suppress
from typing import Any

import torch.distributed as dist

from functional_jd.engines.replicas import known_group


def leave() -> None:
    """Wait for all ranks, and end all process groups with their threads: the last line of a program.

    Use it instead of `torch.distributed.destroy_process_group()`, which leaves threads of gloo running if meshes were
    used: on a busy machine they abort a process that ends. Meshes and groups are of no use afterwards. A rank that has
    gone, or that does not answer in time, is not waited for. Import `functional_jd` before `init_process_group`: torch
    itself keeps a group for ever if parts of it are imported afterwards.

    Raises:
        ValueError: no process group.
    """
    known_group(None)
    # A rank that has got through closes its connections, which another may still be reading from.
    with suppress(RuntimeError):
        dist.barrier()
    _forget_groups()
    dist.destroy_process_group()
    gc.collect()


def _forget_groups() -> None:
    """Drop the references to process groups that torch itself keeps. Destroyed groups are of no use."""
    meshes: Any = sys.modules.get("torch.distributed.device_mesh")
    if meshes is not None:  # caches of DTensor keep meshes
        for mesh in [x for x in gc.get_objects() if type(x) is meshes.DeviceMesh]:
            getattr(mesh, "_pg_registry", {}).clear()
