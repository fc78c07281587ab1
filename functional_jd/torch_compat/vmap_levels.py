"""The levels of `torch.vmap` around a call: what each of them hides, and how a tensor gets in and out of them."""

from typing import Any

import torch
from torch import Tensor

from functional_jd.torch_compat.private_names import private
from functional_jd.torch_compat.torch_internals import (
    as_batch,
    constant_while_tracing,
    interpreters,
    is_wrapped,
    unwrapped,
)

_VMAPS = "random numbers and recurrent layers under torch.vmap"

_unwrap_batched: Any = private("_C._functorch._unwrap_batched", "compiled Gramians")
_transforms: Any = private("_C._functorch.TransformType", _VMAPS, "Vmap")
_vmap_interpreter: Any = private("_C._functorch.CVmapInterpreterPtr", _VMAPS)


def varies_in_vmap(x: Tensor, level: int) -> bool:
    """Whether a tensor differs from one element of the vmap at this level to the next; torch.compile traces this."""
    return _unwrap_batched(x, level)[1] is not None


def differentiates() -> bool:
    """Whether a transform of torch.func other than vmap is active."""
    return any(interpreter.key() != _transforms.Vmap for interpreter in interpreters() or [])


@constant_while_tracing
def vmaps_inside(level: int) -> list[tuple[int, int, str]]:
    """The `torch.vmap`s that were entered inside this level, outermost first: level, batch size, randomness."""
    found: list[tuple[int, int, str]] = []
    for interpreter in interpreters() or []:
        if interpreter.level() > level and interpreter.key() == _transforms.Vmap:
            vmap = _vmap_interpreter(interpreter)
            found.append((interpreter.level(), vmap.batchSize(), vmap.randomness().name.lower()))
    return found


def zero_of_members(device: torch.device) -> Tensor:
    """A zero `[]` of its own for every member of every active `torch.vmap`."""
    vmaps = vmaps_inside(0)
    zero = innermost(torch.zeros([size for _, size, _ in vmaps], device=device))  # not of a level inside the first vmap
    for level, _, _ in vmaps:
        zero = as_batch(zero, level)
    return zero


def innermost(x: Tensor) -> Tensor:
    """The tensor inside of what transforms of torch.func have wrapped around it."""
    while is_wrapped(x):
        x = unwrapped(x)
    return x
