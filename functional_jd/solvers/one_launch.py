"""Linear complementarity problems of up to 64 rows as one Triton launch: one program for each right-hand side.

It imports Triton, which comes with torch for GPUs, else with the extra `kernels`: `lcp` imports it when it launches.
"""
# Triton may be missing, and has types for Python functions only, which a kernel is not.
# pyright: basic, reportMissingImports=false, reportIndexIssue=false, reportOperatorIssue=false
# pyright: reportCallIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false

from contextlib import nullcontext

import torch
import triton
import triton.language as tl
from torch import Tensor

from functional_jd.solvers.pivoting import TOLERANCE, least_pivot

# On an H100 (triton 3.6), tableaus of 4 and 8 rows in one warp came out wrong by up to 1e-3 at condition 1e7. Those of
# 16 rows in four warps came out right.
_LEAST_SIZE = 16


def solve_in_one_launch(matrix: Tensor, offset: Tensor, allowed: Tensor, inverses: bool) -> tuple[Tensor, Tensor]:
    """Solve the problems of `linear_complementarity`, `[b, m, m]` and `[b, k, m]`, without a synchronization. Returns
    s, NaN if none was found; and the inverses of the active parts, else zero, `[b, k, m, m]`, or empty.
    """
    b, k, m = offset.shape
    s = torch.empty_like(offset, memory_format=torch.contiguous_format)
    inverse = offset.new_empty((b, k, m, m) if inverses else 0)
    size = max(_LEAST_SIZE, triton.next_power_of_2(m))
    inputs = matrix.contiguous(), offset.contiguous(), allowed.contiguous().view(torch.int8)
    # Steps that enter all rows, leave half of them, and enter the active ones again, some times over.
    numbers = m, k, 8 * m + 64, TOLERANCE, least_pivot(m)
    with torch.cuda.device(offset.device) if offset.is_cuda else nullcontext():
        _search[(b * k,)](*inputs, s, inverse, *numbers, size, inverses, num_warps=4 if size <= 32 else 8)
    return s, inverse


@triton.jit
def _search(M, Q, FREE, S, INVERSE, m, k, limit, tolerance, least, SIZE: tl.constexpr, INVERSES: tl.constexpr):
    """The method of `pivoting`. The tableau stays in registers."""
    p = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, SIZE)
    inside = i < m
    block = inside[:, None] & inside[None, :]
    places = i[:, None] * m + i[None, :]
    A = tl.load(M + (p // k) * m * m + places, mask=block, other=0.0)
    q = tl.load(Q + p * m + i, mask=inside, other=0.0)
    free = tl.load(FREE + p * m + i, mask=inside, other=0) != 0
    on_diagonal = i[:, None] == i[None, :]
    total = tl.sum(tl.sum(A, axis=1), axis=0) + tl.sum(q, axis=0)
    finite = total - total == 0.0

    T, t = A, q
    d = tl.sum(tl.where(on_diagonal, A, 0.0), axis=1)
    s = tl.zeros([SIZE], tl.float64)
    active, pending = tl.zeros([SIZE], tl.int32), tl.zeros([SIZE], tl.int32)
    refreshed, steps = 0, 0
    status = tl.where(finite, 0, 2)
    while (status == 0) & (steps < limit):
        steps += 1
        negative = (active == 1) & (t <= 0.0)
        kind = tl.max(tl.where(pending == 1, 2, tl.where(negative, 1, 0)), axis=0)
        if kind == 0:
            s = tl.where(active == 1, t, 0.0)
        enters = free & (active == 0) & (d > least) & (t < -tolerance * (1.0 + tl.sum(s, axis=0)))
        score = tl.where(enters, t, float("inf"))
        score = tl.where(kind == 1, tl.where(negative, s / tl.maximum(s - t, 1e-30), float("inf")), score)
        score = tl.where(kind == 2, tl.where(pending == 1, -d, float("inf")), score)
        best, r = tl.min(score, axis=0, return_indices=True)
        pivots = tl.where(kind == 2, best < -least, best < float("inf"))
        pending = tl.where(i == r, 0, pending)
        if kind == 1:
            s = tl.where((active == 1) & (i != r), tl.maximum(s + best * (t - s), 0.0), 0.0)
        if pivots:
            T, t, d, active = _pivoted(T, t, d, active, i, r)
        elif kind == 0:
            s, wrong, bad = _refined(A, T, q, s, active, free, d, least, tolerance)
            status = tl.where((wrong == 1) & (refreshed < 3), 0, 1 + bad)
            if status == 0:
                refreshed += 1
                s = tl.maximum(s, 0.0)
                pending, active = active, tl.zeros([SIZE], tl.int32)
                T, t = A, q
                d = tl.sum(tl.where(on_diagonal, A, 0.0), axis=1)
    # A search that did not end, or whose conditions do not hold, is no solution.
    tl.store(S + p * m + i, tl.where(status == 1, s, float("nan")), mask=inside)
    if INVERSES:
        both = (active[:, None] == 1) & (active[None, :] == 1)
        tl.store(INVERSE + p * m * m + places, tl.where(both, T, 0.0), mask=block)


@triton.jit
def _pivoted(T, t, d, active, i, r):
    """The tableau, with its diagonal d, after an exchange of entry r. It reads one column."""
    column = tl.sum(tl.where((i == r)[None, :], T, 0.0), axis=1)
    pivot = tl.sum(tl.where(i == r, d, 0.0), axis=0)
    was = tl.sum(tl.where(i == r, active, 0), axis=0)
    # Between active rows and others, a tableau is antisymmetric, else symmetric.
    new = tl.where(i == r, 1.0, tl.where(active == was, -column, column)) / pivot
    right = -tl.sum(tl.where(i == r, t, 0.0), axis=0) / pivot
    T = tl.where((i == r)[None, :], 0.0, T) + column[:, None] * new[None, :]
    T = tl.where((i == r)[:, None], new[None, :], T)
    t = tl.where(i == r, right, t + column * right)
    d = tl.where(i == r, new, d + column * new)
    return T, t, d, tl.where(i == r, 1 - active, active)


@triton.jit
def _refined(A, T, q, s, active, free, d, least, tolerance):
    """Multipliers after two chord steps by the inverse in the tableau; whether the conditions fail by the matrix, and
    whether to half of the digits: 0 or 1.
    """
    for _ in tl.static_range(2):
        residual = tl.where(active == 1, q + tl.sum(A * s[None, :], axis=1), 0.0)
        s = tl.where(active == 1, s - tl.sum(T * residual[None, :], axis=1), 0.0)
    w = q + tl.sum(A * s[None, :], axis=1)
    below = -tolerance * (1.0 + tl.sum(s, axis=0))
    wrong = tl.where(active == 1, (s < below) | (tl.abs(w) > -below), free & (d > least) & (w < below))
    bad = free & (tl.where(active == 1, tl.minimum(s, -tl.abs(w)), w) < below / tl.sqrt(tolerance))
    return s, tl.max(wrong.to(tl.int32), axis=0), tl.max(bad.to(tl.int32), axis=0)
