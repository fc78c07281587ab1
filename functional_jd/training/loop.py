"""The loop around the step, as a function and as an iterator. Write it by hand if neither fits."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from inspect import signature
from operator import length_hint
from typing import Any

from torch import Tensor

from functional_jd.core.arguments import check_flag, check_function, refuse
from functional_jd.training.bar import Bar
from functional_jd.training.compiled import is_compiled
from functional_jd.training.signatures import note_step
from functional_jd.training.skips import SkipWatch
from functional_jd.training.state import StepInfo, TrainState


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
        state: from `train_state`, or from the last `fit`. `train_state` starts the rule on one batch: of a generator,
            spend the first on it, `train_state(params, *next(batches), **method)`.
        batches: a `DataLoader`, a list, a generator. A tuple, a NamedTuple or a list is spread over the arguments of
            `step`; anything else, such as a tensor or a dict, is one argument. Losses that take a NamedTuple whole get
            it by `((batch,) for batch in loader)`.
        on_step: `on_step(info, state)`, called after every step. A function that may be called with one argument is
            given the info alone: `history.append`, with `history = []`, keeps all that plots and logs need. Whatever it
            raises ends the loop.
        progress: whether to show a bar of tqdm on stderr, with the losses by name, or the mean of more than four, and
            the steps skipped. Values are fetched from the device only when the bar is drawn, several times a second at
            most. While the first step compiles, the bar says so.
        patience: after so many skipped steps in a row, training ends with an error; `None`: never. After 20, there is a
            `RuntimeWarning` that names the losses. Flags are fetched from the device every ten steps.

    Returns:
        The state after the last batch; `state` itself, where there is none.

    Raises:
        ImportError: `progress` without tqdm.
        TypeError: `step` is not callable, or not with what a batch holds; `batches` is not iterable; `on_step` takes
            neither one nor two arguments.
        ValueError: `patience` is not a positive integer.
        TrainingStalled: too many steps in a row were skipped.

    Laws:
        Two calls on halves of the batches are one call on all. Prints nothing, but for the bar. No exception loses the
        state: whatever ends the loop, Ctrl-C and what `step`, `on_step` or `batches` raise, has the state after the
        last step as its attribute `state`, unless it has an attribute of that name already. `steps` is the same loop as
        an iterator.

    Example:
        >>> method = {"losses": lambda w, x: (w - x).square(), "aggregator": upgrad(), "optimizer": sgd(0.1)}
        >>> state, loader = train_state(torch.zeros(2), torch.ones(2), **method), [torch.ones(2)] * 3
        >>> take, history = functools.partial(step, **method), []
        >>> state = fit(take, state, loader, on_step=history.append)  # progress=True

        To stop with Ctrl-C and go on with what there is (in a notebook, `sys.last_value.state` has it too):

        >>> try:
        ...     state = fit(take, state, loader)
        ... except KeyboardInterrupt as stopped:
        ...     state = stopped.state

        An info does not tell the scale that the step ran at. A step of your own keeps it, for `plotting.scales` and
        `plotting.history`:

        >>> scales = []
        >>> def keep(state, *batch):
        ...     scales.append(state.scale)
        ...     return step(state, *batch, **method)
        >>> state = fit(keep, state, loader, on_step=history.append)
    """
    check_flag("fit", "progress", progress)
    told = _as_pair(on_step)
    pairs = _checked(step, state, batches, patience, "fit")
    bar = Bar(length_hint(batches), is_compiled(step)) if progress else None
    taken = 0
    try:
        for state, info in pairs:
            taken += 1
            if told is not None:
                told(info, state)
            if bar is not None:
                bar.advance(info)
    except BaseException as error:
        _carry(error, state, taken)
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
    return _checked(step, state, batches, patience, "steps")


def _checked(
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
        watch.follow(scale, state, info)


def _as_pair(on_step: Callable[..., Any] | None) -> Callable[[StepInfo, TrainState], Any] | None:
    """Return a function of the info and the state that calls `on_step` with both, or with the info if that will do."""
    if on_step is None:
        return None

    def with_info(info: StepInfo, _: TrainState) -> None:
        on_step(info)

    check_function("fit", "on_step", on_step, "Pass history.append for a list history.")
    try:
        parameters = signature(on_step)
    except ValueError:  # some functions written in C have no signature
        return with_info
    for chosen, arguments in ((with_info, (None,)), (on_step, (None, None))):
        with suppress(TypeError):
            parameters.bind(*arguments)
            return chosen
    raise TypeError(
        f"fit: on_step must be a function of the info and the state, or of the info, found {parameters}. "
        "Bind its other arguments with functools.partial."
    )


def _carry(error: BaseException, state: TrainState, taken: int) -> None:
    """Give an exception the state as an attribute, and a note that says so."""
    if not hasattr(error, "state"):
        with suppress(AttributeError):  # an exception may have slots
            error.state = state  # pyright: ignore[reportAttributeAccessIssue]
            error.add_note(f"fit: the attribute `state` of this exception is the state after {taken} steps.")
