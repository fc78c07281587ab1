"""What training carries from step to step, and how it starts."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from functional_jd.aggregation.aggregate import Aggregator, check_rule, start
from functional_jd.aggregation.views import cross_gramian, no_gradients
from functional_jd.aggregation.views import gramian as look_at_gramian
from functional_jd.aggregation.views import losses as look_at_losses
from functional_jd.core.names import objective_names
from functional_jd.core.record_display import Table, displayed_as, number, outline, shortened
from functional_jd.core.torch_internals import has_values
from functional_jd.core.tree import floating_leaves, tree_leaves, tree_map
from functional_jd.core.types import Direction, Gramian, Losses, LossFunction, Params, Tree, Weights
from functional_jd.engines.gramian.engine import gramian_fn
from functional_jd.engines.jacobian import jacobian_fn
from functional_jd.engines.weighted import weighted_fn
from functional_jd.optimizers.base import Optimizer
from functional_jd.precision.autocast import autocast_disabled
from functional_jd.precision.loss_scale import ScaleState, no_scale, unscale


def step_table(info: Any) -> Table:
    """Losses by name, with their weights, and which of them were finite; of a batch of steps, the outline."""
    losses, weights, finite = info
    leaves = tree_leaves(losses)
    m = sum(leaf.numel() for leaf in leaves if has_values(leaf))
    single = all(map(has_values, [*leaves, finite])) and finite.ndim < 2 and finite.numel() in (1, m)
    if isinstance(weights, Tensor):
        single = single and has_values(weights) and weights.shape == (m,)
    if not single:
        return outline(info)
    names = objective_names(losses)
    values = [number(float(x)) for leaf in leaves for x in leaf.detach().reshape(-1).tolist()]
    heads, columns = ["objective", "loss"], [names, values]
    if isinstance(weights, Tensor):
        heads.append("weight")
        columns.append([number(x) for x in weights.detach().tolist()])
    flags = [bool(x) for x in finite.reshape(-1).tolist()]
    if finite.ndim:
        heads.append("finite")
        columns.append(["yes" if flag else "no" for flag in flags])
    taken = "step taken" if all(flags) else "step skipped, not everything was finite"
    entrywise = "" if isinstance(weights, Tensor) else ", weights entry by entry"
    title = f"{type(info).__name__}: {taken}{entrywise}"
    return title, heads, shortened([list(row) for row in zip(*columns, strict=True)])


@displayed_as(outline)
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


@displayed_as(step_table)
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
    check_method("train_state", aggregator, optimizer)
    leaves, _ = floating_leaves(params, "train_state")
    params = tree_map(lambda p: p.detach() if isinstance(p, nn.Parameter) else p, params)
    scale = no_scale(device=leaves[0].device) if scale is None else scale
    if needs_no_rows(aggregator):
        values, _ = weighted_fn(losses, scale=scale)(params, *batch)
        memory = start(aggregator, rows_without_columns(values), losses=values)
    elif aggregator.view is look_at_gramian:
        products, *_ = gramian_without_overflow(params, batch, losses, scale)
        with autocast_disabled(products):
            memory = aggregator.init(products)
    else:
        jacobian, values = jacobian_fn(losses, scale=scale)(params, *batch)
        memory = start(aggregator, unscale(scale, jacobian)[0], losses=values)
    return TrainState(params, optimizer.init(params), memory, scale)


def needs_no_rows(aggregator: Aggregator) -> bool:
    """Whether a rule looks at no row."""
    return aggregator.view in (no_gradients, look_at_losses)


def check_method(where: str, aggregator: Aggregator, optimizer: Optimizer) -> None:
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


def gramian_without_overflow(
    params: Params, batch: tuple[Any, ...], losses: LossFunction, scale: ScaleState
) -> tuple[Gramian, Tensor, Losses, Callable[[Tensor], Direction]]:
    """The Gramian without rows that overflowed, which rows did not, the losses, and the way back."""
    products, values, pullback = gramian_fn(losses, scale=scale)(params, *batch)
    rows = products.diagonal().isfinite()
    # As with unscaled rows, the rule never sees what is not finite, nor anything beside it where one scale is for all;
    # the direction does.
    rows = rows if scale.scale.ndim else rows.all().expand_as(rows)
    return torch.where(rows[:, None] & rows, products, 0), rows, values, pullback


def rows_without_columns(values: Losses) -> Tensor:
    """Rows enough for the views that look at their number, or at the losses: float64 `[m]`."""
    return look_at_losses(None, losses=values)
