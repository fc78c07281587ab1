"""Which checkpoints of `torch.utils.checkpoint` run, told by their hooks and their Python frames."""

import inspect
from types import CodeType, FrameType
from typing import Any

from torch import nn
from torch.utils import checkpoint as torch_checkpoint

from functional_jd.torch_compat.private_names import missing, private
from functional_jd.torch_compat.torch_internals import runs_inside

_FEATURE = "checkpoints that run again under modes"


def _no_checkpoint(_: bool) -> None:
    """Stands in for the innermost hook: there is none where no checkpoint runs."""
    if any(map(runs_inside, _CHECKPOINTS)):
        raise missing("_C._autograd._top_saved_tensors_default_hooks", _FEATURE)


_top_hooks: Any = private("_C._autograd._top_saved_tensors_default_hooks", _FEATURE, otherwise=_no_checkpoint)
_hooks: Any = private(
    "_C._autograd", _FEATURE,
    "_push_saved_tensors_default_hooks", "_pop_saved_tensors_default_hooks",
    "_saved_tensors_hooks_get_disabled_error_message",
)  # fmt: skip
_checkpoint_hook: Any = private("utils.checkpoint._checkpoint_hook", _FEATURE)
# `checkpoint`, or from torch 2.15 on, where that is a decorator too, what it hands its work to: the function that keeps
# the generator of the checkpoint's two halves.
_CHECKPOINTS: list[CodeType] = [
    f.__code__
    for f in map(inspect.unwrap, filter(inspect.isfunction, vars(torch_checkpoint).values()))
    if "gen" in f.__code__.co_varnames
]
_REENTRANT_CHECKPOINT: Any = torch_checkpoint.CheckpointFunction.forward.__code__
_call: Any = private("nn.Module._call_impl", _FEATURE)


def saved_tensors_hook() -> Any:
    """The innermost function that packs what autograd saves, which identifies the checkpoint that runs; or None."""
    hooks = _top_hooks(False)
    return None if hooks is None else hooks[0]


def in_checkpoint() -> bool:
    """Whether the caller runs inside `torch.utils.checkpoint(..., use_reentrant=False)`, first or again."""
    hook = saved_tensors_hook()
    return getattr(hook, "__module__", None) == torch_checkpoint.__name__


def ends_recomputation(error: Exception) -> bool:
    """Whether a checkpoint around the caller ends its second run by this exception, as soon as it has what it needs."""
    return type(error).__qualname__ == "_StopRecomputationError"


def checkpoint_frames(around: Any = None) -> list[Any]:
    """The records that `torch.utils.checkpoint` keeps of the checkpoints that run, from the innermost to the last one
    inside the hook `around`.
    """
    hooks: list[Any] = []
    while (top := _top_hooks(False)) is not None and top[0] is not around:
        hooks.append(top)
        if _hooks._saved_tensors_hooks_get_disabled_error_message() is not None:
            break  # inside a transform, where no checkpoint can begin: they could not be put back
        _hooks._pop_saved_tensors_default_hooks()
    else:
        for pair in reversed(hooks):
            _hooks._push_saved_tensors_default_hooks(*pair)
    inside = f"{_checkpoint_hook.__name__}."
    return [_frame_of(pack) for pack, _ in hooks if getattr(pack, "__qualname__", "").startswith(inside)]


def _frame_of(pack: Any) -> Any:
    """The record of the checkpoint whose hook this is."""
    cells = {name: cell.cell_contents for name, cell in zip(pack.__code__.co_freevars, pack.__closure__, strict=True)}
    recompute(cells.get("frame"))
    return cells["frame"]


def recompute(checkpoint_frame: Any) -> Any:
    """What a checkpoint runs again."""
    if not hasattr(checkpoint_frame, "recompute_fn"):
        raise missing("utils.checkpoint._CheckpointFrame.recompute_fn", _FEATURE)
    return checkpoint_frame.recompute_fn


def calling_modules(checkpoint_frame: Any) -> list[nn.Module]:
    """The modules that are being called around a checkpoint, from the innermost to the outermost."""
    if not _CHECKPOINTS:
        raise _no_record()
    found: list[nn.Module] = []
    call, frame = _call.__code__, inspect.currentframe()
    while frame is not None:
        if frame.f_code is call:
            found.append(frame.f_locals["self"])
        elif frame.f_code in _CHECKPOINTS and _record_of(frame) is checkpoint_frame:
            found.clear()
        frame = frame.f_back
    return found


def _record_of(frame: FrameType) -> Any:
    """The record of the checkpoint whose Python frame this is; None while it is being made."""
    steps = frame.f_locals.get("gen")
    if steps is None or "new_frame" not in steps.gi_code.co_varnames:
        raise _no_record()
    return steps.gi_frame.f_locals.get("new_frame")


def _no_record() -> RuntimeError:
    return missing("utils.checkpoint.checkpoint.gen.new_frame", _FEATURE)


def in_reentrant_checkpoint() -> bool:
    """Whether the caller runs inside `torch.utils.checkpoint(..., use_reentrant=True)`."""
    return runs_inside(_REENTRANT_CHECKPOINT)
