"""The training step: the composition, in the order of the picture."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from functional_jd.aggregation.aggregate import Aggregator, aggregate, weigh
from functional_jd.aggregation.views import gramian as look_at_gramian
from functional_jd.core.torch_internals import under_transform
from functional_jd.core.tree import all_finite
from functional_jd.core.types import (
    Direction,
    Jacobian,
    Losses,
    LossFunction,
    MultitaskJacobian,
    Tree,
    Weights,
)
from functional_jd.engines.choose import gramian_is_cheaper
from functional_jd.engines.jacobian import jacobian_fn
from functional_jd.engines.weighted import weighted_fn
from functional_jd.optimizers.base import Optimizer
from functional_jd.precision.autocast import autocast_disabled
from functional_jd.precision.loss_scale import select, unscale, update_scale
from functional_jd.training.state import (
    StepInfo,
    TrainState,
    check_method,
    gramian_without_overflow,
    needs_no_rows,
    rows_without_columns,
)


def step(
    state: TrainState,
    *batch: Any,
    losses: LossFunction,
    aggregator: Aggregator,
    optimizer: Optimizer,
    engine: str = "auto",
) -> tuple[TrainState, StepInfo]:
    """One step of Jacobian descent, in mixed precision if the losses are.

    Args:
        state: from `train_state` or from the last step.
        batch: what the losses take after the parameters.
        losses: `losses(params, *batch)`, as for `jacobian_fn`.
        aggregator: the rule, the same in every step.
        optimizer: the optimizer, the same in every step.
        engine: `"jacobian"` computes all rows; `"gramian"`, for rules whose view is `gramian`, only their inner
            products, and never holds `[m, n]` where it can avoid it; `"weighted"`, for rules whose view is
            `no_gradients` or `losses`, takes one backward pass with the weights as cotangent. `"auto"` takes the
            engine that `chosen_engine` names.

    Returns:
        `(TrainState, StepInfo(losses, weights, finite))`.

    Raises:
        TypeError, ValueError: what `jacobian_fn` and `aggregate` raise, and an engine that is unknown or does not show
            the rule what it looks at. Never because of values.

    Laws:
        Pure. A step is skipped unless every row is finite, and the direction too (a rule may refuse losses, by weights
        that are NaN); a skipped step changes nothing but the scale. Each row's scale follows its own flag; if the
        weighted engine is forced upon several scales, it runs at what they have in common, and all flags are one. The
        engines agree to rounding. Composes with vmap over replicas, grad, jvp and compile, and never waits for the
        device, where the rule does not: its docstring says so.
    """
    check_method("step", aggregator, optimizer)
    differentiate = ENGINES[_chosen(engine, state, batch, losses, aggregator)]
    return finish_step(state, optimizer, differentiate(state, batch, losses, aggregator))


class EngineResult(NamedTuple):
    """What an engine finds: all that the optimizer and the next step need.

    Attributes:
        direction: a pytree like params.
        weights: how much each row counted.
        memory: what the rule remembers.
        losses: the values, unscaled.
        finite: bool with the scale's shape: which rows did not overflow.
        sound: bool `[]`: whether the weights, and with them the direction, are finite. If not, that is the rule's word,
            or a sum that overflowed: no other scale would mend it.
    """

    direction: Direction
    weights: Weights
    memory: Tree
    losses: Losses
    finite: Tensor
    sound: Tensor


def finish_step(state: TrainState, optimizer: Optimizer, found: EngineResult) -> tuple[TrainState, StepInfo]:
    """Take the step, or skip it: what remains when the direction is known."""
    direction, weights, memory, values, finite, sound = found
    everywhere = finite.all()
    moving = everywhere & sound
    words = {"moving": moving} if _chooses(optimizer) else {}
    params, moments = optimizer.update(direction, state.optimizer, state.params, **words)
    # One after the other, and the direction gone: each is as large as the parameters.
    del direction, found
    if not words:
        params = select(moving, params, state.params)
        moments = select(moving, moments, state.optimizer)
    memory = select(moving, memory, state.aggregator)
    new = TrainState(params, moments, memory, update_scale(state.scale, finite))
    # An overflow of rows is their scales' matter; a direction that is not finite all the same is the rule's alone.
    return new, StepInfo(values, weights, finite & (sound | ~everywhere))


def _chooses(optimizer: Optimizer) -> bool:
    """Whether the update itself keeps what a skipped step keeps, where the compiler would not do as well."""
    return not under_transform() and "moving" in (getattr(optimizer.update, "__kwdefaults__", None) or {})


def _by_jacobian(
    state: TrainState, batch: tuple[Any, ...], losses: LossFunction, aggregator: Aggregator
) -> EngineResult:
    jacobian, values = jacobian_fn(losses, scale=state.scale)(state.params, *batch)
    jacobian, finite = unscale(state.scale, jacobian)
    direction, weights, memory = aggregate(aggregator, jacobian, state.aggregator, losses=values)
    return EngineResult(direction, weights, memory, values, finite, all_finite(weighted_part(direction, jacobian)))


def _by_weights(
    state: TrainState, batch: tuple[Any, ...], losses: LossFunction, aggregator: Aggregator
) -> EngineResult:
    values, pullback = weighted_fn(losses, scale=state.scale)(state.params, *batch)
    weights, memory = weigh(aggregator, rows_without_columns(values), state.aggregator, losses=values)
    # Weights that are not finite are the rule's word, not an overflow: the scale must not back off for them.
    sound = weights.isfinite().all()
    direction, finite = pullback(torch.where(sound, weights, 0), last=True)
    return EngineResult(direction, weights, memory, values, finite, sound)


def _by_gramian(
    state: TrainState, batch: tuple[Any, ...], losses: LossFunction, aggregator: Aggregator
) -> EngineResult:
    products, rows, values, pullback = gramian_without_overflow(state.params, batch, losses, state.scale)
    with autocast_disabled(products):
        weights, memory = aggregator.update(products, state.aggregator)
    direction = pullback(weights)
    finite = rows if state.scale.scale.ndim else rows.all()
    return EngineResult(direction, weights, memory, values, finite, all_finite(direction))


ENGINES: dict[str, Callable[..., EngineResult]] = {
    "jacobian": _by_jacobian,
    "gramian": _by_gramian,
    "weighted": _by_weights,
}
"""How to come by a direction, by name; `"auto"` chooses."""


def weighted_part(direction: Direction, jacobian: Jacobian) -> Direction:
    """The part of a direction that the weights made; the heads' was finite, or is zero, as `unscale` left it."""
    return direction["shared"] if isinstance(jacobian, MultitaskJacobian) else direction


def _chosen(
    engine: str, state: TrainState, batch: tuple[Any, ...], losses: LossFunction, aggregator: Aggregator
) -> str:
    blind = needs_no_rows(aggregator)
    if engine == "auto":
        # One pass has one scale: whoever asks for one per objective asks for rows.
        if blind and not state.scale.scale.ndim:
            return "weighted"
        # Under a transform the Gramian engine may take rows too.
        if aggregator.view is look_at_gramian and not under_transform():
            m = len(state.scale.scale) if state.scale.scale.ndim else None
            return "gramian" if gramian_is_cheaper(losses, state.params, batch, m) else "jacobian"
        return "jacobian"
    if engine not in ENGINES:
        raise ValueError(
            f"step: engine must be one of auto, {', '.join(ENGINES)}, found {engine!r}. "
            "'auto' takes the cheapest that the rule allows."
        )
    if engine == "gramian" and aggregator.view is not look_at_gramian:
        raise ValueError(
            "step: the Gramian engine serves rules that look at the Gramian, found one that looks at "
            f"{getattr(aggregator.view, '__name__', aggregator.view)!r}. Use engine='auto' or 'jacobian'."
        )
    if engine == "weighted" and not blind:
        raise ValueError(
            "step: the weighted engine serves rules that look at nothing or at the losses, found one that looks at "
            f"{getattr(aggregator.view, '__name__', aggregator.view)!r}. Use engine='auto' or 'jacobian'."
        )
    return engine
