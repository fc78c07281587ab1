"""Complementarity problems of few rows by numbers: solving one takes as long as some operations on tensors."""

from math import isfinite, sqrt

import torch
from torch import Tensor

from functional_jd.solvers.pivoting import TOLERANCE
from functional_jd.torch_compat.torch_internals import dispatch_modes

# Pivots below this tell that active rows are ill-conditioned.
_WELL_CONDITIONED = 1e-4
# Exchanges of few rows converge within so many rounds, or go round.
_ROUNDS = 6

_Rows = list[list[float]]


def solve_by_numbers(matrix: Tensor, offset: Tensor, allowed: Tensor) -> Tensor | None:
    """Solve the problems of `linear_complementarity`, `[b, m, m]` and `[b, k, m]`, by block principal pivoting. None
    where values may not be read or are not finite, rows are ill-conditioned, or exchanges go round.
    """
    if type(matrix) is not Tensor or type(offset) is not Tensor or dispatch_modes():
        return None
    found: _Rows = []
    for M, several, free in zip(matrix.tolist(), offset.tolist(), allowed.tolist(), strict=True):
        if not isfinite(sum(map(sum, M))):
            return None
        for q, entries in zip(several, free, strict=True):
            solved = _solve(M, q, [j for j, is_free in enumerate(entries) if is_free])
            if solved is None:
                return None
            found.append(solved)
    return torch.tensor(found, dtype=offset.dtype, device=offset.device).view(offset.shape)


def _solve(M: _Rows, q: list[float], free: list[int]) -> list[float] | None:
    """The multipliers of one problem."""
    if not isfinite(sum(q)):
        return None
    active = [j for j in free if q[j] < 0]
    for _ in range(_ROUNDS):
        factor = _cholesky(M, active)
        if factor is None:
            return None
        found = [0.0] * len(q)
        for j, x in zip(active, _solve_factored(factor, [-q[j] for j in active]), strict=True):
            found[j] = x
        wrong: list[int] = []
        for j in free:
            x = found[j]
            if not x:
                x = q[j]
                for i in active:
                    x += M[j][i] * found[i]
            if x < -TOLERANCE:
                wrong.append(j)
        if not wrong:
            return found
        active = sorted(set(active).symmetric_difference(wrong))
    return None


def _cholesky(M: _Rows, active: list[int]) -> _Rows | None:
    """The rows of the lower factor of `M_FF`; `None` where a pivot is small."""
    factor: _Rows = []
    for i in active:
        row, new = M[i], []
        pivot = row[i]
        for n, earlier in enumerate(factor):
            x = row[active[n]]
            for a, b in zip(new, earlier):  # noqa: B905
                x -= a * b
            x /= earlier[n]
            new.append(x)
            pivot -= x * x
        if not pivot >= _WELL_CONDITIONED:
            return None
        new.append(sqrt(pivot))
        factor.append(new)
    return factor


def _solve_factored(factor: _Rows, x: list[float]) -> list[float]:
    """`(M_FF)^-1 x`, given the lower factor; x is overwritten."""
    for n, row in enumerate(factor):
        y = x[n]
        for i in range(n):
            y -= row[i] * x[i]
        x[n] = y / row[n]
    for n in range(len(x) - 1, -1, -1):
        row = factor[n]
        y = x[n] = x[n] / row[n]
        for i in range(n):
            x[i] -= row[i] * y
    return x
