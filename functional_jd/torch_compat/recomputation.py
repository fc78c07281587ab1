"""Activation checkpoints: what a backward pass runs again runs under the modes of its forward pass."""

import inspect
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from traceback import walk_stack
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
        if hook is None or hook is self.around or hook.__qualname__.startswith("_recomputation_hook"):  # runs again
            return
        frame: Any = inspect.getclosurevars(hook).nonlocals.get("frame")  # torch's record of the checkpoint
        if not hasattr(frame, "recompute_fn"):
            Missing("utils.checkpoint._CheckpointFrame.recompute_fn", _FEATURE)()
        own = getattr(frame.recompute_fn, "func", None) is _run_under
        run, known = frame.recompute_fn.args if own else (frame.recompute_fn, {})
        if id(self) not in known:
            new = {id(self): self.again()}
            frame.recompute_fn = partial(_run_under, run, new | known if innermost else known | new)

    def again(self) -> Callable[[], TorchFunctionMode]:
        """The maker of the mode in which a checkpoint runs again. It must not hold this mode, which may keep graphs."""
        return type(self)


def _run_under(run: Callable[..., None], modes: dict[int, Callable[[], TorchFunctionMode]], *args: Any) -> None:
    """Run the function of a checkpoint again, under these modes, the inner ones first."""
    with ExitStack() as stack:
        for mode in reversed(modes.values()):
            stack.enter_context(mode())
        run(*args)


def in_checkpoint() -> bool:
    """Whether the caller runs inside `torch.utils.checkpoint(..., use_reentrant=False)`, first or again."""
    return not isinstance(_top_hooks, Missing) and _checkpoint_hook() is not None


def in_reentrant_checkpoint() -> bool:
    """Whether the caller runs inside `torch.utils.checkpoint(..., use_reentrant=True)`."""
    return any(frame.f_code is _REENTRANT for frame, _ in walk_stack(inspect.currentframe()))


def _checkpoint_hook() -> Any:
    """The innermost function that packs what autograd saves, if it is that of a checkpoint that is not traced."""
    hooks = None if torch.compiler.is_compiling() else _top_hooks(False)
    pack = None if hooks is None else hooks[0]
    return pack if getattr(pack, "__module__", None) == torch_checkpoint.__name__ else None
