"""DualProj: the preferred combination of the rows, projected on their dual cone."""

import torch

from functional_jd.aggregation.aggregate import Aggregator
from functional_jd.aggregation.hyper_parameters import Numbers, preferences, runs_on_host
from functional_jd.aggregation.lifts import stateless
from functional_jd.aggregation.views import gramian
from functional_jd.core.safe import cosines, nonzero
from functional_jd.core.types import Gramian, Weights
from functional_jd.solvers.lcp import linear_complementarity
from functional_jd.solvers.search import Solver


def dualproj(preference: Numbers | None = None, *, solver: Solver = "host") -> Aggregator:
    """Combine the rows with the preference as weights, then project the combination on the dual cone of all rows.

    `direction = argmin { |y - x| : <y, g_j> >= 0 for all j }` with `x = sum_i u_i g_i` for rows g_i. In terms of unit
    rows n_j with cosines C, it is `x + sum_j s_j n_j` with s the multipliers of x, whose inner products with the unit
    rows are `C (norms u)`: so `weights = u + s / norms`.

    Args:
        preference: u `[m]`, floating-point, not negative, with a positive entry; `None` means `1 / m`. It is copied.
        solver: off the CPU, the `"host"` searches, or the `"device"`, in a fixed number of steps without a wait.

    Returns:
        A rule that needs the Gramian. Weights `[m]`, float64, at least u where the rows are independent; not unique
        where they are dependent. Twice differentiable with respect to the Gramian, where the set of active constraints
        does not change, and to the preference.

    Guarantees:
        Never conflicts: `J direction >= 0`. Equal to `constant(u)` where that conflicts with no row. Homogeneous in the
        Jacobian and in the preference. Rows of zeros have no effect. A stationary Jacobian (a positive combination of
        its rows is zero) gives zero, also where the combination with u is not zero. A non-finite Gramian gives NaN
        weights.

    Source:
        Lopez-Paz & Ranzato, Gradient episodic memory for continual learning, NeurIPS 2017, equation 11; with all rows
        as constraints and their mean projected: Quinton & Rey, arXiv 2406.16232, appendix on existing aggregators.

    Differences:
        Exact, where the reference code adds 1e-4 to the diagonal of the trace-normalised Gramian.
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
