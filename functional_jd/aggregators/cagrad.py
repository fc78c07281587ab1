"""CAGrad: near the mean of the rows, the direction by which the row that gains least gains most."""

import math

import torch

from functional_jd.aggregation.aggregate import Aggregator
from functional_jd.aggregation.lifts import stateless
from functional_jd.aggregation.views import gramian, no_gradients
from functional_jd.core.types import Gramian, Weights
from functional_jd.solvers.dual_cone import cosines
from functional_jd.solvers.worst_gain import worst_gain_multipliers

# Of a mean this short, its square relative to that of the mean norm, a Gramian in float64 knows nothing.
_VANISHING = 1e-14


def cagrad(c: float) -> Aggregator:
    """Maximise the least gain in a ball around the mean of the rows.

    `direction = argmax { min_i <g_i, d> : |d - g_0| <= c |g_0| }`, g_0 the mean. In terms of the unit rows that is
    `d = g_0 + |g_0| sum_j v_j n_j` with `v >= 0` of length c: so `weights = 1 / m + |g_0| v / norms`.

    Args:
        c: radius of the ball relative to its centre: 0 is the mean; below 1 the mean of the losses still falls; the
            larger, the nearer to the direction of `mgda`. Not negative, finite. The paper takes 0.4 and 0.5.

    Returns:
        A rule that looks at the Gramian (c = 0: at nothing). Weights `[m]`, float64, at least `1 / m`, or all 0; where
        rows are dependent, several weights may give the one direction. Differentiable twice with respect to the
        Gramian, where the set of rows that gain least does not change.

    Raises:
        ValueError: c negative or not finite.

    Laws:
        `|direction - g_0| = c |g_0|`. Scales as the Jacobian does. For `c >= 1` it never conflicts. A mean of zero,
        within 1e-7 of the mean norm, gives weights 0. So does a stationary Jacobian (a convex combination of the unit
        rows is zero within 1e-6, or a row is zero), if no direction in the ball conflicts with no row more than that:
        if it must conflict, because `c < 1`, the direction is that of the formula. A Gramian that is not finite gives
        weights NaN.

    Source:
        Liu, Liu, Jin, Stone & Liu, Conflict-averse gradient descent for multi-task learning, NeurIPS 2021,
        arXiv 2110.14048, equation 3; algorithm 1.

    Differs:
        Exact, where the reference code minimises the dual with a tolerance, and takes short Jacobians for stationary.
        The best directions of a stationary Jacobian are not unique: the paper divides 0 by 0 there.
    """
    if not (math.isfinite(c) and c >= 0):
        raise ValueError(f"cagrad: c must be finite and not negative, found {c}. The paper takes 0.4 and 0.5.")
    if c == 0:
        return stateless(no_gradients, lambda seen: torch.full_like(seen, 1 / len(seen)))

    def weigh(G: Gramian) -> Weights:
        C, norms = cosines(G)
        zero, m = G.diagonal() == 0, len(G)
        none = G.sum() <= _VANISHING * torch.where(zero, 0, norms).sum() ** 2
        length = torch.where(none, norms.sum() ** 2, G.sum()).sqrt() / m  # of the mean
        shortest = torch.where(zero, norms.amax(), norms).amin().detach()
        sizes = torch.where(zero, 1, shortest / norms)
        v = worst_gain_multipliers(C, G.sum(1) / m / length / norms, sizes, c)
        lost = none | (v == 0).all()
        return torch.where(lost, 0 * v, 1 / m + length * v / norms)

    return stateless(gramian, weigh)
