"""Projection on the simplex: weights that are non-negative and sum to one."""

import torch
from torch import Tensor

from functional_jd.core.safe import with_nan_of


def simplex_projection(points: Tensor) -> Tensor:
    """The nearest point of the simplex: `argmin { |w - y| : w >= 0, sum(w) = 1 }`.

    `w = max(y - theta, 0)` with `theta = max_k (y_(1) + ... + y_(k) - 1) / k` over the k largest entries.

    Args:
        points: y, float64 `[*, m]`.

    Returns:
        `[*, m]`, NaN where something in a row is not finite.

    Laws:
        Projecting twice is projecting once; adding one number to all entries changes nothing. Sums to one also where
        entries are so large that one is lost beside them. Composes with vmap, grad, jvp, compile; derivatives are right
        where the set of positive entries does not change.

    Source:
        Held, Wolfe & Crowder, Validation of subgradient optimization, 1974: the algorithm that sorts. Its quotients
        rise with k while another entry is positive, and fall from there on: so theta is their maximum.
    """
    shifted = points - points.amax(-1, keepdim=True)  # only differences count: what is near the largest stays exact
    largest = shifted.sort(-1, descending=True).values
    counts = torch.arange(1, points.shape[-1] + 1, dtype=points.dtype, device=points.device)
    theta = ((largest.cumsum(-1) - 1) / counts).amax(-1, keepdim=True)
    # Minus infinity would only get weight 0.
    return with_nan_of((shifted - theta).clamp(min=0), largest[..., -1:])
