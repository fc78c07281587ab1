"""DualProj: the preferred combination of the rows, projected on their dual cone."""

import torch

from functional_jd.aggregation import Aggregator, Numbers, Solver, gramian, preferences, runs_on_host, stateless
from functional_jd.solvers.lcp import projected


def dualproj(preference: Numbers | None = None, *, solver: Solver = "auto") -> Aggregator:
    """Combine the rows with the preference as weights, then project the combination on the dual cone of all rows.

    `direction = argmin { |y - x| : <y, g_j> >= 0 for all j }` with `x = sum_i u_i g_i`. In terms of unit rows with
    cosines C: `weights = u + s / norms`, s the multipliers of x, whose inner products with them are `C (norms u)`.

    Args:
        preference: u `[m]`, not negative, one at least positive. Default: `1 / m` each.
        solver: `"auto"`, `"host"` or `"device"`.

    Returns:
        A rule that needs the Gramian. Weights at least u for independent rows; not unique for dependent ones. Twice
        differentiable where the set of active constraints does not change.

    Guarantees:
        Never conflicts: `J direction >= 0`. Equal to `constant(u)` if that conflicts with no row. Homogeneous in the
        Jacobian and in the preference. Rows of zeros have no effect. A stationary Jacobian (a positive combination of
        its rows is zero) gives zero.

    Source:
        Lopez-Paz & Ranzato, NeurIPS 2017, equation 11; Quinton & Rey, arXiv 2406.16232, appendix, whose code adds 1e-4
        to the diagonal of the trace-normalised Gramian; here the projection is exact.
    """
    preference_of = preferences("preference", preference)
    weigh = lambda G: projected(preference_of(G), G, torch.ones_like(G[:1], dtype=torch.bool), solver)
    return stateless(gramian, weigh)._replace(on_host=runs_on_host(solver, auto=True))
