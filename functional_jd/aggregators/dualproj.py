"""DualProj: the preferred combination of the rows, projected on their dual cone."""

import torch

from functional_jd.aggregation import Aggregator, Numbers, gramian, preferences, runs_on_host, stateless
from functional_jd.core.safe import cosines, nonzero
from functional_jd.core.types import Gramian, Weights
from functional_jd.solvers.lcp import linear_complementarity
from functional_jd.solvers.search import Solver


def dualproj(preference: Numbers | None = None, *, solver: Solver = "host") -> Aggregator:
    """Combine the rows with the preference as weights, then project the combination on the dual cone of all rows.

    `direction = argmin { |y - x| : <y, g_j> >= 0 for all j }` with `x = sum_i u_i g_i`. In terms of unit rows with
    cosines C: `weights = u + s / norms`, s the multipliers of x, whose inner products with them are `C (norms u)`.

    Args:
        preference: u `[m]`, not negative, one at least positive. Default: `1 / m` each.
        solver: `"host"` or `"device"`.

    Returns:
        A rule that needs the Gramian. Weights at least u for independent rows; not unique for dependent ones. Twice
        differentiable where the set of active constraints does not change.

    Guarantees:
        Never conflicts: `J direction >= 0`. Equal to `constant(u)` if that conflicts with no row. Homogeneous in the
        Jacobian and in the preference. Rows of zeros have no effect. A stationary Jacobian (a positive combination of
        its rows is zero) gives zero, also if the combination with u is not zero.

    Source:
        Lopez-Paz & Ranzato, Gradient episodic memory for continual learning, NeurIPS 2017, equation 11; with all rows
        as constraints and their mean projected: Quinton & Rey, arXiv 2406.16232, appendix. Their code adds 1e-4 to the
        diagonal of the trace-normalised Gramian; here the projection is exact.
    """
    preference_of = preferences("preference", preference)

    def weigh(G: Gramian) -> Weights:
        u = preference_of(G)
        C, norms = cosines(G)
        lengths = torch.where(G.diagonal() == 0, 0, norms) * u
        # The multipliers are linear in x: a factor that is constant to derivatives brings it to order one.
        size = nonzero(lengths.detach().sum())
        s = linear_complementarity(C, (C @ (lengths / size)).unsqueeze(0), solver=solver).squeeze(0)
        return u + size * s / norms

    return stateless(gramian, weigh, on_host=runs_on_host(solver))
