"""PBI: the distance of the losses along a ray, with a penalty for their distance from the ray."""

import torch
from torch import Tensor

from functional_jd.aggregation import PREFERENCES, Aggregator, Numbers, per_objective, scalarized_with
from functional_jd.core.arguments import NOT_NEGATIVE, Number, number
from functional_jd.core.safe import order_of, sqrt_or_zero

# Distances from the ray below this, relative to that from the reference, are treated as rounding, which would give the
# penalty a random direction.
_ON_THE_RAY = 2.0**-40


def pbi(theta: Number, weights: Numbers, reference: Numbers | None = None) -> Aggregator:
    """Minimise the distance of the losses along a ray from the reference, plus theta times their distance from the ray.

    `s = d_1 + theta d_2`, with `d_1 = n'(L - z)`, `d_2 = |L - z - d_1 n|` and `n = u / |u|`

    Args:
        theta: the penalty for leaving the ray, dimensionless; not negative. The paper uses 5.
        weights: u `[m]`, the proportions of the losses on the ray.
        reference: z `[m]`, the origin of the ray: the best value of each loss. Default: 0.

    Returns:
        A rule that needs the losses only. Weights of any sign, of norm `sqrt(1 + theta^2)`.

    Guarantees:
        Invariant to multiplying losses and reference by `c > 0`. On the ray (within 2^-40 of the distance from the
        reference), where d_2 has a kink, the weights are n. Any finite losses are valid.

    Source:
        Zhang & Li, MOEA/D, IEEE Transactions on Evolutionary Computation 11, 2007, section II.
    """
    theta = number("theta", theta, NOT_NEGATIVE, "The paper uses 5.")
    u = per_objective("weights", weights, PREFERENCES)
    z = per_objective("reference", reference, default=lambda _: 0.0)
    return scalarized_with(lambda losses, u, z: value(losses, theta, u, z), u, z)


def value(losses: Tensor, theta: Number, weights: Tensor, reference: Tensor | float = 0.0) -> Tensor:
    """The scalarization of the losses."""
    proportions, offset = weights / order_of(weights), losses - reference
    unit = order_of(offset)
    ray, offset = proportions / torch.linalg.vector_norm(proportions), offset / unit
    along = ray @ offset
    perpendicular = offset - along * ray
    square = perpendicular @ perpendicular
    return unit * (along + theta * sqrt_or_zero(square, square <= _ON_THE_RAY**2 * (offset @ offset)))
