"""What is wrong with gradients: which are not finite, and which are not linear in the factor of their loss."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from functional_jd.core.arguments import POSITIVE, check_number
from functional_jd.core.heads import rows_of
from functional_jd.core.rows import as_matrix, at_least_float32, magnitudes
from functional_jd.core.tree import floating_leaves, tree_map, tree_unflatten
from functional_jd.core.types import LossFunction, Params, Tree
from functional_jd.engines.evaluate import check_losses, element_count, evaluate_losses, is_differentiable
from functional_jd.engines.kinds import found_kind, kind_of
from functional_jd.engines.plan import Plan
from functional_jd.engines.row_vjps import dense, jacobian_rows
from functional_jd.engines.vjp import vjp
from functional_jd.precision.autocast import autocast_disabled
from functional_jd.precision.loss_scale import multiplier
from functional_jd.precision.scale_state import ScaleState


def blame(losses: LossFunction, params: Params, *batch: Any, scale: ScaleState | None = None) -> Tree:
    """Find which rows are not finite, by objective and parameter, one row after the other.

    For steps that are skipped although all losses are finite: rows that are differentiated together share their flags.

    Args:
        losses: as for `jacobian_fn`. With buffers, pass a function that holds them.
        params: as for `jacobian_fn`.
        batch: what the losses take after the parameters.
        scale: the loss scale at which the step was skipped, `state.scale`.

    Returns:
        A pytree like params, of `multitask` losses like `params["shared"]`, with bool `[m]`: whether the gradient of
        objective i is finite, in the order of `objective_names(losses)`. With a scale `[m]`, a loss whose gradient by
        the heads is not finite is false everywhere.

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


def linear_backward(
    losses: Callable[..., Any], params: Params, *batch: Any, factor: float = 2.0, has_aux: bool = False
) -> Tensor:
    """Find the losses whose gradient is not linear in the factor of the loss.

    In a custom backward pass that normalises, clips or rounds its gradient, weights and loss scales get lost.

    Args:
        losses: `losses(params, *batch)`, as for `jacobian_fn`.
        params: where to look.
        batch: the batch, and buffers before it if the losses take some.
        factor: what a loss is multiplied by. Pass the loss scale to find a backward pass that clips.
        has_aux: whether the losses return `(losses, aux)`.

    Returns:
        bool `[m]`, in the order of `objective_names(losses)`: whether the gradient of `factor * loss_i` is `factor`
        times that of `loss_i`, up to half of the digits.

    Example:
        >>> diagnostics.linear_backward(lambda p: {"a": p.square().sum(), "b": p.exp().sum()}, torch.ones(2))
        tensor([True, True])
    """
    check_losses(losses, 0, has_aux)
    check_number("factor", factor, POSITIVE, "A power of two is exact.")
    leaves, structure = floating_leaves(params)
    plan = Plan(has_aux, None, differentiable=False, mode="loop", examples=kind_of(losses).rows_are_examples)
    evaluate = lambda inputs: evaluate_losses(losses, (tree_unflatten(structure, inputs), *batch), plan)
    point = vjp(evaluate, leaves, plan)
    m, like = element_count(point.outputs), point.outputs[0]

    def rows(by: float) -> list[Tensor]:
        found = dense(jacobian_rows(point, like.new_full((m,), by), plan), leaves, m)
        return [at_least_float32(x.reshape(m, -1)) for x in found]

    linear = like.new_ones(m, dtype=torch.bool)
    for leaf, one, many in zip(leaves, rows(1.0), rows(factor), strict=True):
        bound = torch.finfo(leaf.dtype).eps ** 0.5 * magnitudes(many)
        linear &= ((magnitudes(many - factor * one) <= bound) | ~bound.isfinite()).to(like.device)
    return linear
