"""UPGrad: the mean of the projections of all rows on their dual cone."""

from functional_jd.aggregation import Aggregator, Numbers, Solver, gramian, preferences, runs_on_host, stateless
from functional_jd.core.safe import cosines
from functional_jd.core.types import Gramian, Weights
from functional_jd.solvers.lcp import row_multipliers


def upgrad(preference: Numbers | None = None, *, solver: Solver = "auto") -> Aggregator:
    """Average the gradients after removing the conflicts between them.

    For losses in one unit that conflict. Each row `g_i` is projected onto the dual cone: the directions that conflict
    with no row. The direction is `sum_i u_i p_i`, with `p_i = argmin { |y - g_i| : <y, g_j> >= 0 for all j }`. To first
    order, a small step along it raises no loss.

    Args:
        preference: u, the weight of each row `[m]`: not negative, one at least positive. Default: `1 / m` each.
        solver: off the CPU, `"host"` projects there, with one copy there and one back, `"device"` in a fixed number of
            steps without a wait, and `"auto"` where one launch can, else on the host.

    Returns:
        A rule that needs the Gramian. For independent rows, each weight is at least u. For dependent rows weights are
        not unique, but the direction is. Twice differentiable while the active constraints stay the same.

    Guarantees:
        Never conflicts: `J direction >= 0`. Equals `constant(u)` if no two rows conflict. Linear in row scales: the
        direction for `diag(c) J` is linear in `c >= 0`, and so homogeneous. Ignores rows of zeros. Returns zero if a
        positive combination of rows is zero.

    Source:
        Quinton & Rey, arXiv 2406.16232, equations 4 and 5, proposition 1. The projections are exact. The authors' code
        normalises the Gramian by its trace and adds 1e-4 to its diagonal, which leaves conflicts between rows of very
        different or very small norms.

    Example:
        >>> aggregate(upgrad(), torch.tensor([[2.0, 0.0], [-1.0, 1.0]])).direction
        tensor([0.5000, 1.0000])
    """
    preference_of = preferences("preference", preference)

    def weigh(G: Gramian) -> Weights:
        u = preference_of(G)
        C, norms = cosines(G)  # of unit rows n_j: p_i = g_i + |g_i| sum_j S_ji n_j, with the multipliers S
        return u + row_multipliers(C, solver) @ (norms * u) / norms

    return stateless(gramian, weigh)._replace(on_host=runs_on_host(solver, auto=True))
