"""Fallbacks: where a transform raises, undo what was changed in place, do the same in a slower way, and warn."""

import random
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from traceback import walk_tb
from typing import Any, TypeVar

import torch
from torch import Tensor

from functional_jd.torch_compat.callers import OURS, TORCH, SlowPathWarning, here, user_level
from functional_jd.torch_compat.torch_internals import constant_while_tracing

Result = TypeVar("Result")


def attempt(fast: Callable[[], Result], slow: Callable[[], Result], *, instead: str, journal: Any = None) -> Result:
    """`fast()`; where that raises, `slow()`, with a `SlowPathWarning` that says why and at what price.
    `instead` names the work and the cost of `slow`. With the `StateJournal` of the changes by `fast`, buffers are put
    back and random numbers are drawn again, so that both are those of one evaluation. Errors of the losses themselves
    come from `slow`; those of missing memory from `fast` too, as the slow way takes no less.
    """
    draws = random_state() if journal is not None else None
    try:
        return fast()
    except Exception as error:
        # The last is how a checkpoint around the caller ends its second run, as soon as it has what it needs.
        if is_out_of_memory(error) or type(error).__name__ == "_StopRecomputationError":
            raise
        reason = _reason(error)
    if journal is not None:
        journal.undo()
        set_random_state(draws)
    result = slow()
    warnings.warn(f"{here()}: {instead}, because {reason}", SlowPathWarning, stacklevel=user_level())
    return result


def is_out_of_memory(error: BaseException) -> bool:
    """Whether memory was missing, on a CPU too, where torch has no class for it."""
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or "can't allocate memory" in str(error)


@constant_while_tracing  # torch 2.11 takes `is_exporting` for true in all that torch.compile traces
def refuse_export() -> None:
    """Raise if torch.export traces: what torch.func returns is a constant to it."""
    if torch.compiler.is_exporting():
        found = "the tracer must trace derivatives, found torch.export, which takes results of torch.func for constants"
        raise ValueError(f"{here()}: {found}. Export torch.fx.experimental.proxy_tensor.make_fx(f)(*args).")


def random_state() -> list[Tensor]:
    """The state of torch's default generators: of the CPU, and of all devices unless launches are captured."""
    states, accelerator = [torch.get_rng_state()], torch.accelerator.current_accelerator(check_available=True)
    module = None if accelerator is None else torch.get_device_module(accelerator)
    if module is None or getattr(module, "is_current_stream_capturing", bool)():
        return states
    return states + [module.get_rng_state(index) for index in range(torch.accelerator.device_count())]


def set_random_state(states: Any) -> None:
    """Put the generators back to a result of `random_state`."""
    torch.set_rng_state(states[0])
    for index, state in enumerate(states[1:]):
        torch.get_device_module(torch.accelerator.current_accelerator()).set_rng_state(state, index)


def random_state_outside_torch() -> Callable[[], Any]:
    """A function that puts the generators of Python's `random` and of `numpy.random` back to their present state."""
    kept: list[Any] = [(random.setstate, random.getstate())]
    if (numpy := sys.modules.get("numpy.random")) is not None:
        kept.append((numpy.set_state, numpy.get_state()))
    return lambda: [put_back(state) for put_back, state in kept]


def _reason(error: BaseException) -> str:
    """The line of the user's code that failed, and the first line of the message, in which torch names the op."""
    frames = [(frame.f_code.co_filename, line) for frame, line in walk_tb(error.__traceback__)]
    own = [(file, line) for file, line in frames if not file.startswith((OURS, TORCH, "<"))]
    message = (str(error).strip().splitlines() or [type(error).__name__])[0]
    place = f"{Path(own[-1][0]).name}:{own[-1][1]}: " if own else ""
    return f"{place}{type(error).__name__}: {message}"
