"""Aligned-MTL: the principal components of the rows, all made equally long."""

import torch
from torch import Tensor

from functional_jd.aggregation.aggregate import Aggregator
from functional_jd.aggregation.lifts import stateless
from functional_jd.aggregation.per_objective import Numbers, preferences
from functional_jd.aggregation.views import gramian
from functional_jd.core.safe import nonzero
from functional_jd.core.types import Gramian, Weights
from functional_jd.solvers.spectral import inverse_root


def aligned_mtl(preference: Numbers | None = None, scale_mode: str = "min") -> Aggregator:
    """Combine, as preferred, the nearest system of orthogonal rows of one length.

    `weights = sqrt(s) G^(-1/2) u`, the inverse root on the range of G, with s an eigenvalue of G that is not zero: then
    `sqrt(s) G^(-1/2) J` is the orthogonal factor of the polar decomposition of J, times sqrt(s).

    Args:
        preference: u `[m]`, non-negative, finite, floating-point, at least one positive; `None` means `1 / m`. Copied:
            what happens to the tensor afterwards is not seen.
        scale_mode: s is `"min"`: the smallest; `"median"`: the median, of two the lower; `"rmse"`: the mean.

    Returns:
        A rule that looks at the Gramian. Weights `[m]`, float64. First derivatives with respect to the Gramian are
        right while its rank stays what it is, also where eigenvalues coincide; but where s itself is repeated it has
        only one-sided derivatives, of which one is taken ("rmse" has them all). Second derivatives: at full rank.

    Raises:
        TypeError: a preference that is not floating-point.
        ValueError: a preference of another shape, negative, not finite, or zero (not checked under a transform, where
            values are not known); another scale mode; at the call, not one preference per row.

    Laws:
        Linear in the preference; scales as the Jacobian does. Orthogonal rows of one length: `constant(u)`. Linearly
        independent rows: `J direction = sqrt(s) G^(1/2) u`, and `|direction| = sqrt(s) |u|`. Eigenvalues below
        `8 m eps` of the largest are taken for zero: dependent rows share one component. A Jacobian of zeros gets
        weights 0. A Gramian that is not finite gives weights NaN. The eigenvalues wait for the device.

    Source:
        Senushkin, Patakin, Kuznetsov, Konushin, Independent component alignment for multi-task learning, CVPR 2023,
        algorithm 1 ("min"); "rmse" is the scale of its reference code.
    """
    u = preferences(preference, "aligned_mtl")
    if scale_mode not in ("min", "median", "rmse"):
        raise ValueError(
            f'aligned_mtl: scale_mode must be "min", "median" or "rmse", found {scale_mode!r}. The default is "min".'
        )

    def weigh(G: Gramian) -> Weights:
        root, eigenvalues = inverse_root(G)
        s = _scale(eigenvalues, scale_mode)
        return torch.where(s == 0, 0, nonzero(s).sqrt() * (root @ u(G)))

    return stateless(gramian, weigh)


def _scale(eigenvalues: Tensor, mode: str) -> Tensor:
    """The least, median or mean of those that are not zero; they ascend."""
    rank = (eigenvalues != 0).sum()
    if mode == "rmse":
        return eigenvalues.sum() / rank.clamp(min=1)
    m = len(eigenvalues)
    chosen = m - rank + ((rank - 1) // 2 if mode == "median" else 0)
    return torch.where(torch.arange(m, device=eigenvalues.device) == chosen, eigenvalues, 0).sum()
