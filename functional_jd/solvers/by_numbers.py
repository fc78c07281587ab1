"""Complementarity problems of few rows by numbers: solving one takes as long as some operations on tensors."""

from math import isfinite, sqrt
from typing import NamedTuple

import torch
from torch import Tensor

from functional_jd.torch_compat.torch_internals import dispatch_modes

# Pivots below this tell that active rows are ill-conditioned.
_WELL_CONDITIONED = 1e-4
# Exchanges of few rows converge within so many rounds, or go round.
_ROUNDS = 6

_Factor = list[list[float]]


class Solved(NamedTuple):
    """The active entries, ascending; their multipliers; the rows of their lower Cholesky factor."""

    active: list[int]
    s: list[float]
    factor: _Factor


def solve_by_numbers(matrix: Tensor, offset: Tensor, allowed: Tensor, tolerance: float) -> list[Solved] | None:
    """Solve the problems of `linear_complementarity` by block principal pivoting, with a factor for each active set.

    Args:
        matrix: float64 `[*, m, m]`, on a CPU.
        offset: float64 `[*, k, m]`.
        allowed: bool `[*, k, m]`.
        tolerance: how far below zero an entry may lie.

    Returns:
        For every problem its solution; `None` where they are traced, where a number is not finite, where an active set
        is ill-conditioned, and where exchanges go round.
    """
    m = offset.shape[-1]
    if type(matrix) is not Tensor or type(offset) is not Tensor or dispatch_modes():
        return None
    solved: list[Solved] = []
    problems = [x.reshape(-1, *x.shape[-2:]).tolist() for x in (matrix, offset, allowed)]
    for M, several, free in zip(*problems, strict=True):
        if not isfinite(sum(map(sum, M))):
            return None
        factors: dict[tuple[int, ...], _Factor | None] = {}
        for q, entries in zip(several, free, strict=True):
            found = _solve(M, q, [j for j in range(m) if entries[j]], factors, tolerance)
            if found is None:
                return None
            solved.append(found)
    return solved


def as_multipliers(solved: list[Solved], like: Tensor) -> Tensor:
    """The multipliers of all problems, with the shape of the offsets."""
    rows = [[0.0] * like.shape[-1] for _ in solved]
    for row, one in zip(rows, solved, strict=True):
        for j, x in zip(one.active, one.s, strict=True):
            row[j] = x
    return torch.tensor(rows, dtype=like.dtype, device=like.device).view(like.shape)


def as_factors(solved: list[Solved], like: Tensor) -> tuple[Tensor, Tensor]:
    """The active sets, with the shape of the offsets `[*, m]`; upper Cholesky factors `[*, m, m]`, else identity."""
    m = like.shape[-1]
    active = [[False] * m for _ in solved]
    upper = [[[float(i == j) for j in range(m)] for i in range(m)] for _ in solved]
    for found, row, one in zip(upper, active, solved, strict=True):
        for j, numbers in zip(one.active, one.factor, strict=True):
            row[j] = True
            for i, x in zip(one.active, numbers, strict=False):
                found[i][j] = x
    kept = torch.tensor(upper, dtype=like.dtype, device=like.device).view(*like.shape, m)
    return torch.tensor(active, device=like.device).view(like.shape), kept


def _solve(
    M: list[list[float]],
    q: list[float],
    free: list[int],
    factors: dict[tuple[int, ...], _Factor | None],
    tolerance: float,
) -> Solved | None:
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
        s = _multipliers(factor, [q[j] for j in active])
        wrong = [j for j, x in zip(active, s) if x < -tolerance]  # noqa: B905
        for j in free:
            if j not in key:
                row, w = M[j], q[j]
                for i, x in zip(active, s):  # noqa: B905
                    w += row[i] * x
                if w < -tolerance:
                    wrong.append(j)
        if not wrong:
            return Solved(active, s, factor)
        active = sorted(set(active).symmetric_difference(wrong))
    return None


def _cholesky(M: list[list[float]], active: list[int]) -> _Factor | None:
    """The rows of the lower factor of `M_FF`; `None` where a pivot is small."""
    factor: _Factor = []
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


def _multipliers(factor: _Factor, x: list[float]) -> list[float]:
    """`-(M_FF)^-1 x`, given the lower factor; x is overwritten."""
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
    return [-y for y in x]
