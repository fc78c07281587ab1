"""Notes on errors of functions that were called with other arguments than they take."""

from collections.abc import Callable, Sequence
from inspect import signature
from typing import Any

import torch

from functional_jd.core.types import LossFunction
from functional_jd.objectives import Multitask


def note_losses(where: str, losses: LossFunction, with_buffers: bool, batch: Sequence[Any], error: TypeError) -> None:
    """Add to an error what the losses take, if it is not what they received.

    Args:
        where: the function that the user called.
        losses: as the user gave them.
        with_buffers: whether they receive buffers after the parameters.
        batch: what they receive after that.
        error: what calling them raised.
    """
    called = losses.features if isinstance(losses, Multitask) else getattr(losses, "loss", losses)
    found = f"params{', buffers' * with_buffers} and {len(batch)} arguments of the batch"
    cure = "Spread a tuple: *batch; a dict is one argument."
    if not with_buffers:
        cure += " If the losses take buffers, pass buffers=dict(module.named_buffers())."
    _note(where, "losses", called, 1 + with_buffers + len(batch), error, found, cure)


def note_step(where: str, step: Callable[..., Any], batch: Sequence[Any], error: TypeError) -> None:
    """Add to an error what a step takes, if it is not what it received."""
    cure = (
        "Bind the rest: functools.partial(functional_jd.step, losses=..., aggregator=..., optimizer=...). A batch that "
        "is a tuple, a NamedTuple or a list is spread: to pass it as one argument, wrap it: (batch,)."
    )
    _note(where, "step", step, 1 + len(batch), error, f"the state and {len(batch)} arguments of the batch", cure)


def _note(where: str, name: str, f: Any, count: int, error: TypeError, found: str, cure: str) -> None:
    if torch.compiler.is_compiling():
        return
    try:
        expected = signature(f)
    except (TypeError, ValueError):  # no function, or one written in C
        return
    try:
        expected.bind(*range(count))
    except TypeError:
        names = ", ".join(str(x.replace(annotation=x.empty, default=x.empty)) for x in expected.parameters.values())
        error.add_note(f"{where}: {name}({names}) received {found}. {cure}")
