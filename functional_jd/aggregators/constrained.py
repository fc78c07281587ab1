"""Constrained: losses that are minimised, while others stay below bounds."""

import math

import torch
from torch import Tensor

from functional_jd.aggregation import Aggregator, Numbers, losses, per_objective, remembering
from functional_jd.core.arguments import NOT_NEGATIVE, POSITIVE, Domain, Number, number

_BOUNDS = Domain(lambda u: u > -math.inf, "numbers, or math.inf for none", "Bound some losses from above.")


def constrained(bounds: Numbers, rate: Number = 0.1, damping: Number = 1.0) -> Aggregator:
    """Minimise the losses without a bound, while each other loss stays below its bound: one multiplier per bound.

    With `e = L - bound`, `lambda <- max(0, lambda + rate e)`, then `weights = max(0, lambda + damping e)` (augmented
    Lagrangian, projected ascent). Multipliers start at 0. Without a bound, `e = 0`, and the multiplier stays 1.

    Args:
        bounds: `[m]`, in the units of the losses, `math.inf` for a loss to minimise: `[math.inf, 0.5]`.
        rate: step of the multipliers, positive, in the unit of objective / bounded loss^2: divide a loss by its bound.
        damping: weight of e, against oscillation by large rates; not negative. Take `total()` until bounds nearly hold.

    Returns:
        A rule that needs the losses only. Its state is `multipliers`, float64 `[m]`. Weights are not negative.

    Guarantees:
        It rests where the conditions of Karush, Kuhn and Tucker hold, with the multipliers as weights. Without bounds,
        it is `total()`. A loss of exactly 0 is absent: its multiplier stays. With `multitask` losses, the trunk meets
        the bounds: each head minimises its own loss.

    Source:
        Platt & Barr, Constrained differential optimization, NeurIPS 1987: multipliers that ascend, and a damping;
        Rockafellar, Journal of Optimization Theory and Applications 12, 1973: inequalities, where `rate` is `damping`.
    """
    bounds_of = per_objective("bounds", bounds, _BOUNDS)
    rate = number("rate", rate, POSITIVE, "The default is 0.1.")
    damping = number("damping", damping, NOT_NEGATIVE, "The default is 1.")

    def init(values: Tensor) -> Tensor:
        return bounds_of(values).isposinf().to(values)

    def update(values: Tensor, multipliers: Tensor) -> tuple[Tensor, Tensor]:
        limits = bounds_of(values)
        excess = torch.where(limits == math.inf, 0 * values, values - limits)  # NaN for a loss that is not finite
        multipliers = (multipliers + rate * excess).clamp(min=0)
        return (multipliers + damping * excess).clamp(min=0), multipliers

    return remembering("multipliers", losses, init, update)
