"""ConFIG: equal cosines with all rows, and the length of the rows' summed projections."""

import torch

from functional_jd.aggregation import Aggregator, Numbers, Solver, gramian, preferences, runs_on_host, stateless
from functional_jd.core.safe import cosines, order_of
from functional_jd.core.types import Gramian, Weights
from functional_jd.solvers.spectral import pseudo_inverse, solve_well_conditioned

# Attainable cosines below this fraction of the preference are rounding.
_VANISHING = 1e-10


def config(preference: Numbers | None = None, *, solver: Solver = "host") -> Aggregator:
    """The direction with cosines proportional to the preference, as long as the sum of the rows' projections on it.

    `direction = (sum_i <g_i, b>) b` with `b = N^+ u / |N^+ u|`, N the unit rows. In terms of their cosines C: `weights
    = a / norms (norms'C a) / (a'C a)` with `a = C^+ u`.

    Args:
        preference: u `[m]`, not negative, one at least positive; only ratios matter. Default: all equal.
        solver: `"host"` or `"device"`, which both synchronize.

    Returns:
        A rule that needs the Gramian. Differentiable where the rank of its cosines is constant.

    Guarantees:
        Linearly independent rows: the cosines of direction and rows are proportional to u, so that no row conflicts.
        Dependent rows: proportional in the least-squares sense; the direction may conflict, and turn round when a row
        is scaled. Homogeneous. Rows of zeros get weight 0. All weights are 0 if the preference is orthogonal to all
        attainable cosines (opposite rows, zeros).

    Source:
        Liu, Chu & Thuerey, ICLR 2025, arXiv 2408.11104, equations 2 and 3. The pseudo-inverse is that of the cosines,
        without eigenvalues below `8 m eps` of the largest: unit rows with a condition number above 1e7 count as
        dependent.
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
