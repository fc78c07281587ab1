"""Weights as the cotangent of one backward pass, at the scale that all objectives have in common."""

from collections.abc import Sequence
from functools import reduce

import torch
from torch import Tensor

from functional_jd.core.float64 import widest
from functional_jd.core.tree import Structure, tree_unflatten
from functional_jd.core.types import Direction
from functional_jd.engines.evaluate import check_weights, dense_gradients, row_scales
from functional_jd.engines.plan import Plan
from functional_jd.precision.loss_scale import divided, multiplier

# A power of two whose inverse is a normal float32.
_CEILING = 2.0**126


def weighted_cotangent(outputs: list[Tensor], weights: Tensor, plan: Plan) -> tuple[list[Tensor | None], Tensor | None]:
    """The scaled weights, by output, and the scale `[]` that they have in common; None without a scale."""
    sizes = [y.numel() for y in outputs]
    m, common = sum(sizes), None
    check_weights(plan.where, weights, m)
    if plan.scale is not None:
        common = common_scale(weights, row_scales(plan.scale, m, outputs[0], plan.where), plan)
        weights = weights.to(widest(common.device)) * common
    if len({y.dtype for y in outputs}) == 1:  # at once, and not for each
        weights = weights.to(outputs[0].dtype)
    parts = zip(weights.split(sizes), outputs, strict=True)
    return [part.reshape(y.shape).to(y.dtype) for part, y in parts], common


def unscaled_direction(
    common: Tensor | None, gradients: Sequence[Tensor | None], leaves: Sequence[Tensor], structure: Structure
) -> tuple[Direction, Tensor | None]:
    """The direction of the gradients of these leaves, divided by the scale if there is one, and whether it is finite:
    None without a scale. Where it is not finite, it may be anything.
    """
    dense = dense_gradients(gradients, leaves)
    if common is None:
        return tree_unflatten(structure, [g if g.dtype.itemsize >= 4 else g.float() for g in dense]), None
    return divided(common, tree_unflatten(structure, dense))


def flags(plan: Plan, *finite: Tensor | None) -> Tensor | None:
    """One flag for all objectives, in the scale's shape; None without a scale."""
    found = [own for own in finite if own is not None]
    return reduce(torch.logical_and, found).expand(plan.scale.shape) if plan.scale is not None and found else None


def common_scale(weights: Tensor, scales: Tensor, plan: Plan) -> Tensor:
    """The scale `[]` of one backward pass: the one for all, or the largest power of two S with
    `|weights_i| S <= scale_i` for all i. A power of two divides exactly, and so has no derivative.
    """
    if plan.scale is None or not plan.scale.ndim:
        return scales[0]
    wide = widest(scales.device)
    largest = (scales.detach().to(wide) / weights.detach().to(wide).abs()).amin().clamp(max=_CEILING)
    mantissa, _ = torch.frexp(largest)
    return multiplier(largest / (2 * mantissa))
