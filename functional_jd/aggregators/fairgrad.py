"""FairGrad: the direction with alpha-fair gains for all rows."""

from torch import Tensor

from functional_jd.aggregation import Aggregator, Gramian, Weights, equal_weights, gramian, runs_on_host, stateless
from functional_jd.core.arguments import NOT_NEGATIVE, Number, number
from functional_jd.core.safe import cosines
from functional_jd.solvers.fairness import fair_shares
from functional_jd.solvers.search import Solver


def fairgrad(alpha: Number, *, solver: Solver = "host") -> Aggregator:
    """Maximise the alpha-fair utility of the gains `<g_i, direction>` within a ball.

    `G w = w^(-1 / alpha)`, w > 0, elementwise. A single row has `w_i = |g_i|^(-2 alpha / (1 + alpha))`; with v the
    weights relative to that, p = 1 / alpha, and C the cosines: `C (k v) = k v^-p`, `k = norms^((p - 1) / (p + 1))`.

    Args:
        alpha: 0 gives the mean, 1 proportional fairness (`nash_mtl` without clipping); larger values favour the row
            with the smallest gain. Not negative; a tensor must be positive.
        solver: `"host"` or `"device"`.

    Returns:
        A rule that needs the Gramian (no gradients for the number 0). Weights are positive, but 0 for rows of zeros and
        for some stationary Jacobians; twice differentiable.

    Guarantees:
        Never conflicts. For alpha = 1 invariant to scaling a row, with a direction of norm `sqrt(m)`; else the
        direction for `c J` is `c^((1 - alpha) / (1 + alpha))` times that for J. The residual is at rounding for alpha
        from 0.1 to 10 and norms spread over 1e12; beyond, a weight may be too large, but below 1e-60 of the sum of all
        `w norms`. Below 0.02, derivatives may be zero. A stationary Jacobian (a convex combination of the unit rows is
        zero, within 1e-6; within 1e-4 for some with `alpha >= 5`) has no solution: weights are 0 for `alpha >= 1`, and
        if no direction gains. For `alpha < 1` the direction is accurate to `eps^(1 / (1 + alpha))`.

    Source:
        Ban & Ji, ICML 2024, arXiv 2402.15638, equation 4. The authors' code minimises the square of `G w - w^(-1 /
        alpha)`. `alpha = 0` is `mean()`, as there; the limit of small alpha is `dualproj` with a preference of ones.
    """
    alpha = number("alpha", alpha, NOT_NEGATIVE, "The paper tries 0.5 to 10.")
    on_host = runs_on_host(solver, alpha)
    if not isinstance(alpha, Tensor) and alpha == 0:
        return stateless(equal_weights, lambda weights: weights)
    power = 1 / alpha

    def weigh(G: Gramian) -> Weights:
        C, norms = cosines(G)
        # A power, of which torch loses the mixed derivative where the exponent is zero, at alpha = 1.
        v = fair_shares(C, ((power - 1) / (power + 1) * norms.log()).exp(), power, solver)
        return v * norms ** (-2 / (1 + power))

    return stateless(gramian, weigh, on_host=on_host)
