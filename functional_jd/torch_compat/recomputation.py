"""Activation checkpoints: what a backward pass runs again runs under the modes of its forward pass."""

import inspect
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils import checkpoint as torch_checkpoint

from functional_jd.torch_compat.torch_internals import Missing, private

_FEATURE = "checkpoints that run again under modes"
_top_hooks: Any = private("_C._autograd._top_saved_tensors_default_hooks", _FEATURE)
_REENTRANT: Any = torch_checkpoint.CheckpointFunction.forward.__code__


class RecomputedMode(TorchFunctionMode):
    """A mode that `torch.utils.checkpoint(..., use_reentrant=False)` enters again where it runs ops again, as
    torch.compile does by itself. The handler of a subclass calls `note_checkpoints` first.
    """

    def __init__(self) -> None:
        super().__init__()
        # A checkpoint around this mode enters it again by itself.
        self.around = self.seen = _checkpoint_hook()

    def note_checkpoints(self, *, innermost: bool = False) -> None:
        """Make the checkpoint around this op, if it began inside this mode, run again under a mode of this class.
        It goes around those noted before, since inner modes receive an op first; or inside, if `innermost`. A
        checkpoint in another one calls `torch.empty` before it begins, so that none is missed.
        """
        hook = _checkpoint_hook()
        if hook is self.seen:
            return
        self.seen = hook
        frame = None if hook is None or hook is self.around else _frame_of(hook)
        if frame is not None:
            if not isinstance(frame.recompute_fn, _Recomputation):
                frame.recompute_fn = _Recomputation(frame.recompute_fn)
            known, own = frame.recompute_fn.contexts, {id(self): self.again()}
            if id(self) not in known:
                frame.recompute_fn.contexts = own | known if innermost else known | own

    def again(self) -> Callable[[], TorchFunctionMode]:
        """The maker of the mode in which a checkpoint runs again. It must not hold this mode, which may keep graphs."""
        return type(self)


class _Recomputation:
    """The function of a checkpoint, as torch runs it again: under the contexts, the inner ones first."""

    def __init__(self, run: Callable[..., None]):
        self.run = run
        self.contexts: dict[Any, Callable[[], AbstractContextManager[Any]]] = {}

    def __call__(self, *args: Any) -> None:
        with ExitStack() as stack:
            for context in reversed(self.contexts.values()):
                stack.enter_context(context())
            self.run(*args)


def in_checkpoint() -> bool:
    """Whether the caller runs inside `torch.utils.checkpoint(..., use_reentrant=False)`, first or again."""
    return not isinstance(_top_hooks, Missing) and _checkpoint_hook() is not None


def in_reentrant_checkpoint() -> bool:
    """Whether the caller runs inside `torch.utils.checkpoint(..., use_reentrant=True)`."""
    frame = inspect.currentframe()
    while frame is not None and frame.f_code is not _REENTRANT:
        frame = frame.f_back
    return frame is not None


def _checkpoint_hook() -> Any:
    """The innermost function that packs what autograd saves, if it is that of a checkpoint that is not traced."""
    hooks = None if torch.compiler.is_compiling() else _top_hooks(False)
    pack = None if hooks is None else hooks[0]
    return pack if getattr(pack, "__module__", None) == torch_checkpoint.__name__ else None


def _frame_of(pack: Any) -> Any:
    """The record that torch keeps of the checkpoint whose hook this is; None for one that runs again."""
    if pack.__qualname__.startswith("_recomputation_hook"):
        return None
    frame = inspect.getclosurevars(pack).nonlocals.get("frame")
    if not hasattr(frame, "recompute_fn"):
        Missing("utils.checkpoint._CheckpointFrame.recompute_fn", _FEATURE)()
    return frame
