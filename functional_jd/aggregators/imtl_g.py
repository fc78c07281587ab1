"""IMTL-G: equal projections on all rows."""

import torch
from torch import Tensor

from functional_jd.aggregation.aggregate import Aggregator
from functional_jd.aggregation.hyper_parameters import runs_on_host
from functional_jd.aggregation.lifts import stateless
from functional_jd.aggregation.views import gramian
from functional_jd.core.safe import cosines
from functional_jd.core.types import Gramian, Weights
from functional_jd.solvers.search import Solver
from functional_jd.solvers.spectral import pseudo_inverse, solve_well_conditioned

# Projections and sums of weights below these fractions of their terms are rounding.
_VANISHING, _CANCELLED = 1e-10, 1e-13


def imtl_g(*, solver: Solver = "host") -> Aggregator:
    """Weights that sum to one, for a direction with equal projections on all rows.

    `weights = v / sum(v)` with `v = G^+ norms`. For independent rows that is `v = C^-1 1 / norms`, C the cosines, which
    is accurate however different the norms are.

    Args:
        solver: off the CPU, the `"host"` decomposes, or the `"device"`, which synchronizes too.

    Returns:
        A rule that needs the Gramian. Weights `[m]`, float64, of any sign; differentiable with respect to the Gramian
        where its rank is constant.

    Guarantees:
        Linearly independent rows: `<direction, g_i> / |g_i|` is `1 / sum(v)` for all i; if that is negative, the
        direction conflicts with all rows. Scaling one row changes the length only. Homogeneous in the Jacobian. Rows of
        zeros get weight 0. Dependent rows: equal in the least-squares sense, for comparable norms; there the direction
        may turn round when a row is scaled. All weights are 0
        where no direction has equal projections (opposite rows, zeros), or v sums to zero. A non-finite Gramian gives
        NaN weights. The eigenvalue decompositions, which a Cholesky factor replaces on a CPU where the rows are
        well-conditioned, synchronize with the device.

    Source:
        Liu et al., Towards impartial multi-task learning, ICLR 2021, section 3.1, the closed form of gradient balance;
        with the pseudo-inverse, for dependent rows: Quinton & Rey, arXiv 2406.16232, appendix on existing aggregators.

    Differences:
        The threshold for a zero sum is relative to its terms; in the reference code it is 1e-12, which excludes rows
        longer than 1e12.
    """

    def weigh(G: Gramian) -> Weights:
        C, norms = cosines(G)
        found = solve_well_conditioned(C, torch.ones_like(norms))
        v, attainable = _by_eigenvalues(G, C, norms) if found is None else (found / norms, True)
        total = v.sum()
        exists = (total.abs() > _CANCELLED * v.abs().sum()) & attainable
        return torch.where(exists, v / torch.where(exists, total, 1), 0 * v)

    return stateless(gramian, weigh, on_host=runs_on_host(solver))


def _by_eigenvalues(G: Gramian, C: Tensor, norms: Tensor) -> tuple[Tensor, Tensor]:
    """Weights before they are scaled to sum to one, and whether equal projections exist."""
    is_zero = G.diagonal() == 0
    inverses, projections = pseudo_inverse(torch.stack([C + torch.diag(is_zero.to(C.dtype)), G]))
    independent = projections[0].diagonal().sum() > len(G) - 0.5  # the trace is the rank
    lengths = norms.masked_fill(is_zero, 0)
    least_squares, attained = inverses[1] @ lengths, projections[1] @ lengths
    attainable = independent | (attained.abs().amax() > _VANISHING * lengths.amax())
    equal = inverses[0].sum(-1).masked_fill(is_zero, 0) / norms
    return torch.where(independent, equal, least_squares), attainable
