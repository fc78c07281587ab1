"""Complementarity problems of few rows, by all active sets at once: nothing waits for a value, no round for another."""

import torch
from torch import Tensor

# Pivots of dependent rows are rounding.
_DEPENDENT = 1e-14


def solve_by_active_sets(M: Tensor, q: Tensor, free: Tensor) -> tuple[Tensor, Tensor]:
    """Solve the problems of `linear_complementarity` by the active set that violates their conditions least.

    For a set F, let B have the columns of `-M` in F, and those of 1 elsewhere. Then `B z = q` gives `z = s` on F and
    `z = w` off it, with `w = M s + q`: the least entry of z is the violation. Sets of dependent rows, whose B has a
    pivot of zero, are left out, as some set of independent rows solves every problem.

    Args:
        M: float64 `[b, m, m]`; there are `2^m` sets.
        q: float64 `[b, k, m]`.
        free: bool `[b, k, m]`: the entries that may be active.

    Returns:
        Multipliers and active sets, `[b, k, m]`.

    Laws:
        Traces, batches and compiles. Errors are those of `linear_complementarity` up to a condition number of 1e14.
    """
    m = M.shape[-1]
    numbers, bits = torch.arange(2**m, device=M.device), torch.arange(m, device=M.device)
    sets = (numbers.unsqueeze(-1) >> bits) & 1 > 0
    eye = torch.eye(m, dtype=M.dtype, device=M.device)
    factors, pivots, _ = torch.linalg.lu_factor_ex(torch.where(sets.unsqueeze(-2), -M.unsqueeze(1), eye))
    z = torch.linalg.lu_solve(factors, pivots, q.mT.unsqueeze(1))
    # An entry that may not be active counts where it is, and only there.
    least = torch.where(free.mT.unsqueeze(1), z, -sets.unsqueeze(-1).to(z.dtype)).amin(2).clamp(max=0)
    pivot = factors.diagonal(dim1=-2, dim2=-1).abs().amin(-1, keepdim=True)
    which = least.masked_fill(pivot <= _DEPENDENT, -torch.inf).argmax(1)
    active = sets[which]
    return z.gather(1, which[:, None, None].expand(-1, 1, m, -1)).squeeze(1).mT * active, active
