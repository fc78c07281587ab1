"""What is going on around a call: torch.func transforms, torch.compile, plain forward mode, inference mode."""

from typing import Any

import torch
from torch._functorch.pyfunctorch import retrieve_current_functorch_interpreter


def within_functorch() -> bool:
    """Whether a transform of torch.func (vmap, grad, jvp, ...) is active."""
    return torch._C._functorch.peek_interpreter_stack() is not None  # pyright: ignore[reportPrivateUsage, reportAttributeAccessIssue]


def transformed() -> bool:
    """Whether plain autograd on detached tensors would not do, or would not be seen."""
    return (
        torch.compiler.is_compiling()
        or within_functorch()
        or torch.autograd.forward_ad._current_level >= 0  # pyright: ignore[reportPrivateUsage]
        or torch.is_inference_mode_enabled()
    )


def level() -> tuple[Any, int]:
    """How many transforms deep we are: of torch.func, of plain forward mode."""
    if torch.compiler.is_compiling():  # which traces this way only
        inner: Any = retrieve_current_functorch_interpreter().level() if within_functorch() else None
    else:
        inner = torch._C._functorch.maybe_current_level()  # pyright: ignore[reportPrivateUsage, reportAttributeAccessIssue]
    return inner, torch.autograd.forward_ad._current_level  # pyright: ignore[reportPrivateUsage]
