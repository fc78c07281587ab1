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
_Solved = tuple[list[int], list[float], _Rows]


def solve_by_numbers(
    matrix: Tensor, offset: Tensor, allowed: Tensor, inverses: bool = False
) -> tuple[Tensor, Tensor] | None:
    """Solve the problems of `linear_complementarity` by block principal pivoting, with a factor for each active set.

    The matrices are float64 `[b, m, m]` on a CPU, the offsets `[b, k, m]`. Returns s, and the inverses of the active
    parts of the matrices, else zero, `[b, k, m, m]`, or empty; `None` where values may not be read or are not finite,
    rows are ill-conditioned, or exchanges go round.
    """
    m = offset.shape[-1]
    if type(matrix) is not Tensor or type(offset) is not Tensor or dispatch_modes():
        return None
    multipliers: _Rows = []
    blocks: list[_Rows] = []
    for M, several, free in zip(matrix.tolist(), offset.tolist(), allowed.tolist(), strict=True):
        if not isfinite(sum(map(sum, M))):
            return None
        factors: dict[tuple[int, ...], _Rows | None] = {}
        for q, entries in zip(several, free, strict=True):
            found = _solve(M, q, [j for j in range(m) if entries[j]], factors)
            if found is None:
                return None
            active, values, factor = found
            multipliers.append(_spread(values, active, m))
            if inverses:
                block = [[0.0] * m for _ in range(m)]
                for i in active:
                    block[i] = _spread(_solve_factored(factor, [float(i == j) for j in active]), active, m)
                blocks.append(block)
    s = torch.tensor(multipliers, dtype=offset.dtype, device=offset.device).view(offset.shape)
    return s, torch.tensor(blocks, dtype=offset.dtype, device=offset.device).view(*offset.shape, m) if inverses else s[
        :0
    ]


def _spread(values: list[float], active: list[int], m: int) -> list[float]:
    row = [0.0] * m
    for j, x in zip(active, values):  # noqa: B905
        row[j] = x
    return row


def _solve(M: _Rows, q: list[float], free: list[int], factors: dict[tuple[int, ...], _Rows | None]) -> _Solved | None:
    """The active entries, ascending; their multipliers; the rows of their lower Cholesky factor."""
    if not isfinite(sum(q)):
        return None
    active = [j for j in free if q[j] < 0]
    for _ in range(_ROUNDS):
        key = tuple(active)
        if key not in factors:
            factors[key] = _cholesky(M, active)
        factor = factors[key]
        if factor is None:
            return None
        s = _solve_factored(factor, [-q[j] for j in active])
        wrong = [j for j, x in zip(active, s) if x < -TOLERANCE]  # noqa: B905
        for j in free:
            if j not in key:
                row, w = M[j], q[j]
                for i, x in zip(active, s):  # noqa: B905
                    w += row[i] * x
                if w < -TOLERANCE:
                    wrong.append(j)
        if not wrong:
            return active, s, factor
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
