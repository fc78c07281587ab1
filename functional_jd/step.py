"""The training step: the composition, in the order of the picture."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from functional_jd.aggregation import Aggregator, aggregate, blank, check_rule, cross_gramian, start, weigh
from functional_jd.aggregation import gramian as look_at_gramian
from functional_jd.aggregation import losses as look_at_losses
from functional_jd.cost import gramian_is_cheaper
from functional_jd.gramian import gramian_fn
from functional_jd.jacobian import jacobian_fn
from functional_jd.naming import step_table
from functional_jd.optimizers import Optimizer
from functional_jd.precision import full_precision
from functional_jd.scaling import ScaleState, no_scale, select, unscale, update_scale
from functional_jd.summary import outline, shown
from functional_jd.transforms import transformed
from functional_jd.tree import all_finite, floating_leaves, tree_map
from functional_jd.types import (
    Direction,
    Gramian,
    Jacobian,
    Losses,
    LossFunction,
    MultitaskJacobian,
    Params,
    Tree,
    Weights,
)
from functional_jd.weighted import weighted_fn


@shown(outline)
class TrainState(NamedTuple):
    """All that training carries from step to step: a pytree of tensors.

    Attributes:
        params: the parameters.
        optimizer: what the optimizer remembers.
        aggregator: what the rule remembers.
        scale: the loss scale, one for all or one per objective.
    """

    params: Params
    optimizer: Tree
    aggregator: Tree
    scale: ScaleState


@shown(step_table)
class StepInfo(NamedTuple):
    """What people look at after a step.

    Attributes:
        losses: the values before the step, unscaled, in the structure that the losses gave them.
        weights: how much each row counted: float64 `[m]`, or a pytree like the Jacobian.
        finite: bool with the scale's shape: which rows were finite; none, if the direction is not. The step was
            skipped unless all are.
    """

    losses: Losses
    weights: Weights
    finite: Tensor


def train_state(
    params: Params,
    *batch: Any,
    losses: LossFunction,
    aggregator: Aggregator,
    optimizer: Optimizer,
    scale: ScaleState | None = None,
) -> TrainState:
    """Start training: the state that the first `step` takes.

    Args:
        params: pytree of floating-point tensors, `dict(model.named_parameters())` for instance. The values of an
            `nn.Parameter` are taken and its graph is left behind; other tensors keep theirs.
        batch: one batch, to learn what the rule looks at. Its losses are computed once, and their Gramian or their
            Jacobian where the rule looks at that.
        losses: `losses(params, *batch)`, as for `jacobian_fn`.
        aggregator: the rule.
        optimizer: a pair `(init, update)`.
        scale: from `scale_state()`, or `scale_state(shape=(m,))` for one scale per objective; `None` is no scaling.

    Returns:
        `TrainState(params, optimizer, aggregator, scale)`.

    Raises:
        TypeError, ValueError: parameters or losses that are none, as `jacobian_fn` says; a scale that does not fit m.
    """
    check("train_state", aggregator, optimizer)
    leaves, _ = floating_leaves(params, "train_state")
    params = tree_map(lambda p: p.detach() if isinstance(p, nn.Parameter) else p, params)
    scale = no_scale(device=leaves[0].device) if scale is None else scale
    if is_blind(aggregator):
        values, _ = weighted_fn(losses, scale=scale)(params, *batch)
        memory = start(aggregator, _without_columns(values), losses=values)
    elif aggregator.view is look_at_gramian:
        products, *_ = _products(params, batch, losses, scale)
        with full_precision(products):
            memory = aggregator.init(products)
    else:
        jacobian, values = jacobian_fn(losses, scale=scale)(params, *batch)
        memory = start(aggregator, unscale(scale, jacobian)[0], losses=values)
    return TrainState(params, optimizer.init(params), memory, scale)


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
            products, and never holds `[m, n]` where it can avoid it; `"weighted"`, for rules whose view is `blank` or
            `losses`, takes one backward pass with the weights as cotangent. `"auto"` takes the weighted one where the
            rule allows and one scale serves all objectives; the Gramian where the rule allows and `cost.py` says that
            it is cheaper; else the Jacobian.

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
    check("step", aggregator, optimizer)
    differentiate = ENGINES[_chosen(engine, state, batch, losses, aggregator)]
    return finish(state, optimizer, differentiate(state, batch, losses, aggregator))


class Descent(NamedTuple):
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


def finish(state: TrainState, optimizer: Optimizer, found: Descent) -> tuple[TrainState, StepInfo]:
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
    return not transformed() and "moving" in (getattr(optimizer.update, "__kwdefaults__", None) or {})


def _by_jacobian(state: TrainState, batch: tuple[Any, ...], losses: LossFunction, aggregator: Aggregator) -> Descent:
    jacobian, values = jacobian_fn(losses, scale=state.scale)(state.params, *batch)
    jacobian, finite = unscale(state.scale, jacobian)
    direction, weights, memory = aggregate(aggregator, jacobian, state.aggregator, losses=values)
    return Descent(direction, weights, memory, values, finite, all_finite(weighed(direction, jacobian)))


def _by_weights(state: TrainState, batch: tuple[Any, ...], losses: LossFunction, aggregator: Aggregator) -> Descent:
    values, pullback = weighted_fn(losses, scale=state.scale)(state.params, *batch)
    weights, memory = weigh(aggregator, _without_columns(values), state.aggregator, losses=values)
    # Weights that are not finite are the rule's word, not an overflow: the scale must not back off for them.
    sound = weights.isfinite().all()
    direction, finite = pullback(torch.where(sound, weights, 0), last=True)
    return Descent(direction, weights, memory, values, finite, sound)


def _by_gramian(state: TrainState, batch: tuple[Any, ...], losses: LossFunction, aggregator: Aggregator) -> Descent:
    products, rows, values, pullback = _products(state.params, batch, losses, state.scale)
    with full_precision(products):
        weights, memory = aggregator.update(products, state.aggregator)
    direction = pullback(weights)
    finite = rows if state.scale.scale.ndim else rows.all()
    return Descent(direction, weights, memory, values, finite, all_finite(direction))


ENGINES: dict[str, Callable[..., Descent]] = {
    "jacobian": _by_jacobian,
    "gramian": _by_gramian,
    "weighted": _by_weights,
}
"""How to come by a direction, by name; `"auto"` chooses."""


def weighed(direction: Direction, jacobian: Jacobian) -> Direction:
    """The part of a direction that the weights made; the heads' was finite, or is zero, as `unscale` left it."""
    return direction["shared"] if isinstance(jacobian, MultitaskJacobian) else direction


def is_blind(aggregator: Aggregator) -> bool:
    """Whether a rule looks at no row."""
    return aggregator.view in (blank, look_at_losses)


def check(where: str, aggregator: Aggregator, optimizer: Optimizer) -> None:
    """Refuse what is no rule for one batch, or no optimizer."""
    check_rule(aggregator, where)
    if aggregator.view is cross_gramian:
        raise ValueError(
            f"{where}: expected a rule that is content with one batch, found one that compares two. Take its steps by "
            "hand: aggregate(rule, jacobian, memory, other_jacobian)."
        )
    if not isinstance(optimizer, Optimizer):
        raise TypeError(
            f"{where}: optimizer must be a pair (init, update), found {type(optimizer).__name__}. Call its builder: "
            "adamw(lr=1e-3), or from_torch(torch.optim.AdamW, lr=1e-3)."
        )


def _chosen(
    engine: str, state: TrainState, batch: tuple[Any, ...], losses: LossFunction, aggregator: Aggregator
) -> str:
    blind = is_blind(aggregator)
    if engine == "auto":
        # One pass has one scale: whoever asks for one per objective asks for rows.
        if blind and not state.scale.scale.ndim:
            return "weighted"
        # Under a transform the Gramian engine may take rows too.
        if aggregator.view is look_at_gramian and not transformed():
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


def _products(
    params: Params, batch: tuple[Any, ...], losses: LossFunction, scale: ScaleState
) -> tuple[Gramian, Tensor, Losses, Callable[[Tensor], Direction]]:
    """The Gramian without rows that overflowed, which rows did not, the losses, and the way back."""
    products, values, pullback = gramian_fn(losses, scale=scale)(params, *batch)
    rows = products.diagonal().isfinite()
    # As with unscaled rows, the rule never sees what is not finite, nor anything beside it where one scale is for all;
    # the direction does.
    rows = rows if scale.scale.ndim else rows.all().expand_as(rows)
    return torch.where(rows[:, None] & rows, products, 0), rows, values, pullback


def _without_columns(values: Losses) -> Tensor:
    """Rows enough for the views that look at their number, or at the losses: float64 `[m]`."""
    return look_at_losses(None, losses=values)
