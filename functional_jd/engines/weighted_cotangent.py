"""Weights as the cotangent of one backward pass, at the scale that all objectives have in common."""

import torch
from torch import Tensor

from functional_jd.core.rows import at_least_float32
from functional_jd.core.tree import all_finite, tree_map
from functional_jd.core.types import Direction
from functional_jd.engines.evaluate import Options, check_weights
from functional_jd.precision.loss_scale import multiplier, unscale

# A power of two whose inverse is a normal float32.
_CEILING = 2.0**126


def weighted_cotangent(
    outputs: list[Tensor], weights: Tensor, scales: Tensor, options: Options
) -> tuple[list[Tensor | None], Tensor]:
    """The scaled weights, by output, and the scale `[]` that they have in common."""
    check_weights(options.where, weights, len(scales))
    common = common_scale(weights, scales, options)
    parts = (weights.double() * common).split([y.numel() for y in outputs])
    return [part.reshape(y.shape).to(y.dtype) for part, y in zip(parts, outputs, strict=True)], common


def unscaled(common: Tensor, direction: Direction, options: Options) -> tuple[Direction, Tensor]:
    """The direction, divided by the scale if there is one, and whether it is finite."""
    if options.scale is not None:
        return unscale(common, direction)
    return tree_map(at_least_float32, direction), all_finite(direction)


def flags(finite: Tensor, options: Options) -> Tensor:
    """One flag for all objectives, in the scale's shape."""
    return finite if options.scale is None else finite.expand(options.scale.shape)


def common_scale(weights: Tensor, scales: Tensor, options: Options) -> Tensor:
    """The scale `[]` of one backward pass: the one for all, or the largest power of two S with
    `|weights_i| S <= scale_i` for all i. A power of two divides exactly, and so has no derivative.
    """
    if options.scale is None or not options.scale.ndim:
        return scales[0]
    largest = (scales.detach().double() / weights.detach().double().abs()).amin().clamp(max=_CEILING)
    mantissa, _ = torch.frexp(largest)
    return multiplier(largest / (2 * mantissa))
