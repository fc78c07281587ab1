"""IMTL-G: equal projections on all rows."""

import torch
from torch import Tensor

from functional_jd.aggregation import Aggregator, Gramian, Solver, Weights, gramian, runs_on_host, stateless
from functional_jd.core.safe import cosines
from functional_jd.solvers.spectral import pseudo_inverse, solve_well_conditioned

# Projections and sums of weights below these fractions of their terms are rounding, as are sums below eps x condition.
_VANISHING, _CANCELLED, _EPS = 1e-10, 1e-13, torch.finfo(torch.float64).eps


def imtl_g(*, solver: Solver = "host") -> Aggregator:
    """Weights that sum to one, for a direction with equal projections on all rows.

    `weights = v / sum(v)` with `v = G^+ norms`. For independent rows that is `v = C^-1 1 / norms`, C the cosines.

    Args:
        solver: `"host"` or `"device"`, which both synchronize.

    Returns:
        A rule that needs the Gramian. Weights of any sign; differentiable where the rank of the Gramian is constant.

    Guarantees:
        Linearly independent rows: `<direction, g_i> / |g_i|` is `1 / sum(v)` for all i; if that is negative, the
        direction conflicts with all rows. Dependent rows: equal in the least-squares sense, for comparable norms; the
        direction may turn round when a row is scaled. Homogeneous. Rows of zeros get weight 0. All weights are 0 if no
        direction has equal projections (opposite rows, zeros), or v sums to zero.

    Source:
        Liu et al., ICLR 2021, section 3.1; for dependent rows Quinton & Rey, arXiv 2406.16232, appendix. A zero sum is
        relative to its terms here; in the authors' code it is 1e-12.
    """

    def weigh(G: Gramian) -> Weights:
        C, norms = cosines(G)
        found = solve_well_conditioned(C, torch.ones_like(norms))
        v, resolved = _by_eigenvalues(G, C, norms) if found is None else (found / norms, _CANCELLED)
        total = v.sum()
        exists = total.abs() > resolved * v.abs().sum()
        return torch.where(exists, v / torch.where(exists, total, 1), 0 * v)

    return stateless(gramian, weigh, on_host=runs_on_host(solver))


def _by_eigenvalues(G: Gramian, C: Tensor, norms: Tensor) -> tuple[Tensor, Tensor]:
    """Weights before they are scaled to sum to one, and the fraction of their terms above which a sum counts."""
    is_zero = G.diagonal() == 0
    matrices = torch.stack([C + torch.diag(is_zero.to(C.dtype)), G])
    inverses, projections = pseudo_inverse(matrices)
    independent = projections[0].diagonal().sum() > len(G) - 0.5  # the trace is the rank
    lengths = norms.masked_fill(is_zero, 0)
    least_squares, attained = inverses[1] @ lengths, projections[1] @ lengths
    condition = (matrices.diagonal(0, 1, 2).sum(-1) * inverses.diagonal(0, 1, 2).sum(-1)).detach()  # or more
    rounding = len(G) * _EPS * torch.where(independent, *condition)
    attainable = independent | (attained.abs().amax() > rounding.clamp(min=_VANISHING) * lengths.amax())
    weights = torch.where(independent, inverses[0].sum(-1).masked_fill(is_zero, 0) / norms, least_squares)
    return weights, torch.where(attainable, rounding.clamp(min=_CANCELLED), torch.inf)
