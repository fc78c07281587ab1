"""FairGrad: the direction with alpha-fair gains for all rows."""

from torch import Tensor

from functional_jd.aggregation.aggregate import Aggregator
from functional_jd.aggregation.hyper_parameters import runs_on_host
from functional_jd.aggregation.lifts import stateless
from functional_jd.aggregation.views import equal_weights, gramian
from functional_jd.core.arguments import NOT_NEGATIVE, Number, number
from functional_jd.core.safe import cosines
from functional_jd.core.types import Gramian, Weights
from functional_jd.solvers.fairness import fair_shares
from functional_jd.solvers.search import Solver


def fairgrad(alpha: Number, *, solver: Solver = "host") -> Aggregator:
    """Maximise the alpha-fair utility of the gains `<g_i, direction>` within a ball.

    `G w = w^(-1 / alpha)`, w > 0, elementwise. A single row has `w_i = |g_i|^(-2 alpha / (1 + alpha))`; with v the
    weights relative to that, p = 1 / alpha, and C the cosines: `C (k v) = k v^-p`, `k = norms^((p - 1) / (p + 1))`.

    Args:
        alpha: 0 gives the mean, 1 proportional fairness (`nash_mtl` without clipping); larger values favour the row
            with the smallest gain. Finite, not negative. A number, or a tensor `[]`, which must be positive.
        solver: off the CPU, the `"host"` searches, or the `"device"`, in a fixed number of steps without a wait.

    Returns:
        A rule that needs the Gramian (no gradients for the number 0). Weights `[m]`, float64, positive, but 0 for rows
        of zeros and for some stationary Jacobians; twice differentiable with respect to the Gramian and to alpha.

    Guarantees:
        Never conflicts. For alpha = 1 invariant to scaling a row, with a direction of norm `sqrt(m)`; else the
        direction for `c J` is `c^((1 - alpha) / (1 + alpha))` times that for J, up to rounding. A row of zeros gets
        weight 0, the others the weights that they have without it. From alpha = 0.1 to 10 the residual of the equation
        is at rounding level for norms spread over 1e12. For larger alpha (from 50 at norms spread over 1e4, 30 at 1e8,
        20 at 1e12, 10 at 1e24) a row to which the others give more than its share may keep a weight that is too large,
        but too small to matter: below 1e-60 of the sum of all `w norms`. Direction and derivatives are then accurate.
        Below 0.02, with norms spread over 1e4 or more, derivatives may be zero. A stationary Jacobian (a convex
        combination of the unit rows is zero, within 1e-7; within 1e-4 where the search did not converge, as for some
        with `alpha >= 5`) has no solution. Then weights are 0 for `alpha >= 1`, and wherever no direction gains; for
        `alpha < 1`, the direction of largest utility exists: it gains zero for the rows that cancel, whose weights
        solve the equation to rounding. They are of order `eps^(-alpha / (1 + alpha))` and the direction is accurate to
        `eps^(1 / (1 + alpha))`: 26 and 1e-14 for alpha = 0.1, 2e5 and 4e-11 for 0.5, 3e7 and 6e-9 for 0.9.
        A non-finite Gramian gives NaN weights.

    Source:
        Ban & Ji, Fair resource allocation in multi-task learning, ICML 2024, arXiv 2402.15638, equation 4.

    Differences:
        Exact, where the reference code minimises the square of `G w - w^(-1 / alpha)` from uniform weights, with an
        absolute tolerance. `alpha = 0` is `mean()`, as there; the limit of small alpha is `total()` where that
        conflicts with no row, else its projection, `dualproj` with a preference of ones.
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
