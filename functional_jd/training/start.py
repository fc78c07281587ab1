"""How training starts: the state that the first step takes."""

from typing import Any

from torch import nn

from functional_jd.aggregation.aggregate import Aggregator, start
from functional_jd.aggregation.views import gramian as look_at_gramian
from functional_jd.aggregation.views import needs_no_rows
from functional_jd.core.tree import floating_leaves, tree_map
from functional_jd.core.types import LossFunction, Params
from functional_jd.engines.jacobian import jacobian_fn
from functional_jd.engines.weighted import weighted_fn
from functional_jd.optimizers.base import Optimizer
from functional_jd.precision.autocast import autocast_disabled
from functional_jd.precision.loss_scale import ScaleState, no_scale, unscale
from functional_jd.training.engines import gramian_without_overflow, loss_rows
from functional_jd.training.state import TrainState, check_method


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
    params = detach_parameters(params)
    scale = no_scale(device=leaves[0].device) if scale is None else scale
    if needs_no_rows(aggregator):
        values, _ = weighted_fn(losses, scale=scale)(params, *batch)
        memory = start(aggregator, loss_rows(values), losses=values)
    elif aggregator.view is look_at_gramian:
        products, *_ = gramian_without_overflow(params, batch, losses, scale)
        with autocast_disabled(products):
            memory = aggregator.init(products)
    else:
        jacobian, values = jacobian_fn(losses, scale=scale)(params, *batch)
        memory = start(aggregator, unscale(scale, jacobian)[0], losses=values)
    return TrainState(params, optimizer.init(params), memory, scale)


def detach_parameters(params: Params) -> Params:
    """Return the pytree with the values of each `nn.Parameter` in its place; other tensors keep their graph."""
    return tree_map(lambda p: p.detach() if isinstance(p, nn.Parameter) else p, params)
