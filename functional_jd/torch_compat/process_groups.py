"""What keeps process groups alive beyond `destroy_process_group`, and with them threads that race with Python's exit.

A gloo thread that still lets go of a tensor while Python ends asks for Python's lock in vain, and aborts the process:
"terminate called without an active exception". Without references to its group, a thread is joined before.
"""

import gc
import sys
from types import FunctionType
from typing import Any

import torch.distributed as dist


def forget_groups() -> None:
    """Drop the references to process groups that torch itself keeps, which nobody can use when groups are destroyed."""
    meshes: Any = sys.modules.get("torch.distributed.device_mesh")
    if meshes is not None:  # they outlive the user's in the caches of DTensor
        for mesh in [x for x in gc.get_objects() if type(x) is meshes.DeviceMesh]:
            getattr(mesh, "_pg_registry", {}).clear()
    late = sys.modules.get("torch.distributed.nn.functional")  # imported when groups exist, by DTensor's operations
    for f in vars(late).values() if late is not None else ():
        if isinstance(f, FunctionType) and any(isinstance(x, dist.ProcessGroup) for x in f.__defaults__ or ()):
            f.__defaults__ = tuple(None if isinstance(x, dist.ProcessGroup) else x for x in f.__defaults__ or ())
