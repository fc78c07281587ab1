"""The linear complementarity problem of a positive semi-definite matrix, many right-hand sides at once."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from functional_jd.core.safe import with_nan_of
from functional_jd.solvers.search import matvec, on_host, opaque, solve, solve_upper

# Added to the diagonal of matrices to factorise, with entries of order one: large enough for Cholesky of dependent rows
# to succeed, small enough to resolve condition numbers of 1e12; the chord steps remove its effect.
_RIDGE = 1e-12
# Tolerance of the tests for wrong signs: a few hundred roundings.
_TOLERANCE = 1e-13
# Exchanges converge within 1 to 9 rounds or not at all; then twenty interior steps and a few exchanges, with chord
# steps before signs are tested, are faster.
_EXCHANGES, _LAST_EXCHANGES, _LAST_CHORDS, _INTERIOR_STEPS = 10, 3, 2, 20
# From this many entries in all factors on, guessing the active set costs less than the exchanges that it saves.
_GUESSED_FROM = 12_000


class _Solutions(NamedTuple):
    """The current solutions, `[b, k, m]` each; lower Cholesky factors of `M_FF`, else identity, `[b, k, m, m]`."""

    s: Tensor
    active: Tensor
    factor: Tensor
    wrong: Tensor


def linear_complementarity(
    matrix: Tensor, offset: Tensor, allowed: Tensor | None = None, *, quiet: bool = False
) -> Tensor:
    """Solve `s >= 0, M s + q >= 0, s'(M s + q) = 0` for every row q of `offset`, with `s = 0` where not allowed.

    Equivalent to `argmin_{s >= 0} s'M s / 2 + q's`. The search for the active set F = {s > 0} is constant to
    derivatives. Two chord steps `s <- s - (M_FF)^-1 (M s + q)_F` with the factor of that search follow: they refine the
    solution, and the k-th step makes the k-th derivative correct, so that first and second derivatives are those of
    `s_F = -(M_FF)^-1 q_F`.

    Args:
        matrix: float64 `[*, m, m]`, symmetric positive semi-definite, entries at most of order one, such as cosines.
        offset: float64 `[*, k, m]`, of order one, such that a solution exists, as it does for any q in the range of
            `M`.
        allowed: bool `[*, k, m]`; `None` allows all.
        quiet: whether s itself is needed, not only `M s`: in the null space of M the chord steps divide rounding by the
            ridge alone, and a third solve removes the result.

    Returns:
        float64 `[*, k, m]`, non-negative up to rounding if quiet. Where several s solve the problem, `M s` is the same
        for all of them, and unless quiet the error of s in the null space of M may be 1e-4. A row is NaN where
        `M s + q` is not finite.

    Laws:
        Pure; composes with vmap, grad, jvp, compile; third derivatives are not correct. On a CPU the search stops at
        convergence; on other devices it takes a fixed number of steps, without synchronization. The error e, measured
        as `(e'M e)^1/2`, is 1e-13 up to a condition number of 1e4 of the active part of M, however singular M itself;
        1e-12 at 1e8, 1e-9 at 1e12, 1e-4 at 1e16.
    """
    if allowed is None:
        allowed = torch.ones_like(offset, dtype=torch.bool)
    s, active, upper = _opaque_search(matrix.detach(), offset.detach(), allowed)
    found = s
    for _ in range(2):
        s = s - solve_upper(upper, torch.where(active, s @ matrix + offset, 0))
    if not quiet:
        return s
    correction = (s - found).detach()
    return s - correction + solve_upper(upper, torch.where(active, correction @ matrix.detach(), 0)).detach()


def _search(matrix: Tensor, offset: Tensor, allowed: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Multipliers, active set, upper Cholesky factors `[*, k, m, m]` of its part of M."""
    k, m = offset.shape[-2:]
    M, q = matrix.contiguous().view(-1, m, m), offset.contiguous().view(-1, k, m)
    free = allowed.reshape(-1, k, m)
    if q.numel() * m < _GUESSED_FROM:
        found = _exchange(M, q, free, (q < 0) & free, _EXCHANGES)
    else:
        found = _exchange(M, q, free, _guessed_active_set(M, q, free), 1)
        found = _search_unsolved(
            found, M, q, free, lambda M, q, free, old, wrong: _exchange(M, q, free, old ^ wrong, _EXCHANGES)
        )
    found = _search_unsolved(found, M, q, free, _interior_then_exchange)
    s = with_nan_of(found.s, torch.baddbmm(q, found.s, M).sum(-1, keepdim=True))
    upper = found.factor.mT.contiguous().view(*offset.shape, m)
    return s.view(offset.shape), found.active.view(offset.shape), upper


def _fake(matrix: Tensor, offset: Tensor, allowed: Tensor) -> tuple[Tensor, Tensor, Tensor]:  # noqa: ARG001
    upper = offset.new_empty(*offset.shape, offset.shape[-1])
    return offset.new_empty(offset.shape), allowed.new_empty(offset.shape), upper


_opaque_search = opaque("functional_jd::complementarity_search", _search, _fake)


def _exchange(M: Tensor, q: Tensor, free: Tensor, active: Tensor, rounds: int, chords: int = 0) -> _Solutions:
    """Block principal pivoting: all entries of the wrong sign enter or leave the active set at once."""
    eye = torch.eye(M.shape[-1], dtype=M.dtype, device=M.device)
    ridged = torch.add(M, eye, alpha=_RIDGE).unsqueeze(-3)
    opposite = -q
    while True:
        pairs = active.unsqueeze(-1) & active.unsqueeze(-2)
        factor = torch.linalg.cholesky_ex(torch.where(pairs, ridged, eye))[0]
        s = solve(factor, torch.where(active, opposite, 0))
        for _ in range(chords):
            s = s - solve(factor, torch.where(active, torch.baddbmm(q, s, M), 0))
        wrong = (torch.where(active, s, torch.baddbmm(q, s, M)) < -_TOLERANCE) & free
        rounds -= 1
        if rounds == 0 or (on_host(M) and not wrong.any()):
            return _Solutions(s, active, factor, wrong)
        active = active ^ wrong


def _search_unsolved(
    found: _Solutions, M: Tensor, q: Tensor, free: Tensor, search: Callable[..., _Solutions]
) -> _Solutions:
    """Search again where signs are wrong: on a CPU those problems only; on other devices all of them, then select."""
    if on_host(M) and not found.wrong.any():
        return found
    k, m = q.shape[-2:]
    unsolved = found.wrong.any(-1).flatten()
    problem = unsolved.nonzero().squeeze(-1) if on_host(M) else torch.arange(len(unsolved), device=M.device)
    old = [x.flatten(0, 1) for x in found]
    one = [x.reshape(-1, 1, m)[problem] for x in (q, free, found.active, found.wrong)]
    new = search(M[problem // k], *one)
    picked = unsolved[problem]
    merged = [
        x.index_copy(0, problem, torch.where(picked.view(-1, *[1] * (x.ndim - 1)), y.squeeze(1), x[problem]))
        for x, y in zip(old, new, strict=True)
    ]
    return _Solutions(*(x.view_as(y) for x, y in zip(merged, found, strict=True)))


def _guessed_active_set(M: Tensor, q: Tensor, free: Tensor) -> Tensor:
    """The active set after a few over-relaxed steps of the alternating direction method: one inverse, then products."""
    m = M.shape[-1]
    damping, relaxation = 0.3, 1.6
    resolvent = torch.linalg.inv_ex(M + damping * torch.eye(m, dtype=M.dtype, device=M.device))[0]
    s = dual = torch.zeros_like(q)
    for _ in range(min(8 + m // 2, 50)):
        raw = torch.lerp(s, (damping * (s - dual) - q) @ resolvent, relaxation) + dual
        s = raw.clamp(min=0) * free
        dual = raw - s
    return s > 0


def _interior_then_exchange(M: Tensor, q: Tensor, free: Tensor, *_: Tensor) -> _Solutions:
    """The interior point, or a few exchanges from its active set, whichever has the smaller error bound."""
    s, w = _interior(M, q, free)
    inside = _exchange(M, q, free, (s > w) & free, 1)._replace(s=s)
    outside = _exchange(M, q, free, (s > w) & free, _LAST_EXCHANGES, _LAST_CHORDS)
    closer = _error_bound(M, q, free, outside.s) <= _error_bound(M, q, free, inside.s)
    return _Solutions(
        torch.where(closer, outside.s, inside.s),
        torch.where(closer, outside.active, inside.active),
        torch.where(closer.unsqueeze(-1), outside.factor, inside.factor),
        torch.where(closer, outside.wrong, inside.wrong),
    )


def _interior(M: Tensor, q: Tensor, free: Tensor) -> tuple[Tensor, Tensor]:
    """Mehrotra's predictor-corrector method for s and `w = M s + q`; entries that are not free are decoupled."""
    free = free & (M.diagonal(dim1=-2, dim2=-1) > 0).unsqueeze(-2)
    eye = torch.eye(M.shape[-1], dtype=M.dtype, device=M.device)
    matrix = torch.where(free.unsqueeze(-1) & free.unsqueeze(-2), M.unsqueeze(-3), 0) + _TOLERANCE * eye
    q = torch.where(free, q, 1)
    s = torch.ones_like(q)
    w = (matvec(matrix, s) + q).clamp(min=1)
    for _ in range(_INTERIOR_STEPS):
        factor, failed = torch.linalg.cholesky_ex(matrix + torch.diag_embed(w / s))
        residual = w - matvec(matrix, s) - q
        mean = (s * w).mean(-1, keepdim=True)
        ds, dw = _newton(factor, matrix, residual, residual - w)
        length = _step_length(s, ds, w, dw)
        reached = ((s + length * ds) * (w + length * dw)).mean(-1, keepdim=True)
        ds, dw = _newton(factor, matrix, residual, residual - w + ((reached / mean) ** 3 * mean - ds * dw) / s)
        length = 0.995 * _step_length(s, ds, w, dw)
        # Further steps on a converged problem would end in NaN for matrices of rank 1, opposite and equal rows.
        running = (mean > 1e-18) & (failed == 0).unsqueeze(-1)
        s, w = torch.where(running, s + length * ds, s), torch.where(running, w + length * dw, w)
    return s * free, w


def _newton(factor: Tensor, matrix: Tensor, residual: Tensor, right: Tensor) -> tuple[Tensor, Tensor]:
    ds = solve(factor, right)
    return ds, matvec(matrix, ds) - residual


def _step_length(s: Tensor, ds: Tensor, w: Tensor, dw: Tensor) -> Tensor:
    """The longest step up to 1 at which s and w keep their signs."""
    ratios = torch.where(ds < 0, -s / ds, 1), torch.where(dw < 0, -w / dw, 1)
    return torch.minimum(*ratios).amin(-1, keepdim=True).clamp(max=1)


def _error_bound(M: Tensor, q: Tensor, free: Tensor, s: Tensor) -> Tensor:
    """A bound on the squared error of the projection that the multipliers give."""
    s = s.clamp(min=0)
    w = torch.where(free, torch.baddbmm(q, s, M), 0)
    return (s * w.abs()).sum(-1, keepdim=True) + (-w).amax(-1, keepdim=True).clamp(min=0) * (
        1 + s.sum(-1, keepdim=True)
    )
