"""The loop around the step, as a function and as an iterator, and its watch over skipped steps."""

import warnings
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import suppress
from inspect import signature
from math import isfinite
from operator import length_hint
from typing import Any

import torch
from torch import Tensor

from functional_jd.aggregation.views import loss_vector
from functional_jd.core.arguments import check_flag, check_function, check_integer, here, refuse
from functional_jd.core.tree import all_finite, tree_leaves, tree_names
from functional_jd.core.types import Losses
from functional_jd.torch_compat.callers import user_level
from functional_jd.torch_compat.torch_internals import vmaps_inside
from functional_jd.training.state import StepInfo, TrainState, named_values

_Pairs = Generator[tuple[TrainState, StepInfo], None, None]


def fit(
    step: Callable[..., tuple[TrainState, StepInfo]],
    state: TrainState,
    batches: Iterable[Any],
    *,
    on_step: Callable[..., Any] | None = None,
    progress: bool = False,
    patience: int | None = 200,
) -> TrainState:
    """Take one step per batch.

    `for batch in batches: state, info = step(state, *batch); on_step(info, state)`

    Args:
        step: `step(state, *batch) -> (state, info)`, as `functools.partial(jd.step, **method)`, compiled, or your own.
        state: from `train_state`, or from the last `fit`.
        batches: a `DataLoader`, a list, a generator. A tuple, a NamedTuple or a list is spread over the arguments of
            `step`; anything else is one argument. To pass a tuple whole, wrap it: `((batch,) for batch in loader)`.
        on_step: `on_step(info, state)` or `on_step(info)`, called after every step, such as `history.append`.
        progress: whether to show a bar of tqdm on stderr, with the losses and the number of skipped steps.
        patience: after so many skipped steps in a row, training ends with an error; `None`: never. After 20, there is a
            `RuntimeWarning` that names the losses. Flags are fetched from the device every ten steps.

    Returns:
        The state after the last batch; `state` itself, if there is none.

    Raises:
        TypeError: `step` cannot be called with what a batch holds; `batches` is not iterable.
        TrainingStalled: too many steps in a row were skipped.
        ValueError: a batch with losses of other names.

    Guarantees:
        Two calls on halves of the batches are one call on all.
        The exception that ends the loop, also `KeyboardInterrupt`, has the state after the last step as `state`.

    Example:
        >>> method = {"losses": lambda w, x: (w - x).square(), "aggregator": upgrad(), "optimizer": sgd(0.1)}
        >>> state, take = train_state(torch.zeros(2), torch.ones(2), **method), functools.partial(step, **method)
        >>> state = fit(take, state, [torch.ones(2)] * 3, on_step=(history := []).append)  # progress=True
    """
    check_flag("progress", progress)
    if on_step is not None:
        check_function("on_step", on_step, "Pass history.append for a list history.")
    with_state, pairs = _takes_two(on_step), _checked(step, state, batches, patience)
    pairs = _with_bar(pairs, length_hint(batches)) if progress else pairs
    taken = 0
    try:
        for taken, (state, info) in enumerate(pairs, 1):  # noqa: B007
            if on_step is not None:
                on_step(info, state) if with_state else on_step(info)
    except BaseException as error:
        if not hasattr(error, "state"):
            with suppress(AttributeError):  # an exception may have slots
                error.state = state  # pyright: ignore[reportAttributeAccessIssue]
                error.add_note(f"fit: the attribute `state` of this exception is the state after {taken} steps.")
        raise
    finally:
        pairs.close()
    return state


def steps(
    step: Callable[..., tuple[TrainState, StepInfo]],
    state: TrainState,
    batches: Iterable[Any],
    *,
    patience: int | None = 200,
) -> Iterator[tuple[TrainState, StepInfo]]:
    """Take one step per batch, and yield the state and the info after each: `fit` as a loop of your own.

    Args:
        step: as for `fit`, and so are `state`, `batches` and `patience`; it raises what `fit` raises.

    Returns:
        An iterator of `(state, info)`. Every step starts from the state that the last one returned.
    """
    return _checked(step, state, batches, patience)


def _takes_two(f: Any) -> bool:
    """Whether a function needs more than one argument. Nothing is known of a function in C."""
    try:
        given = signature(f).parameters.values()
    except (TypeError, ValueError):
        return False
    return sum(x.default is x.empty and x.kind <= x.POSITIONAL_OR_KEYWORD for x in given) > 1


def _checked(step: Any, state: Any, batches: Any, patience: Any) -> _Pairs:
    watch = SkipWatch(patience)
    check_function("step", step, "Pass functools.partial(functional_jd.step, losses=..., ...).")
    check_batches(batches, "A single batch is [batch].")

    def pairs(state: Any) -> _Pairs:
        for batch in batches:
            scale = getattr(state, "scale", None)
            state, info = step(state, *arguments_of(batch))
            yield state, info
            watch.follow(scale, state, info)  # afterwards, so that the last step is seen too

    return pairs(state)


def check_batches(batches: Any, cure: str) -> None:
    """Refuse what is not a sequence of batches."""
    iterable = isinstance(batches, Iterable) or hasattr(batches, "__getitem__")
    if not iterable or (isinstance(batches, Tensor) and not batches.ndim):
        refuse("batches", "a DataLoader, a list or a generator", batches, cure)


def arguments_of(batch: Any) -> tuple[Any, ...]:
    """The entries of a batch, as arguments of a step."""
    return tuple(batch) if isinstance(batch, tuple | list) else (batch,)


def _with_bar(pairs: _Pairs, length: int) -> _Pairs:
    """The pairs, with a bar of tqdm that leaves values on the device until it is drawn."""
    from tqdm import tqdm

    bar, skipped = tqdm(total=length or None, unit="step"), torch.zeros((), dtype=torch.int64)
    info: Any = None
    draw = lambda: bar.set_postfix(_summary(info.losses) | {"skipped": str(int(skipped))}, refresh=False)
    try:
        for state, info in pairs:
            yield state, info
            skipped = was_taken(info).logical_not() + skipped
            if bar.update():
                draw()
    finally:
        if info is not None:
            draw()
        bar.close()


def _summary(losses: Losses) -> dict[str, str]:
    """Up to four losses by name; of more, the mean, or the root of the mean square if they have both signs."""
    named, values = named_values(losses), loss_vector(losses)
    if len(named) > 4:
        both = bool(values.min() < 0 < values.max())
        named = [("rms", float(values.square().mean().sqrt())) if both else ("loss", float(values.mean()))]
    return {name: f"{value:.4g}" for name, value in named}


WARN_AFTER, _READ_EVERY = 20, 10  # a scale settles in fewer skipped steps


class TrainingStalled(RuntimeError):  # noqa: N818, as StopIteration
    """Raised by `fit` and `steps` when too many steps in a row were skipped.

    Attributes:
        state: the state after the last step that was taken, its scale included; the state at the start, if none was.
    """

    def __init__(self, message: str, state: Any = None):
        super().__init__(message)
        self.state = state


class SkipWatch:
    """Counts the steps that were skipped in a row, exactly: flags are read ten at a time, or where a limit is near."""

    def __init__(self, patience: int | None):
        if patience is not None:
            check_integer("patience", patience, 1, "It counts steps; None never stops.")
        self.name, self.patience = here(), patience
        # Of all steps since the last one that is known to be taken: the scale before, the flags, the answer.
        self.run: list[tuple[Any, Tensor, Tensor]] = []
        self.skipped = 0  # how many of them, from the first on, are known to be skipped
        self.names: list[str] = []

    def follow(self, scale: Any, state: Any, info: Any) -> None:
        """Count a step, given the scale before it. Raise TrainingStalled for the last of `patience` skipped steps."""
        shown = tree_leaves([getattr(info, name, "") for name in ("losses", "weights", "finite", "moved")])
        if vmaps_inside(0) or not all(isinstance(x, Tensor) for x in shown):
            return
        names, before = tree_names(info.losses), self.names
        if before and names != before:  # of which a rule without a memory cannot tell
            raise ValueError(
                f"{self.name}: all batches must have the same losses, found {before} and then {names}. For an "
                "objective that a batch does not have, return 0 * another loss."
            )
        self.names = names
        self.run.append((scale, info.finite, was_taken(info)))
        if len(self.run) - self.skipped < _READ_EVERY and len(self.run) not in (WARN_AFTER, self.patience):
            return
        self._read()
        if self.skipped == self.patience:
            good = state._replace(scale=self.run[0][0]) if isinstance(state, TrainState) else state
            last = "The attribute `state` of this exception is the state after the last step that was taken."
            raise TrainingStalled(f"{self._account(info)} {last}", good)
        if self.skipped == WARN_AFTER:
            end = "" if self.patience is None else f" Training stops after {self.patience} of them."
            warnings.warn(self._account(info) + end, RuntimeWarning, stacklevel=user_level())

    def _read(self) -> None:
        for taken in torch.stack([answer for *_, answer in self.run[self.skipped :]]).tolist():
            self.skipped += 1
            if taken:
                del self.run[: self.skipped]
                self.skipped = 0

    def _account(self, info: StepInfo) -> str:
        """The losses or rows that were not finite, and a possible fix."""
        losses = named_values(info.losses)
        bad, rows = [name for name, value in losses if not isfinite(value)], ""
        if bad:
            found = f"losses were not finite themselves: {', '.join(bad)}"
        elif not all_finite(info.weights):
            found = (
                "losses and rows were finite and the weights of the rule were not, for the losses "
                f"{', '.join(f'{x:.4g}' for _, x in losses)}. Some rules need positive losses"
            )
        elif info.finite.all():
            found = "parameters in float16 would overflow: lower the rate, or keep them in float32"
        else:
            found = (
                "losses were finite and derivatives were not: diagnose(jacobian) names the row, or none if only the "
                "sum overflows. The unused branch of torch.where has a derivative too: replace its argument as well"
            )
        if info.finite.shape == (len(losses),):
            counts = (~torch.stack([finite for _, finite, _ in self.run])).sum(0).tolist()
            shown = [f"{name} ({count} times)" for (name, _), count in zip(losses, counts, strict=True) if count]
            rows = f" Rows that were not finite: {', '.join(shown)}."
        elif bad or all_finite(info.weights):
            rows = " Pass scale_state(shape=(m,)), one scale per objective, to see which rows were not finite."
        return f"{self.name}: the last {len(self.run)} steps were skipped. In the last step, {found}.{rows}"


def was_taken(info: StepInfo) -> Tensor:
    """Whether a step was taken, bool `[]`; of a batch of steps under vmap, whether any of them was."""
    return info.moved.any() if isinstance(info.moved, Tensor) else info.finite.all()
