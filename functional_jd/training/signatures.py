"""What is said where losses or a step could not be called with what a batch holds."""

from collections.abc import Callable, Sequence
from functools import partial
from inspect import Parameter, Signature, signature, unwrap
from typing import Any

import torch

from functional_jd.core.types import LossFunction
from functional_jd.objectives import Multitask
from functional_jd.torch_compat.slow_path import is_out_of_memory

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
    part = _first_part(losses)
    expected = _signature_of(part)
    if expected is None:
        return
    names = [name for name, x in expected.parameters.items() if x.kind in _BY_POSITION]
    if not _called_in_vain(part, 1 + with_buffers + len(batch), error):
        if names[1:2] == ["buffers"] and not with_buffers:
            error.add_note(f"{where}: the losses take 'buffers' after params, and received the batch there. {_BUFFERS}")
        elif not with_buffers and where == "train_state" and not is_out_of_memory(error):
            _note_no_buffers(losses, expected, batch, error)
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
    if len(own) == 1 and len(batch) > 1:
        cure = f"A tuple or a NamedTuple is spread: let the losses take {len(batch)} arguments, or wrap it: (batch,)."
    found = f"one argument, a {type(held).__name__}" if held is not None else f"{len(batch)} arguments"
    raise TypeError(
        f"{where}: expected a batch of {', '.join(map(repr, own)) or 'nothing'}, as the losses take after "
        f"{' and '.join(map(repr, after))}, found {found}: {error}. {cure}"
    ) from error


def _note_no_buffers(losses: LossFunction, expected: Signature, batch: Sequence[Any], error: Exception) -> None:
    """Say that no buffers were passed, where the batch may have come in their place: losses that take any number of
    arguments failed inside, or the heads take one argument more.
    """
    said = "train_state: no buffers were passed"
    if isinstance(losses, Multitask) and _called_in_vain(losses.heads, 2 + len(batch), error):
        heads = _signature_of(losses.heads)
        if heads is not None and _takes(heads, 3 + len(batch)):
            error.add_note(f"{said}, and the heads take one argument more. {_BUFFERS}")
        return
    after = list(expected.parameters.values())[1:]
    named = after and after[0].kind in _BY_POSITION
    if named and any(x.kind is Parameter.VAR_POSITIONAL for x in after) and _entered(_first_part(losses), error):
        error.add_note(f"{said}, and the losses received the batch as {after[0].name!r}, after params. {_BUFFERS}")


def _first_part(losses: LossFunction) -> Any:
    """What is called first with parameters, buffers and the batch."""
    return losses.features if isinstance(losses, Multitask) else getattr(losses, "loss", losses)


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
        f"state and {len(batch)} of its arguments: {error}. A batch that is a tuple, a NamedTuple or a list is spread: "
        "to pass it as one argument, wrap it: (batch,). Anything else, such as a dict, is one argument."
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
    if not str(error).startswith(f"{getattr(_innermost(f), '__qualname__', None)}()"):  # another function was called
        return False
    return not _entered(f, error)


def _innermost(f: Any) -> Any:
    """The function whose code runs when this is called."""
    f = unwrap(f)
    while isinstance(f, partial):
        f = unwrap(f.func)
    return f if hasattr(f, "__code__") else type(f).__call__


def _entered(f: Any, error: Exception) -> bool:
    """Whether an error comes from inside a function."""
    code, trace = getattr(_innermost(f), "__code__", None), error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code is code:
            return True
        trace = trace.tb_next
    return False


def _takes(expected: Signature, count: int) -> bool:
    try:
        expected.bind(*range(count))
    except TypeError:
        return False
    return True
