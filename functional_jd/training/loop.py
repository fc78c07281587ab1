"""The loop around the step, as a function and as an iterator. Write it by hand if neither fits."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from inspect import signature
from operator import length_hint
from typing import Any

import torch
from torch import Tensor

from functional_jd.core.arguments import check_flag, check_function, refuse
from functional_jd.core.names import objective_names
from functional_jd.core.tree import tree_leaves
from functional_jd.core.types import Losses
from functional_jd.training.skips import SkipWatch, was_taken
from functional_jd.training.state import StepInfo, TrainState, note_call


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
        step: `step(state, *batch) -> (state, info)`, such as `functools.partial(functional_jd.step, **method)`, what
            `compiled` makes of that, or your own.
        state: from `train_state`, or from the last `fit`.
        batches: a `DataLoader`, a list, a generator. A tuple, a NamedTuple or a list is spread over the arguments of
            `step`; anything else, such as a tensor or a dict, is one argument. To pass a tuple whole, wrap it:
            `((batch,) for batch in loader)`.
        on_step: `on_step(info, state)`, called after every step, or `on_step(info)`: `history.append`, with
            `history = []`, keeps all that plots and logs need. Whatever it raises ends the loop.
        progress: whether to show a bar of tqdm on stderr, with the losses by name, or the mean of more than four, and
            the steps skipped.
        patience: after so many skipped steps in a row, training ends with an error; `None`: never. After 20, there is a
            `RuntimeWarning` that names the losses. Flags are fetched from the device every ten steps.

    Returns:
        The state after the last batch; `state` itself, if there is none.

    Raises:
        TypeError: `step` cannot be called with what a batch holds; `batches` is not iterable.
        TrainingStalled: too many steps in a row were skipped.

    Guarantees:
        Two calls on halves of the batches are one call on all.
        Whatever ends the loop, Ctrl-C too, has the state after the last step as its attribute `state`, unless it has an
        attribute of that name already.

    Example:
        >>> method = {"losses": lambda w, x: (w - x).square(), "aggregator": upgrad(), "optimizer": sgd(0.1)}
        >>> state, loader = train_state(torch.zeros(2), torch.ones(2), **method), [torch.ones(2)] * 3
        >>> take, history = functools.partial(step, **method), []
        >>> state = fit(take, state, loader, on_step=history.append)  # progress=True

        To stop with Ctrl-C and keep the state:

        >>> try:
        ...     state = fit(take, state, loader)
        ... except KeyboardInterrupt as stopped:
        ...     state = stopped.state
    """
    check_flag("progress", progress)
    with_state = on_step is not None and _takes_state(on_step)
    pairs = _checked(step, state, batches, SkipWatch(patience))
    bar = _Bar(length_hint(batches)) if progress else None
    taken = 0
    try:
        for state, info in pairs:
            taken += 1
            if on_step is not None:
                on_step(info, state) if with_state else on_step(info)
            if bar is not None:
                bar.advance(info)
    except BaseException as error:
        if not hasattr(error, "state"):
            with suppress(AttributeError):  # an exception may have slots
                error.state = state  # pyright: ignore[reportAttributeAccessIssue]
                error.add_note(f"fit: the attribute `state` of this exception is the state after {taken} steps.")
        raise
    finally:
        if bar is not None:
            bar.close()
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
        step: as for `fit`, and so are `state`, `batches` and `patience`.

    Returns:
        An iterator of `(state, info)`. Every step starts from the state that the last one returned, whatever the loop
        assigns to its own variable. It raises what `fit` raises.

    Example:
        >>> method = {"losses": lambda w, x: (w - x).square(), "aggregator": upgrad(), "optimizer": sgd(0.1)}
        >>> state, loader = train_state(torch.zeros(2), torch.ones(2), **method), [torch.ones(2)] * 50
        >>> for state, info in steps(functools.partial(step, **method), state, loader):
        ...     if max(info.losses) < 0.1:
        ...         break
    """
    return _checked(step, state, batches, SkipWatch(patience))


def _checked(step: Any, state: Any, batches: Any, watch: SkipWatch) -> Iterator[tuple[TrainState, StepInfo]]:
    check_function("step", step, "Pass functools.partial(functional_jd.step, losses=..., ...).")
    iterable = isinstance(batches, Iterable) or hasattr(batches, "__getitem__")
    if not iterable or (isinstance(batches, Tensor) and not batches.ndim):
        refuse("batches", "a DataLoader, a list or a generator", batches, "A single batch is [batch].")
    return _iterate(step, state, batches, watch)


def _iterate(step: Any, state: Any, batches: Iterable[Any], watch: SkipWatch) -> Iterator[tuple[TrainState, StepInfo]]:
    for batch in batches:
        scale, given = getattr(state, "scale", None), batch if isinstance(batch, tuple | list) else (batch,)
        try:
            state, info = step(state, *given)
        except TypeError as error:
            text = (
                f"received the state and {len(given)} arguments of the batch. Bind the rest: functools.partial(step, "
                "losses=..., aggregator=..., optimizer=...). A tuple, a NamedTuple or a list is spread: to pass it as "
                "one argument, wrap it: (batch,)"
            )
            note_call(error, step, 1 + len(given), f"{watch.name}: step", text)
            raise
        yield state, info
        # Afterwards, so that the last step is seen too.
        watch.follow(scale, state, info)


def _takes_state(on_step: Callable[..., Any]) -> bool:
    """Whether a function cannot be called with the info alone."""
    check_function("on_step", on_step, "Pass history.append for a list history.")
    try:
        signature(on_step).bind(None)
    except TypeError:
        return True
    except ValueError:  # some functions written in C have no signature
        pass
    return False


class _Bar:
    """A bar of tqdm that leaves values on the device until it is drawn."""

    def __init__(self, length: int):
        from tqdm import tqdm

        self.bar = tqdm(total=length or None, unit="step")
        self.losses, self.skipped = None, torch.zeros((), dtype=torch.int64)

    def advance(self, info: StepInfo) -> None:
        skipped = was_taken(info).logical_not()
        self.losses, self.skipped = info.losses, skipped + self.skipped
        if self.bar.update():
            self.draw()

    def draw(self) -> None:
        if self.losses is not None:
            shown = _summary(self.losses) | {"skipped": str(int(self.skipped))}
            self.bar.set_postfix(shown, refresh=False)

    def close(self) -> None:
        self.draw()
        self.bar.close()


def _summary(losses: Losses) -> dict[str, str]:
    """Up to four losses by name; of more, the mean, or the root of the mean square if they have both signs."""
    values = torch.cat([leaf.detach().reshape(-1).cpu().double() for leaf in tree_leaves(losses)])
    if len(values) <= 4:
        return {name: f"{value:.4g}" for name, value in zip(objective_names(losses), values.tolist(), strict=True)}
    if values.min() < 0 < values.max():
        return {"rms": f"{values.square().mean().sqrt():.4g}"}
    return {"loss": f"{values.mean():.4g}"}
