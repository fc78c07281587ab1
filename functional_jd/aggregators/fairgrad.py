"""FairGrad: every row's gain is fair in the sense of alpha-fairness."""

import math

import torch

from functional_jd.aggregation.aggregate import Aggregator
from functional_jd.aggregation.lifts import stateless
from functional_jd.aggregation.views import gramian, no_gradients
from functional_jd.core.types import Gramian, Weights
from functional_jd.solvers.dual_cone import cosines
from functional_jd.solvers.fairness import fair_shares


def fairgrad(alpha: float) -> Aggregator:
    """The direction of the greatest alpha-fair utility of the gains `<g_i, direction>` within a ball.

    `G w = w^(-1 / alpha)`, w > 0, elementwise. Each row alone would get `w_i = |g_i|^(-2 alpha / (1 + alpha))`; with v
    relative to that, p = 1 / alpha, and C the cosines: `C (k v) = k v^-p`, `k = norms^((p - 1) / (p + 1))`.

    Args:
        alpha: 0 for the mean, 1 for proportional fairness (`nash_mtl` without clipping); the larger, the more the row
            that gains least counts. At least 0, finite.

    Returns:
        A rule that looks at the Gramian (alpha = 0: at nothing). Weights `[m]`, float64, positive; differentiable twice
        with respect to the Gramian.

    Raises:
        ValueError: alpha negative or not finite.

    Laws:
        Never conflicts. For alpha = 1 scaling a row changes nothing, and the direction has norm `sqrt(m)`; else the
        direction for `c J` is `c^((1 - alpha) / (1 + alpha))` times that for J, to rounding. A row of zeros gets weight
        0, the others what they would without it. A stationary Jacobian (a convex combination of the unit rows is zero,
        within 1e-7) has no solution: weights 0; but for alpha below 0.5 the gains `w^(-1 / alpha)` may fit beneath
        rounding, and then they are what the direction gives. From alpha = 0.1 to 10 the residual of the equation is
        rounding where norms are spread over 1e12; far beyond, weights are finite but only approximate, with derivative
        zero. A Gramian that is not finite gives weights NaN.

    Source:
        Ban & Ji, Fair resource allocation in multi-task learning, ICML 2024, arXiv 2402.15638, equation 4.

    Differs:
        Exact, where the reference code minimises squares of `G w - w^(-1 / alpha)` from uniform weights, with an
        absolute tolerance. `alpha = 0` is `mean()`, as there; the limit of small alpha is `total()`.
    """
    if not (math.isfinite(alpha) and alpha >= 0):
        raise ValueError(f"fairgrad: alpha must be finite and at least 0, found {alpha}. The paper tries 0.5 to 10.")
    if alpha == 0:
        return stateless(no_gradients, lambda seen: torch.full_like(seen, 1 / len(seen)))
    power = 1 / alpha

    def weigh(G: Gramian) -> Weights:
        C, norms = cosines(G)
        v = fair_shares(C, norms ** ((power - 1) / (power + 1)), power)
        return v * norms ** (-2 / (1 + power))

    return stateless(gramian, weigh)
