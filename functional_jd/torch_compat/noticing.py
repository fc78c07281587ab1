"""What losses do that must be noticed when they do it: they begin a checkpoint, or apply a custom function."""

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from functools import partial
from threading import Lock, local
from types import NoneType
from typing import Any, Self
from weakref import ref

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction

from functional_jd.torch_compat.private_names import private
from functional_jd.torch_compat.recomputation import recomputation_of
from functional_jd.torch_compat.torch_internals import GRAD_FN, torch_function_disabled, untraced

# The record of a checkpoint. Its `save_inputs` is called when the checkpoint begins.
CheckpointFrame: Any = private(
    "utils.checkpoint._CheckpointFrame", "checkpoints and custom functions", "save_inputs", otherwise=False
)
# The class whose `apply` all custom functions call: a base, which those that were kept as `F.apply` call too, where
# `Function` has one in Python around it; from torch 2.15 on, `Function` itself.
_BASE: Any = torch.autograd.Function.__mro__[1]
_IN_PYTHON = isinstance(vars(torch.autograd.Function).get("apply"), classmethod)
FunctionHome: Any = _BASE if _IN_PYTHON and _BASE.__module__ == "torch.autograd.function" else torch.autograd.Function

Context = Callable[[], AbstractContextManager[Any]]


class RunsAgain:
    """A context that is told of what begins in this thread and runs again in the backward pass: checkpoints, and custom
    functions that call what they are given, such as adjoints and reentrant checkpoints.
    """

    outer: "RunsAgain | None"

    def again(self) -> Context:
        """What makes the context around the second run of what begins now. It must not hold what comes later, or the
        graph would keep itself alive.
        """
        raise NotImplementedError

    @untraced
    def __enter__(self) -> Self:
        self.outer = _THREAD.told
        if self.outer is None:
            _replace()
        _THREAD.told = self
        return self

    @untraced
    def __exit__(self, *error: object) -> None:
        _THREAD.told = self.outer
        if self.outer is None:
            _put_back()


def _add_contexts(contexts: dict[Any, Context]) -> None:
    """Add the contexts around the second run of what begins now, the innermost first."""
    told = None if torch.compiler.is_compiling() else _THREAD.told
    while told is not None:
        contexts[id(told)] = told.again()
        told = told.outer


class _Thread(local):
    told: RunsAgain | None = None


@untraced
def _save_inputs(frame: Any, *args: Any) -> Any:
    if _THREAD.told is not None:
        _add_contexts(recomputation_of(frame).contexts)
    return _OWN[0](frame, *args)


@untraced
def _apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
    contexts: dict[Any, Context] = {}
    if _THREAD.told is not None and _may_call(cls, args):
        _add_contexts(contexts)
    stored = _AS_STORED[1]
    own = super(FunctionHome, cls).apply if stored is None else stored.__get__(None, cls)
    found = own(*args, **kwargs)
    if contexts:
        with torch_function_disabled():
            nodes = [GRAD_FN(y) for y in (found if isinstance(found, tuple) else (found,)) if isinstance(y, Tensor)]
        for node in nodes:
            if isinstance(node, BackwardCFunction):
                # Autograd asks the node for its `apply`. A node that held itself would be freed late.
                node.apply = partial(_run_backward, ref(node), [*contexts.values()])
    return found


def _may_call(cls: Any, args: tuple[Any, ...]) -> bool:
    """Whether the backward of a custom function may call something: what it is given, or what surrounds its class."""
    given = any(not isinstance(x, _NO_FUNCTIONS) for x in args)
    return given or ("<locals>" in cls.__qualname__ and not cls.__module__.startswith("torch."))


def _run_backward(node: Any, contexts: list[Context], *cotangents: Any) -> Any:
    with ExitStack() as stack:
        for context in reversed(contexts):
            stack.enter_context(context())
        return type(node()).apply(node(), *cotangents)


_NO_FUNCTIONS = (Tensor, bool, int, float, complex, str, NoneType, torch.dtype, torch.device)


# Torch looks each of them up in its place whenever it calls it.
_REPLACED: list[tuple[Any, str, Any]] = [
    (CheckpointFrame, "save_inputs", _save_inputs),
    (FunctionHome, "apply", classmethod(_apply)),
]
_PLACES = _REPLACED if CheckpointFrame else []
_OWN: list[Any] = [getattr(home, name) for home, name, _ in _PLACES]
_AS_STORED: list[Any] = [vars(home).get(name) for home, name, _ in _PLACES]  # None where it is inherited
_THREAD, _LOCK = _Thread(), Lock()
_INSIDE = [0]  # how many contexts have them replaced


def _replace() -> None:
    with _LOCK:
        _INSIDE[0] += 1
        for index, (home, name, ours) in enumerate(_PLACES) if _INSIDE[0] == 1 else ():
            # Others may have replaced it too, or put back ours, which they found in the middle of losses.
            if vars(home).get(name) is not ours:
                _OWN[index], _AS_STORED[index] = getattr(home, name), vars(home).get(name)
            setattr(home, name, ours)


def _put_back() -> None:
    with _LOCK:
        _INSIDE[0] -= 1
        for index, (home, name, _) in enumerate(_PLACES) if _INSIDE[0] == 0 else ():
            if _AS_STORED[index] is None:
                delattr(home, name)
            else:
                setattr(home, name, _AS_STORED[index])
