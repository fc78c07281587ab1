"""Whether backward passes are linear, as weights and loss scales need it."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from functional_jd.core.arguments import POSITIVE, check_number
from functional_jd.core.rows import at_least_float32, magnitudes
from functional_jd.core.tree import floating_leaves, tree_unflatten
from functional_jd.core.types import Params
from functional_jd.engines.evaluate import check_losses, element_count, evaluate_losses
from functional_jd.engines.kinds import kind_of
from functional_jd.engines.plan import Plan
from functional_jd.engines.row_vjps import dense, jacobian_rows
from functional_jd.engines.vjp import vjp


def linear_backward(
    losses: Callable[..., Any], params: Params, *batch: Any, factor: float = 2.0, has_aux: bool = False
) -> Tensor:
    """Find the losses whose gradient is not linear in the factor of the loss.

    A custom backward pass that normalises, clips or rounds its gradient is not: weights and loss scales get lost in it.
    The losses are evaluated once, and differentiated twice each, outside of transforms.

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
