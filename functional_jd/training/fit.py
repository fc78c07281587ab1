"""The loop around the step: short enough to write by hand, which is what to do as soon as it does not fit."""

from collections.abc import Callable, Iterable
from operator import length_hint
from typing import Any

from functional_jd.core.tree import tree_leaves
from functional_jd.training.state import StepInfo, TrainState


def fit(
    step: Callable[..., tuple[TrainState, StepInfo]],
    state: TrainState,
    batches: Iterable[Any],
    *,
    on_step: Callable[[StepInfo], Any] | None = None,
    progress: bool = False,
) -> TrainState:
    """Take one step per batch.

    `for batch in batches: state, info = step(state, *batch); on_step(info)`

    Args:
        step: `step(state, *batch) -> (state, info)`: `functools.partial(functional_jd.step, losses=..., aggregator=...,
            optimizer=...)`, or that compiled, or your own.
        state: from `train_state`, or from the last `fit`. `train_state` starts the rule on one batch: of a generator,
            spend the first on it, `train_state(params, *next(batches), **method)`.
        batches: a `DataLoader`, a list, a generator. A tuple or a list is spread over the arguments of `step`; anything
            else, such as a tensor or a dict, is one argument.
        on_step: called after every step. `history.append`, with `history = []`, keeps all that plots and logs need;
            whatever it raises ends the loop.
        progress: whether to show a bar of tqdm on stderr, with the mean of the losses and the steps skipped. Values are
            fetched from the device only when the bar is drawn, several times a second at most.

    Returns:
        The state after the last batch; `state` itself, where there is none.

    Raises:
        ImportError: `progress` without tqdm.
        TypeError: `step` is not callable.

    Laws:
        Two calls on halves of the batches are one call on all. Prints nothing, but for the bar.

    Example:
        >>> history = []
        >>> state = fit(partial(step, **method), state, loader, on_step=history.append, progress=True)

        An info does not tell the scale that the step ran at. A step of your own keeps it, for `plotting.scales` and
        `plotting.history`:

        >>> scales = []
        >>> def keep(state, *batch):
        ...     scales.append(state.scale)
        ...     return step(state, *batch, **method)
        >>> state = fit(keep, state, loader, on_step=history.append)
    """
    if not callable(step):
        raise TypeError(
            f"fit: step must be a function, found {type(step).__name__}. "
            "Pass functools.partial(functional_jd.step, losses=..., aggregator=..., optimizer=...)."
        )
    bar = _Bar(length_hint(batches)) if progress else None
    try:
        for batch in batches:
            state, info = step(state, *(batch if isinstance(batch, tuple | list) else (batch,)))
            if on_step is not None:
                on_step(info)
            if bar is not None:
                bar.advance(info)
    finally:
        if bar is not None:
            bar.close()
    return state


class _Bar:
    """A bar of tqdm that leaves values on the device until it is drawn."""

    def __init__(self, length: int):
        try:
            from tqdm import tqdm
        except ImportError as error:
            raise ImportError(
                "fit: progress=True draws a bar with tqdm, which is not installed. "
                "Install it (pip install tqdm), or follow the steps with on_step."
            ) from error
        self.bar = tqdm(total=length or None, unit="step")
        self.unread: list[StepInfo] = []
        self.skipped = 0

    def advance(self, info: StepInfo) -> None:
        # The flags and losses only: weights that count entry by entry are as large as a Jacobian.
        self.unread.append(info._replace(weights=()))
        if self.bar.update():
            self.read()

    def read(self) -> None:
        if self.unread:
            self.skipped += sum(not info.finite.all() for info in self.unread)
            leaves = tree_leaves(self.unread[-1].losses)
            mean = sum(float(leaf.detach().sum()) for leaf in leaves) / sum(leaf.numel() for leaf in leaves)
            self.bar.set_postfix(loss=f"{mean:.4g}", skipped=self.skipped, refresh=False)
            self.unread.clear()

    def close(self) -> None:
        self.read()
        self.bar.close()
