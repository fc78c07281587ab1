"""ConFIG: equal cosines with all rows, and the length of the rows' summed projections."""

import torch

from functional_jd.aggregation.aggregate import Aggregator
from functional_jd.aggregation.hyper_parameters import Numbers, preferences, runs_on_host
from functional_jd.aggregation.lifts import stateless
from functional_jd.aggregation.views import gramian
from functional_jd.core.safe import cosines, order_of
from functional_jd.core.types import Gramian, Weights
from functional_jd.solvers.search import Solver
from functional_jd.solvers.spectral import pseudo_inverse, solve_well_conditioned

# Attainable cosines below this fraction of the preference are rounding.
_VANISHING = 1e-10


def config(preference: Numbers | None = None, *, solver: Solver = "host") -> Aggregator:
    """The direction with cosines proportional to the preference, as long as the sum of the rows' projections on it.

    `direction = (sum_i <g_i, b>) b` with `b = N^+ u / |N^+ u|`, N the unit rows n_i. In terms of their cosines C:
    `a = C^+ u`, `N^+ u = sum_i a_i n_i`, `<n_i, N^+ u> = (C a)_i`, so `weights = a / norms (norms'C a) / (a'C a)`.

    Args:
        preference: u `[m]`, floating-point, not negative, with a positive entry; only ratios matter; `None` means all
            equal. It is copied.
        solver: off the CPU, the `"host"` decomposes, or the `"device"`, which synchronizes too.

    Returns:
        A rule that needs the Gramian. Weights `[m]`, float64; differentiable with respect to the Gramian where the rank
        of its cosines is constant.

    Guarantees:
        Linearly independent rows: the cosines of direction and rows are proportional to u, so that the direction
        conflicts with no row. Dependent rows: proportional in the least-squares sense; then it may conflict, and turn
        round when a row is scaled. Scaling one of independent rows changes the length only; homogeneous in the
        Jacobian. Rows of zeros get weight 0. All weights are 0 where the preference is orthogonal to all attainable
        cosines (opposite rows with equal preference; zeros). A non-finite Gramian gives NaN weights. The eigenvalue
        decomposition, which a Cholesky factor replaces on a CPU where the rows are well-conditioned, synchronizes with
        the device.

    Source:
        Liu, Chu, Thuerey, ConFIG: towards conflict-free training of physics informed neural networks, arXiv 2408.11104,
        equations 2 and 3.

    Differences:
        The pseudo-inverse is that of the cosines, with eigenvalues below `8 m eps` of the largest treated as zero: unit
        rows with a condition number above 1e7 are treated as dependent.
    """
    preference_of = preferences("preference", preference)

    def weigh(G: Gramian) -> Weights:
        C, norms = cosines(G)
        u = preference_of(G)
        u = u / order_of(u)
        a = solve_well_conditioned(C, u)
        if a is not None:
            return a / norms * ((norms @ u) / (a @ u))
        inverse, projection = pseudo_inverse(C)
        a, attained = inverse @ u, projection @ u
        vanishing = attained.abs().amax() <= _VANISHING * u.amax()
        length = (norms @ attained) / torch.where(vanishing, 1, a @ attained)
        return torch.where(vanishing, 0, length * a / norms)

    return stateless(gramian, weigh, on_host=runs_on_host(solver))
