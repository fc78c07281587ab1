"""What is going on around a call: torch.func transforms, torch.compile, plain forward mode, inference mode."""

import torch


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
