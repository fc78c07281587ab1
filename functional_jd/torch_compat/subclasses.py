"""Tensors of a subclass that have no memory: what asks for it, below Python, is told to `__torch_dispatch__`."""

from typing import Any

import torch
from torch import Tensor


def without_memory(kind: type[Tensor], shape: torch.Size, like: Tensor) -> Any:
    """A tensor of this kind and shape, with the dtype and the device of another."""
    make: Any = Tensor._make_wrapper_subclass  # pyright: ignore[reportAttributeAccessIssue]
    return make(kind, shape, dtype=like.dtype, device=like.device)
