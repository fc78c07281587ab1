"""Projection on the simplex: weights that are non-negative and sum to one."""

import torch
from torch import Tensor

from functional_jd.core.safe import with_nan_of


def simplex_projection(points: Tensor) -> Tensor:
    """The nearest point of the simplex: `argmin { |w - y| : w >= 0, sum(w) = 1 }`.

    `w = max(y - theta, 0)` with `theta = max_k (y_(1) + ... + y_(k) - 1) / k` over the k largest entries.

    Guarantees:
        Float64 `[*, m]`, NaN in rows that are not finite. Idempotent; invariant to adding one number to all entries.
        Sums to one also where entries are huge. Composes with vmap, grad, jvp, compile; derivatives are correct where
        the set of positive entries does not change.

    Source:
        Held, Wolfe & Crowder, Validation of subgradient optimization, 1974: the algorithm that sorts. The quotients
        increase with k while the k-th entry is positive, then decrease: so theta is their maximum.
    """
    shifted = points - points.amax(-1, keepdim=True)  # keeps entries near the largest exact
    largest = shifted.sort(-1, descending=True).values
    counts = torch.arange(1, points.shape[-1] + 1, dtype=points.dtype, device=points.device)
    # On accelerators sums by a product: torch refuses cumsum where it shall be deterministic.
    sums = largest.cumsum(-1) if largest.is_cpu else largest @ largest.new_ones(len(counts), len(counts)).triu()
    theta = ((sums - 1) / counts).amax(-1, keepdim=True)
    # An entry of minus infinity would otherwise get weight 0.
    return with_nan_of((shifted - theta).clamp(min=0), largest[..., -1:])
