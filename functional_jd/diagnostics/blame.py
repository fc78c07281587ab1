"""Which objective and which parameter is not finite, by a loop."""

from typing import Any

from functional_jd.core.heads import rows_of
from functional_jd.core.rows import as_matrix, magnitudes
from functional_jd.core.tree import tree_map
from functional_jd.core.types import LossFunction, Params, Tree
from functional_jd.engines.evaluate import check_losses, is_differentiable
from functional_jd.engines.kinds import found_kind
from functional_jd.engines.plan import Plan
from functional_jd.precision.autocast import autocast_disabled
from functional_jd.precision.loss_scale import multiplier
from functional_jd.precision.scale_state import ScaleState


def blame(losses: LossFunction, params: Params, *batch: Any, scale: ScaleState | None = None) -> Tree:
    """Find which rows are not finite, by objective and parameter, one row after the other.

    For steps that are skipped again and again although all losses are finite. A rule that needs no gradients takes one
    backward pass, and rows that are differentiated together can spoil one another (0 x inf): their flags are shared.

    Args:
        losses: as for `jacobian_fn`. With buffers, pass a function that holds them.
        params: as for `jacobian_fn`.
        batch: what the losses take after the parameters.
        scale: the loss scale at which the step was skipped, `state.scale`.

    Returns:
        A pytree like params with bool `[m]`: whether the gradient of objective i by this parameter is finite, in the
        order of `objective_names(losses)`. Of `multitask` losses, a pytree like `params["shared"]`; with a scale `[m]`,
        a loss whose gradient by the heads is not finite is false everywhere.

    Guarantees:
        Losses that are separate tensors do not spoil one another. Costs m backward passes and memory for all rows.

    Example:
        >>> losses = lambda params: {"calm": params["w"].sum(), "wild": (1e30 * params["b"]).square().sum()}
        >>> blame(losses, {"w": torch.ones(2), "b": torch.ones(2)})
        {'w': tensor([True, True]), 'b': tensor([ True, False])}
    """
    check_losses(losses, 0, False)
    factor, args = None if scale is None else multiplier(scale), (params, *batch)
    objectives, kind = found_kind(losses, 0, args)
    plan = Plan(False, factor, is_differentiable((args, factor)), "loop")
    rows = rows_of(kind.jacobian(objectives, args, plan)[0])
    with autocast_disabled():
        return tree_map(lambda leaf: magnitudes(as_matrix(leaf)).isfinite(), rows)
