"""PBI: towards the origin along a ray, with a penalty for leaving the ray."""

import torch
from torch import Tensor

from functional_jd.aggregation.aggregate import Aggregator
from functional_jd.aggregation.lifts import scalarized
from functional_jd.aggregation.per_objective import PREFERENCES, Numbers, per_objective
from functional_jd.core.safe import sqrt_or_zero

# Distances from the ray, relative to that from the reference, that are rounding: well above float64's, which turns
# losses on the ray into a random direction of penalty otherwise.
_ON_THE_RAY = 2.0**-40


def pbi(theta: float, weights: Numbers, reference: Numbers | None = None) -> Aggregator:
    """Descend how far the losses are along a ray from the reference, plus theta times how far they are from it.

    `s = d_1 + theta d_2`, with `d_1 = n'(L - z)`, `d_2 = |L - z - d_1 n|` and `n = u / |u|`

    Args:
        theta: the penalty for leaving the ray, without unit; not negative. The paper takes 5.
        weights: u `[m]`, the proportions of the losses on the ray.
        reference: z `[m]`, where the ray begins: the best that each loss could be; `None` means 0.

    Returns:
        A rule that looks at the losses: one weighted backward pass is all it costs. Weights float64 `[m]`, of any sign,
        of norm `sqrt(1 + theta^2)`; differentiable with respect to the losses, to `weights` and to `reference`.

    Raises:
        TypeError: `weights` or `reference` not floating-point.
        ValueError: `theta` negative or not finite, `weights` negative or all zero, either not finite or of another
            shape; at the call, not one per loss.

    Laws:
        Losses and reference times `c > 0` give the same weights, as do `weights` times c. On the ray (to 2^-40 of the
        distance from the reference), where d_2 has a kink, its derivative counts as 0: the weights are n, also where
        all losses equal the reference. One loss alone has weight 1. Any finite losses will do.

    Source:
        Zhang & Li, MOEA/D: a multiobjective evolutionary algorithm based on decomposition, IEEE Transactions on
        Evolutionary Computation 11, 2007, section II: the penalty-based boundary intersection approach.
    """
    if not 0 <= theta < float("inf"):
        raise ValueError(f"pbi: theta must be finite and not negative, found {theta}. The paper takes 5.")
    u = per_objective(weights, "pbi", "weights", PREFERENCES)
    z = per_objective(reference, "pbi", "reference", otherwise=lambda _: 0.0)
    return scalarized(lambda losses: value(losses, theta, u(losses), z(losses)))


def value(losses: Tensor, theta: float, weights: Tensor, reference: Tensor | float = 0.0) -> Tensor:
    """The number that is descended."""
    ray, start = weights / torch.linalg.vector_norm(weights), losses - reference
    along = ray @ start
    aside = start - along * ray
    square = aside @ aside
    return along + theta * sqrt_or_zero(square, square <= _ON_THE_RAY**2 * (start @ start))
