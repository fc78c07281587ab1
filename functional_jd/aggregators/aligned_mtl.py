"""Aligned-MTL: the principal components of the rows, rescaled to the same length."""

import torch
from torch import Tensor

from functional_jd.aggregation import Aggregator, Numbers, Solver, gramian, preferences, runs_on_host, stateless
from functional_jd.core.arguments import check_option
from functional_jd.core.safe import nonzero, order_of
from functional_jd.core.types import Gramian, Weights
from functional_jd.solvers.spectral import inverse_root


def aligned_mtl(preference: Numbers | None = None, scale_mode: str = "min", *, solver: Solver = "host") -> Aggregator:
    """Combine the nearest system of orthogonal rows of equal length, weighted by the preference.

    `weights = sqrt(s) G^(-1/2) u`, with s a nonzero eigenvalue of G and the inverse root on its range: `sqrt(s)
    G^(-1/2) J` is the orthogonal factor of the polar decomposition of J, times sqrt(s).

    Args:
        preference: u `[m]`, not negative, one at least positive. Default: `1 / m` each.
        scale_mode: the eigenvalue s: `"min"` the smallest, `"median"` the (lower) median, `"rmse"` their mean.
        solver: `"host"` or `"device"`, which both synchronize.

    Returns:
        A rule that needs the Gramian. Derivatives are right at constant rank, but of a repeated s; second ones at full.

    Guarantees:
        Linear in the preference; homogeneous in the Jacobian. Linearly independent rows: `J direction = sqrt(s) G^(1/2)
        u`. Eigenvalues below `8 m eps` of the largest count as zero: dependent rows share one component, and so do rows
        whose lengths differ more than `1 / sqrt(8 m eps)` times (1.7e7 for two). A Jacobian of zeros gets weights 0.

    Source:
        Senushkin et al., CVPR 2023, algorithm 1 ("min"); "rmse" is the scale of its code.
    """
    preference_of = preferences("preference", preference)
    check_option("scale_mode", scale_mode, ("min", "median", "rmse"), 'The default is "min".')

    def weigh(G: Gramian) -> Weights:
        root, eigenvalues = inverse_root(G / order_of(G.diagonal()))  # the unit of G cancels in the weights
        s = _scale(eigenvalues, scale_mode)
        return torch.where(s == 0, 0, nonzero(s).sqrt() * (root @ preference_of(G)))

    return stateless(gramian, weigh, on_host=runs_on_host(solver))


def _scale(eigenvalues: Tensor, mode: str) -> Tensor:
    """The smallest, median or mean of the nonzero eigenvalues, which ascend."""
    rank = (eigenvalues != 0).sum()
    if mode == "rmse":
        return eigenvalues.sum() / rank.clamp(min=1)
    m = len(eigenvalues)
    index = m - rank + ((rank - 1) // 2 if mode == "median" else 0)
    return torch.where(torch.arange(m, device=eigenvalues.device) == index, eigenvalues, 0).sum()
