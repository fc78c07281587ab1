"""IMTL-G: the same projection on every row."""

import torch

from functional_jd.aggregation.aggregate import Aggregator
from functional_jd.aggregation.lifts import stateless
from functional_jd.aggregation.views import gramian
from functional_jd.core.types import Gramian, Weights
from functional_jd.solvers.dual_cone import cosines
from functional_jd.solvers.spectral import pseudo_inverse

# Below these parts of what they are sums of, projections and the sum of the weights are rounding.
_VANISHING, _CANCELLED = 1e-10, 1e-13


def imtl_g() -> Aggregator:
    """Weights that sum to one, for a direction that projects equally on every row.

    `weights = v / sum(v)` with `v = G^+ norms`. Where no row depends on others that is `v = C^-1 1 / norms`, C the
    cosines: solved so, it is right however different the norms are.

    Returns:
        A rule that looks at the Gramian. Weights `[m]`, float64, of any sign; differentiable with respect to the
        Gramian while its rank stays what it is.

    Laws:
        Linearly independent rows: `<direction, g_i> / |g_i|` is the same for all i; scaling one row changes the length
        only. It is `1 / sum(v)`, and negative if that is: then all rows are conflicted with. Scales as the Jacobian
        does. Rows of zeros get weight 0. Dependent rows: as nearly so as least squares can, the norms being comparable.
        Where nothing projects on them equally (opposite rows, zeros), or v sums to zero: weights 0. A Gramian that is
        not finite gives weights NaN. The eigenvalues wait for the device.

    Source:
        Liu et al., Towards impartial multi-task learning, ICLR 2021, section 3.1, the closed form of gradient balance;
        with the pseudo-inverse, for dependent rows: Quinton & Rey, arXiv 2406.16232, appendix on existing aggregators.

    Differs:
        What counts as zero is relative to what was summed, where the reference code has the sum of v below 1e-12: it
        gives up on rows longer than 1e12.
    """

    def weigh(G: Gramian) -> Weights:
        C, norms = cosines(G)
        blank = G.diagonal() == 0
        inverse = pseudo_inverse(C + torch.diag(blank.to(C.dtype)))
        # C times its pseudo-inverse projects on the range: its trace is the rank.
        independent = (C * inverse).sum() > (~blank).sum() - 0.5
        nearly = pseudo_inverse(G) @ torch.where(blank, 0, norms)
        longest = torch.where(blank, 0, norms).amax()
        reachable = independent | ((G @ nearly).abs().amax() > _VANISHING * longest)
        v = torch.where(independent, torch.where(blank, 0, inverse.sum(-1)) / norms, nearly)
        total = v.sum()
        given = reachable & (total.abs() > _CANCELLED * v.abs().sum())
        return torch.where(given, v / torch.where(given, total, 1), 0 * v)

    return stateless(gramian, weigh)
