"""What is said where losses or a step could not be called with what a batch holds."""

from collections.abc import Callable, Sequence
from functools import partial
from inspect import Parameter, Signature, signature, unwrap
from typing import Any

import torch

from functional_jd.core.types import LossFunction
from functional_jd.objectives import Multitask

_BUFFERS = "If these are buffers, pass buffers=dict(module.named_buffers()), and return (losses, buffers)."


def blame_batch(where: str, losses: LossFunction, with_buffers: bool, batch: Sequence[Any], error: Exception) -> None:
    """Say what the losses take, if they could not be called with this batch; an error from inside them is their own.

    Args:
        where: the function that the user called, `"train_state"` or `"step"`.
        losses: as the user gave them.
        with_buffers: whether they receive buffers after the parameters.
        batch: what they receive after that.
        error: what was raised.
    """
    part = losses.features if isinstance(losses, Multitask) else getattr(losses, "loss", losses)
    expected = _signature_of(part)
    if expected is None:
        return
    names = [name for name, x in expected.parameters.items() if x.kind in _BY_POSITION]
    if not _called_in_vain(part, 1 + with_buffers + len(batch), error):
        if names[1:2] == ["buffers"] and not with_buffers:
            error.add_note(f"{where}: the losses take 'buffers' after params, and received the batch there. {_BUFFERS}")
        return
    held = batch[0] if len(batch) == 1 and isinstance(batch[0], tuple | list | dict) else None
    after, own = names[: 1 + with_buffers], names[1 + with_buffers :]
    is_whole = held is not None and len(held) == len(own) and own[:1] != ["buffers"]
    if not with_buffers and not is_whole and _takes(expected, 2 + len(batch)):
        raise TypeError(
            f"{where}: expected losses of params and of the {len(batch)} arguments of the batch, found ones that take "
            f"another, {names[1]!r}, after params. {_BUFFERS}"
        ) from error
    cure = "Pass what the losses take, in its order."
    if any(isinstance(x, tuple | list | dict) for x in batch):
        cure = "If the batch is a tuple, spread it: *batch; a dict is one argument, which the losses take whole."
    found = f"one argument, a {type(held).__name__}" if held is not None else f"{len(batch)} arguments"
    raise TypeError(
        f"{where}: expected a batch of {', '.join(map(repr, own)) or 'nothing'}, as the losses take after "
        f"{' and '.join(map(repr, after))}, found {found}: {error}. {cure}"
    ) from error


def blame_step(where: str, step: Callable[..., Any], batch: Sequence[Any], error: Exception) -> None:
    """Say what a step has to take, if it could not be called with the state and this batch."""
    expected = _signature_of(step)
    if expected is None or not _called_in_vain(step, 1 + len(batch), error):
        return
    missing = [repr(name) for name, x in expected.parameters.items() if _is_needed_by_name(x)]
    if missing:
        raise TypeError(
            f"{where}: expected a step of the state and the batch alone, found one that takes {', '.join(missing)} "
            "too. Bind them: functools.partial(functional_jd.step, losses=..., aggregator=..., optimizer=...)."
        ) from error
    raise TypeError(
        f"{where}: expected a step of the state and of what a batch holds, found one that cannot be called with the "
        f"state and {len(batch)} of its arguments: {error}. A batch that is a tuple or a list is spread; anything "
        "else, such as a dict, is one argument."
    ) from error


_BY_POSITION = (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD)


def _is_needed_by_name(parameter: Parameter) -> bool:
    return parameter.kind is Parameter.KEYWORD_ONLY and parameter.default is Parameter.empty


def _signature_of(f: Any) -> Signature | None:
    """None where Python shows none: what is no function, or written in C."""
    if torch.compiler.is_compiling():
        return None
    try:
        return signature(f)
    except (TypeError, ValueError):
        return None


def _called_in_vain(f: Any, count: int, error: Exception) -> bool:
    """Whether an error says that a function does not take so many arguments, and its code was never entered."""
    expected = _signature_of(f)
    if expected is None or not isinstance(error, TypeError) or _takes(expected, count):
        return False
    f = unwrap(f)
    while isinstance(f, partial):
        f = unwrap(f.func)
    f = f if hasattr(f, "__code__") else type(f).__call__
    if not str(error).startswith(f"{getattr(f, '__qualname__', None)}()"):  # another function was called
        return False
    trace = error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code is getattr(f, "__code__", None):
            return False
        trace = trace.tb_next
    return True


def _takes(expected: Signature, count: int) -> bool:
    try:
        expected.bind(*range(count))
    except TypeError:
        return False
    return True
