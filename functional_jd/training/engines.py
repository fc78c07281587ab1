"""Each engine as a step takes it: from the state and a batch to a direction."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from functional_jd.aggregation.aggregate import Aggregator, aggregate, check_rule, weigh
from functional_jd.aggregation.views import gramian as look_at_gramian
from functional_jd.aggregation.views import losses as look_at_losses
from functional_jd.aggregation.views import needs_no_rows
from functional_jd.core.multitask import direction_of_rows, split_heads
from functional_jd.core.tree import all_finite, tree_leaves
from functional_jd.core.types import Direction, Gramian, Losses, LossFunction, Params, Tree, Weights
from functional_jd.engines.choose import EngineChoice, choose_engine
from functional_jd.engines.gramian.engine import gramian_fn
from functional_jd.engines.jacobian import jacobian_fn
from functional_jd.engines.kinds import kind_of
from functional_jd.engines.weighted import weighted_fn
from functional_jd.precision.autocast import autocast_disabled
from functional_jd.precision.loss_scale import ScaleState, unscale
from functional_jd.training.state import TrainState


class EngineResult(NamedTuple):
    """What an engine finds: all that the optimizer and the next step need.

    Attributes:
        direction: a pytree like params.
        weights: the weight of each row.
        aggregator: the rule's next state.
        losses: the values, unscaled.
        finite: bool with the scale's shape: which rows did not overflow.
        direction_finite: bool `[]`: whether the weights, and with them the direction, are finite. If they are not while
            all rows are, no other scale would help: the rule refused, or a sum overflowed.
    """

    direction: Direction
    weights: Weights
    aggregator: Tree
    losses: Losses
    finite: Tensor
    direction_finite: Tensor


def by_jacobian(
    state: TrainState, batch: tuple[Any, ...], losses: LossFunction, aggregator: Aggregator
) -> EngineResult:
    """All rows."""
    jacobian, values = jacobian_fn(losses, scale=state.scale)(state.params, *batch)
    jacobian, finite = unscale(state.scale, jacobian)
    direction, weights, memory = aggregate(aggregator, jacobian, state.aggregator, losses=values)
    # The heads' gradient was finite, or is zero, as `unscale` left it.
    rows = direction_of_rows(direction, split_heads(jacobian)[1])
    return EngineResult(direction, weights, memory, values, finite, all_finite(rows))


def by_weights(state: TrainState, batch: tuple[Any, ...], losses: LossFunction, aggregator: Aggregator) -> EngineResult:
    """One backward pass with the weights as cotangent."""
    values, pullback = weighted_fn(losses, scale=state.scale)(state.params, *batch)
    weights, memory = weigh(aggregator, loss_rows(values), state.aggregator, losses=values)
    # Weights that are not finite are the rule's doing, not an overflow: the scale must not back off for them.
    weights_finite = weights.isfinite().all()
    direction, finite = pullback(torch.where(weights_finite, weights, 0), last=True)
    return EngineResult(direction, weights, memory, values, finite, weights_finite)


def by_gramian(state: TrainState, batch: tuple[Any, ...], losses: LossFunction, aggregator: Aggregator) -> EngineResult:
    """Inner products of the rows, without rows where that costs less."""
    products, rows, values, pullback = gramian_without_overflow(state.params, batch, losses, state.scale)
    with autocast_disabled(products):
        weights, memory = aggregator.update(products, state.aggregator)
    direction = pullback(weights)
    finite = rows if state.scale.scale.ndim else rows.all()
    return EngineResult(direction, weights, memory, values, finite, all_finite(direction))


ENGINES: dict[str, Callable[..., EngineResult]] = {
    "jacobian": by_jacobian,
    "gramian": by_gramian,
    "weighted": by_weights,
}
"""The engines of a step, by name; `"auto"` is `chosen_engine`."""


def chosen_engine(losses: LossFunction, state: TrainState, *batch: Any, aggregator: Aggregator) -> EngineChoice:
    """Which engine `step(engine="auto")` takes, and why.

    Args:
        losses: as for `step`.
        state: from `train_state`.
        batch: what the losses take after the parameters; only shapes are read, nothing is evaluated.
        aggregator: the rule.

    Returns:
        `EngineChoice(engine, reason)`: a name and a sentence.

    Raises:
        TypeError, ValueError: what is no rule; a batch or parameters that do not fit the losses' structure.

    Laws:
        Shapes and dtypes decide, never values: eager and compiled steps, and steps under vmap, choose alike.

    Example:
        >>> params, x = {"w": torch.ones(3)}, torch.ones(2, 3)
        >>> losses = lambda params, x: x @ params["w"]
        >>> method = {"losses": losses, "aggregator": upgrad(), "optimizer": sgd(0.1)}
        >>> chosen_engine(losses, train_state(params, x, **method), x, aggregator=upgrad()).engine
        'jacobian'
    """
    check_rule(aggregator, "chosen_engine")
    kind, scale = kind_of(losses), state.scale.scale
    m = len(scale) if scale.ndim else kind.objectives(losses, state.params, batch)
    return choose_engine(aggregator, m, tree_leaves(kind.row_params(losses, state.params)), scale)


def engine_of(
    engine: str, state: TrainState, batch: tuple[Any, ...], losses: LossFunction, aggregator: Aggregator
) -> Callable[..., EngineResult]:
    """The engine of this name, if it gives the rule what it needs."""
    if engine == "auto":
        return ENGINES[chosen_engine(losses, state, *batch, aggregator=aggregator).engine]
    if engine not in ENGINES:
        raise ValueError(
            f"step: engine must be one of auto, {', '.join(ENGINES)}, found {engine!r}. "
            "'auto' takes the cheapest that the rule allows."
        )
    needed = {"gramian": aggregator.view is look_at_gramian, "weighted": needs_no_rows(aggregator), "jacobian": True}
    if not needed[engine]:
        serves = {"gramian": "the Gramian", "weighted": "no gradients"}[engine]
        raise ValueError(
            f"step: engine={engine!r} serves rules that need {serves}, found one that needs "
            f"{getattr(aggregator.view, '__name__', aggregator.view)!r}. Use engine='auto' or 'jacobian'."
        )
    return ENGINES[engine]


def gramian_without_overflow(
    params: Params, batch: tuple[Any, ...], losses: LossFunction, scale: ScaleState
) -> tuple[Gramian, Tensor, Losses, Callable[[Tensor], Direction]]:
    """The Gramian with zeros for rows that overflowed, flags of the rows that did not, the losses, and the pullback."""
    products, values, pullback = gramian_fn(losses, scale=scale)(params, *batch)
    rows = products.diagonal().isfinite()
    # As with unscaled rows, the rule never sees what is not finite, nor any row where one scale serves all; the
    # direction does.
    rows = rows if scale.scale.ndim else rows.all().expand_as(rows)
    return torch.where(rows[:, None] & rows, products, 0), rows, values, pullback


def loss_rows(values: Losses) -> Tensor:
    """Rows enough for the views that need the number of rows, or the losses: float64 `[m]`."""
    return look_at_losses(None, losses=values)
