"""UPGrad: the mean of the projections of all rows on their dual cone."""

from functional_jd.aggregation.aggregate import Aggregator
from functional_jd.aggregation.hyper_parameters import Numbers, preferences, runs_on_host
from functional_jd.aggregation.lifts import stateless
from functional_jd.aggregation.views import gramian
from functional_jd.core.safe import cosines
from functional_jd.core.types import Gramian, Weights
from functional_jd.solvers.lcp import row_multipliers
from functional_jd.solvers.search import Solver


def upgrad(preference: Numbers | None = None, *, solver: Solver = "host") -> Aggregator:
    """Project every row on the dual cone of all rows, then combine the projections with the preference as weights.

    `direction = sum_i u_i p_i`, with `p_i = argmin { |y - g_i| : <y, g_j> >= 0 for all j }` for rows g_i. In terms of
    unit rows n_j with cosines C, `p_i = g_i + |g_i| sum_j S_ji n_j`, where column i of S holds the multipliers of n_i:
    so `weights = u + S (norms u) / norms`.

    Args:
        preference: u `[m]`, floating-point, not negative, with a positive entry; `None` means `1 / m`. It is copied.
        solver: off the CPU, the `"host"` searches, or the `"device"`, in a fixed number of steps without a wait.

    Returns:
        A rule that needs the Gramian. Weights `[m]`, float64, at least u where the rows are independent; not unique
        where they are dependent. Twice differentiable with respect to the Gramian, where the set of active constraints
        does not change, and to the preference.

    Laws:
        Never conflicts: `J direction >= 0`. Equal to `constant(u)` where no two rows conflict. Linear under scaling of
        rows: the direction for `diag(c) J` is linear in `c >= 0`; so it is homogeneous in the Jacobian. Rows of zeros
        have no effect. A stationary Jacobian (a positive combination of its rows is zero) gives zero. A non-finite
        Gramian gives NaN weights.

    Source:
        Quinton & Rey, arXiv 2406.16232, equations 4 and 5, proposition 1.

    Differs:
        Exact, where the reference code adds 1e-4 to the diagonal of the trace-normalised Gramian: no conflict remains
        for rows of very different or very small norms.

    Example:
        >>> aggregate(upgrad(), torch.tensor([[2.0, 0.0], [-1.0, 1.0]])).direction
        tensor([0.5000, 1.0000])
    """
    preference_of = preferences("preference", preference)

    def weigh(G: Gramian) -> Weights:
        u = preference_of(G)
        C, norms = cosines(G)
        return u + row_multipliers(C, solver) @ (norms * u) / norms

    return stateless(gramian, weigh, on_host=runs_on_host(solver))
