"""The loop around the step, as an iterator."""

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

from torch import Tensor

from functional_jd.core.arguments import check_function, refuse
from functional_jd.training.blame import bad_derivatives
from functional_jd.training.signatures import note_step
from functional_jd.training.skips import SkipWatch
from functional_jd.training.state import StepInfo, TrainState


def steps(
    step: Callable[..., tuple[TrainState, StepInfo]],
    state: TrainState,
    batches: Iterable[Any],
    *,
    patience: int | None = 200,
) -> Iterator[tuple[TrainState, StepInfo]]:
    """Take one step per batch, and yield the state and the info after each: `fit` as a loop of your own.

    Args:
        step: `step(state, *batch) -> (state, info)`, as for `fit`.
        state: from `train_state`, or from the last loop.
        batches: as for `fit`.
        patience: after so many skipped steps in a row the loop ends with an error; `None`: never.

    Returns:
        An iterator of `(state, info)`. Every step starts from the state that the last one returned, whatever the loop
        assigns to its own variable.

    Raises:
        TypeError: `step` is not callable, or not with what a batch holds; `batches` is not iterable.
        ValueError: `patience` is not a positive integer.
        TrainingStalled: too many steps in a row were skipped.

    Laws:
        The last pair holds `fit(step, state, batches)`. After an exception, `break` or Ctrl-C, the variable of the
        loop holds the last state.

    Example:
        >>> method = {"losses": lambda w, x: (w - x).square(), "aggregator": upgrad(), "optimizer": sgd(0.1)}
        >>> state, loader = train_state(torch.zeros(2), torch.ones(2), **method), [torch.ones(2)] * 50
        >>> for state, info in steps(functools.partial(step, **method), state, loader):
        ...     if max(info.losses) < 0.1:
        ...         break
    """
    return iterate(step, state, batches, patience, "steps")


def iterate(
    step: Callable[..., tuple[TrainState, StepInfo]],
    state: TrainState,
    batches: Iterable[Any],
    patience: int | None,
    where: str,
) -> Iterator[tuple[TrainState, StepInfo]]:
    """`steps`, with the name of the calling function for the errors."""
    cure = "Pass functools.partial(functional_jd.step, losses=..., aggregator=..., optimizer=...)."
    check_function(where, "step", step, cure)
    iterable = isinstance(batches, Iterable) or hasattr(batches, "__getitem__")
    if not iterable or (isinstance(batches, Tensor) and not batches.ndim):
        refuse(where, "batches", "a DataLoader, a list or a generator", batches, "A single batch is [batch].")
    return _iterate(step, state, batches, SkipWatch(where, patience))


def _iterate(step: Any, state: Any, batches: Iterable[Any], watch: SkipWatch) -> Iterator[tuple[TrainState, StepInfo]]:
    for batch in batches:
        scale, given = getattr(state, "scale", None), batch if isinstance(batch, tuple | list) else (batch,)
        try:
            state, info = step(state, *given)
        except TypeError as error:
            note_step(watch.where, step, given, error)
            raise
        yield state, info
        # Afterwards, so that the last step is seen too.
        watch.follow(scale, state, info, partial(bad_derivatives, step, state, given, info))
