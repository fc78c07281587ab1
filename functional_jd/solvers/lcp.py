"""The linear complementarity problem of a positive semi-definite matrix, many right-hand sides at once."""

import warnings
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from functional_jd.solvers.by_numbers import Solved, as_factors, as_multipliers, solve_by_numbers
from functional_jd.solvers.by_products import guessed_multipliers, solve_by_products
from functional_jd.solvers.search import Solver, may_be_differentiated, opaque, solve
from functional_jd.torch_compat.slow_path import SlowPathWarning, user_level

# Added to the diagonal of matrices to factorise, with entries of order one: large enough to tell signs on dependent
# rows; the chord steps remove its effect where no pivot is below `_ILL_CONDITIONED`.
_RIDGE, _ILL_CONDITIONED = 1e-12, 1e-4
# The least ridge with which Cholesky of dependent rows succeeds, for each of the m rows.
_ROUNDING = 4 * torch.finfo(torch.float64).eps
# Tolerance of the tests for wrong signs: a few hundred roundings.
_TOLERANCE = 1e-13
# Exchanges converge within 1 to 9 rounds or not at all.
_EXCHANGES = 10
# So many times a descent goes on from a solution that is nearly within the tolerance.
_ENDS = 8
# From so many entries in all factors on, operations on tensors cost less than those on numbers, guessing the active set
# costs less than the exchanges that it saves, and products cost less than factors.
_TENSORS_FROM, _GUESSED_FROM, _PRODUCTS_FROM = 600, 12_000, 400_000
# From so many entries in all descents on, these take about a second.
_SLOW_FROM = 500_000


class _Solutions(NamedTuple):
    """The current solutions, `[b, k, m]` each; lower Cholesky factors of `M_FF`, else identity, `[b, k, m, m]`."""

    s: Tensor
    active: Tensor
    factor: Tensor
    wrong: Tensor


def linear_complementarity(
    matrix: Tensor, offset: Tensor, allowed: Tensor | None = None, solver: Solver = "host"
) -> Tensor:
    """Solve `s >= 0, M s + q >= 0, s'(M s + q) = 0` for every row q of `offset`, with `s = 0` where not allowed.

    Equivalent to `argmin_{s >= 0} s'M s / 2 + q's`. The search for the active set F = {s > 0} is constant to
    derivatives. Two chord steps `s <- s - (M_FF)^-1 (M s + q)_F` with the factor of that search follow: they refine the
    solution, and the k-th step makes the k-th derivative correct, so that first and second derivatives are those of
    `s_F = -(M_FF)^-1 q_F`. Where M_FF is singular, F stands for a largest set of independent rows of it, and the other
    entries of s are constant.

    Args:
        matrix: float64 `[*, m, m]`, symmetric positive semi-definite, entries at most of order one, such as cosines.
        offset: float64 `[*, k, m]`, of order one, such that a solution exists, as it does for any q in the range of
            `M`.
        allowed: bool `[*, k, m]`; `None` allows all.
        solver: `"host"`: the search runs on the host, and stops at convergence. `"device"`: it runs where its inputs
            stand, without a synchronization, `4 m + 44` rounds for every problem; each has its own factor, which takes
            about `70 k m^2` bytes, 10 GB for `k = m = 512`.

    Returns:
        float64 `[*, k, m]`, non-negative up to rounding. Where several s solve the problem, `M s` is the same for all
        of them. A row is NaN where `M s + q` is not finite.

    Laws:
        Pure; composes with vmap, grad, jvp, compile; third derivatives are not correct. The error e, measured as
        `(e'M e)^1/2`, is what rounding the entries of M and q explains: at most about 1e-16 times the condition number
        of the active part of M, however singular M itself, and that only where s is as large as its root. On the
        cosines of three rows of which two are opposite but for an angle, it is 2e-12 at a condition number of 1e8, 2e-7
        at 1e10, 1e-5 at 1e12, 1e-2 at 1e14; on random matrices 1e-15 at 1e8, 1e-13 at 1e10, 2e-11 at 1e12, 4e-10 at
        1e14. An eigenvalue of 1e-14 or less of the active part counts as zero.
    """
    if allowed is None:
        allowed = torch.ones_like(offset, dtype=torch.bool)
    if not may_be_differentiated(matrix, offset):
        return _opaque_solution(matrix, offset, allowed, solver=solver)
    s, active, upper, refined = _opaque_search(matrix.detach(), offset.detach(), allowed, solver=solver)
    for _ in range(2):
        residual = (s @ matrix + offset) * active
        # Where the active rows are ill-conditioned, rounding of the residual would only make s worse.
        s = s - solve(upper.mT, residual - refined * residual.detach())
    return s


def solution(matrix: Tensor, offset: Tensor, allowed: Tensor, fixed: bool) -> Tensor:
    """`linear_complementarity` without derivatives; `fixed` takes a fixed number of steps, and looks at no value."""
    few = None if fixed else _by_numbers(matrix, offset, allowed)
    if few is not None:
        return as_multipliers(few, offset)
    M, q, free = _batch(matrix, offset, allowed)
    if fixed:
        s = _fixed_search(M, q, free).s
    elif q.numel() * q.shape[-1] < _PRODUCTS_FROM:
        s = _chord_steps(M, q, *_factored(M, q, free))
    else:
        s, _ = _by_products(M, q, free)
    return _with_nan(M, q, s).view(offset.shape)


def _search(matrix: Tensor, offset: Tensor, allowed: Tensor, fixed: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Multipliers, active set, upper Cholesky factors `[*, k, m, m]` of its part of M; whether refined, `[*, 1, 1]`."""
    m = offset.shape[-1]
    few = None if fixed else _by_numbers(matrix, offset, allowed)
    if few is not None:
        return as_multipliers(few, offset), *as_factors(few, offset), offset.new_zeros(*offset.shape[:-2], 1, 1)
    M, q, free = _batch(matrix, offset, allowed)
    if fixed:
        (s, active, factor, _), refined = _fixed_search(M, q, free), True
    elif q.numel() * m < _PRODUCTS_FROM:
        (s, active, factor, _), refined = _factored(M, q, free)
    else:
        s, active = _by_products(M, q, free)
        (factor, _), refined = _cholesky(M, active, _RIDGE), True
        if _maybe_ill_conditioned(factor):
            factor, active = _independent(M, active)
    s = _with_nan(M, q, s).view(offset.shape)
    upper = factor.mT.contiguous().view(*offset.shape, m)
    return s, active.view(offset.shape), upper, offset.new_full((*offset.shape[:-2], 1, 1), refined)


def _solution_like(matrix: Tensor, offset: Tensor, allowed: Tensor) -> Tensor:  # noqa: ARG001
    return offset.new_empty(offset.shape)


def _search_like(
    matrix: Tensor,  # noqa: ARG001
    offset: Tensor,
    allowed: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    upper = offset.new_empty(*offset.shape, offset.shape[-1])
    refined = offset.new_empty(*offset.shape[:-2], 1, 1)
    return offset.new_empty(offset.shape), allowed.new_empty(offset.shape), upper, refined


_opaque_solution = opaque("functional_jd::complementarity_solution", solution, _solution_like)
_opaque_search = opaque("functional_jd::complementarity_search", _search, _search_like)


def _batch(matrix: Tensor, offset: Tensor, allowed: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    k, m = offset.shape[-2:]
    return matrix.contiguous().view(-1, m, m), offset.contiguous().view(-1, k, m), allowed.reshape(-1, k, m)


def _by_numbers(matrix: Tensor, offset: Tensor, allowed: Tensor) -> list[Solved] | None:
    if offset.numel() * offset.shape[-1] >= min(_TENSORS_FROM, _PRODUCTS_FROM):
        return None
    return solve_by_numbers(matrix, offset, allowed, _TOLERANCE)


def _with_nan(M: Tensor, q: Tensor, s: Tensor) -> Tensor:
    """s, but NaN where `M s + q` is not finite."""
    return torch.add(s, torch.baddbmm(q, s, M).sum(-1, keepdim=True), alpha=0)


def _factored(M: Tensor, q: Tensor, free: Tensor) -> tuple[_Solutions, bool]:
    """Solutions with one factor each, and whether they are refined."""
    if q.numel() * q.shape[-1] < _GUESSED_FROM:
        return _finished(M, q, free, _exchange(M, q, free, (q < 0) & free, _EXCHANGES))
    # A guess, which the exchange checks: half of the digits are enough.
    found = _exchange(M, q, free, guessed_multipliers(M.float(), q.float(), free) > 0, 1)
    found = _search_unsolved(
        found, M, q, free, lambda M, q, free, old: _exchange(M, q, free, old.active ^ old.wrong, _EXCHANGES)
    )
    return _finished(M, q, free, found)


def _finished(M: Tensor, q: Tensor, free: Tensor, found: _Solutions) -> tuple[_Solutions, bool]:
    """Refine where active rows are ill-conditioned or signs are wrong, and descend where they stay wrong."""
    if not _maybe_ill_conditioned(found.factor) and not found.wrong.any():
        return found, False
    found = _refined(M, q, free, found.s, found.active)
    return _search_unsolved(found, M, q, free, _descended), True


def _fixed_search(M: Tensor, q: Tensor, free: Tensor) -> _Solutions:
    """The same by the steps that the search for the hardest problem may take."""
    found = _exchange(M, q, free, (q < 0) & free, _EXCHANGES, looks=False)
    found = _refined(M, q, free, found.s, found.active, looks=False)
    new = _descended(M, q, free, found, looks=False)
    unsolved = found.wrong.any(-1, keepdim=True)
    return _where(unsolved, new, found)


def _chord_steps(M: Tensor, q: Tensor, found: _Solutions, refined: bool) -> Tensor:
    s = found.s
    for _ in range(0 if refined else 2):
        s = _chord_step(M, q, s, found.active, found.factor)
    return s


def _by_products(M: Tensor, q: Tensor, free: Tensor) -> tuple[Tensor, Tensor]:
    """Multipliers and active set, with one factor for each problem that products do not solve."""
    found = solve_by_products(M, q, free, _TOLERANCE)
    if found.solved.all():
        return found.s, found.active
    k, m = q.shape[-2:]
    problem = (~found.solved).flatten().nonzero().squeeze(-1)
    one_q, one_free, active, wrong, solved = (
        x.flatten(0, 1)[problem].unsqueeze(1) for x in (q, free, found.active, found.wrong, found.solved)
    )
    several = M[problem // k]
    exchanged = _exchange(several, one_q, one_free, active ^ wrong, _EXCHANGES)
    new, refined = _finished(several, one_q, one_free, exchanged)
    s = _chord_steps(several, one_q, new, refined)
    merged = [
        old.view(-1, m).index_copy(0, problem, torch.where(solved, old.view(-1, 1, m)[problem], x).squeeze(1))
        for old, x in ((found.s, s), (found.active, new.active))
    ]
    return merged[0].view_as(q), merged[1].view_as(q)


def _maybe_ill_conditioned(factor: Tensor) -> bool:
    return bool(factor.diagonal(dim1=-2, dim2=-1).amin() < _ILL_CONDITIONED**0.5)


def _cholesky(M: Tensor, active: Tensor, ridge: float) -> tuple[Tensor, Tensor]:
    """Lower factors `[b, k, m, m]` of `M_FF` plus the ridge, else identity; whether that failed, `[b, k, 1]`."""
    eye = torch.eye(M.shape[-1], dtype=M.dtype, device=M.device)
    ridged = torch.add(M, eye, alpha=ridge).unsqueeze(-3)
    pairs = active.unsqueeze(-1) & active.unsqueeze(-2)
    factor, info = torch.linalg.cholesky_ex(torch.where(pairs, ridged, eye))
    return factor, (info != 0).unsqueeze(-1)


def _chord_step(M: Tensor, q: Tensor, s: Tensor, active: Tensor, factor: Tensor) -> Tensor:
    return s - solve(factor, torch.where(active, torch.baddbmm(q, s, M), 0))


def _exchange(M: Tensor, q: Tensor, free: Tensor, active: Tensor, rounds: int, looks: bool = True) -> _Solutions:
    """Block principal pivoting: all entries of the wrong sign enter or leave the active set at once."""
    eye = torch.eye(M.shape[-1], dtype=M.dtype, device=M.device)
    ridged = torch.add(M, eye, alpha=_RIDGE).unsqueeze(-3)
    opposite = -q
    while True:
        pairs = active.unsqueeze(-1) & active.unsqueeze(-2)
        factor = torch.linalg.cholesky_ex(torch.where(pairs, ridged, eye))[0]
        s = solve(factor, opposite * active)
        wrong = (torch.where(active, s, torch.baddbmm(q, s, M)) < -_TOLERANCE) & free
        rounds -= 1
        if rounds == 0 or (looks and not wrong.any()):
            return _Solutions(s, active, factor, wrong)
        active = active ^ wrong


def _search_unsolved(
    found: _Solutions,
    M: Tensor,
    q: Tensor,
    free: Tensor,
    search: Callable[[Tensor, Tensor, Tensor, _Solutions], _Solutions],
) -> _Solutions:
    """Search again where signs are wrong, those problems only."""
    if not found.wrong.any():
        return found
    k, m = q.shape[-2:]
    problem = found.wrong.any(-1).flatten().nonzero().squeeze(-1)
    old = [x.flatten(0, 1) for x in found]
    one_q, one_free = (x.reshape(-1, 1, m)[problem] for x in (q, free))
    new = search(M[problem // k], one_q, one_free, _Solutions(*(x[problem].unsqueeze(1) for x in old)))
    merged = [x.index_copy(0, problem, y.squeeze(1)) for x, y in zip(old, new, strict=True)]
    return _Solutions(*(x.view_as(y) for x, y in zip(merged, found, strict=True)))


def _refined(
    M: Tensor, q: Tensor, free: Tensor, s: Tensor, active: Tensor, chords: int = 2, looks: bool = True
) -> _Solutions:
    """Multipliers refined on independent rows of the active set, which becomes those; the others keep theirs.

    On dependent rows, chord steps would divide rounding by the ridge.
    """
    factor, independent = _independent(M, active, looks)
    for _ in range(chords):
        s = _chord_step(M, q, s, independent, factor)
    w = torch.baddbmm(q, s, M)
    tolerance = _TOLERANCE * (1 + s.abs().sum(-1, keepdim=True))
    wrong = (torch.where(active, s, w) < -tolerance) | (active & ~independent & (w.abs() > tolerance))
    return _Solutions(s, independent, factor, wrong & free)


def _independent(M: Tensor, active: Tensor, looks: bool = True) -> tuple[Tensor, Tensor]:
    """The Cholesky factor of `M_FF` for a largest set F of independent rows of the active set, and F."""
    m = M.shape[-1]
    ridge = m * _ROUNDING
    factor, _ = _cholesky(M, active, ridge)
    eye = torch.eye(m, dtype=M.dtype, device=M.device)
    # Entry i is an upper bound of the least eigenvalue of the first rows up to i, the ridge if these are dependent.
    least = 1 / torch.linalg.solve_triangular(factor, eye.expand_as(factor), upper=False).square().sum(-1)
    independent = active & (least > 4 * ridge)
    if not (looks and torch.equal(independent, active)):
        factor, _ = _cholesky(M, independent, ridge)
    return factor, independent


def _descended(M: Tensor, q: Tensor, free: Tensor, old: _Solutions, looks: bool = True) -> _Solutions:
    """The end of a descent; where that does not converge, it or the old solution, by the smaller error bound."""
    if looks and M.numel() >= _SLOW_FROM:
        _warn_of_descents(len(M), M.shape[-1])
    new = _refined(M, q, free, *_descend(M, q, free, old, looks), chords=0, looks=looks)
    worse = _error_bound(M, q, free, new.s) > _error_bound(M, q, free, old.s)
    return _where(new.wrong.any(-1, keepdim=True) & worse, old, new)


def _warn_of_descents(problems: int, m: int) -> None:
    warnings.warn(
        f"{problems} projections on the dual cone of {m} rows that nearly depend on one another, as residuals at "
        f"neighbouring points do, are searched one by one, which may take seconds. "
        "Of the rules, upgrad projects every row, dualproj one vector; for residuals take natural_gradient, "
        "levenberg_marquardt or losses that are their means.",
        SlowPathWarning,
        stacklevel=user_level(),
    )


def _where(picked: Tensor, left: _Solutions, right: _Solutions) -> _Solutions:
    """The solutions on the left for the problems that are picked, `[b, k, 1]`, and those on the right elsewhere."""
    pairs = zip(left, right, strict=True)
    return _Solutions(*(torch.where(picked if x.ndim == 3 else picked.unsqueeze(-1), x, y) for x, y in pairs))


def _descend(matrix: Tensor, q: Tensor, free: Tensor, old: _Solutions, looks: bool) -> tuple[Tensor, Tensor]:
    """Non-negative multipliers and the active set at the minimum of `s'M s / 2 + q's`, by a monotone active-set method.

    It walks towards the minimum on the active set. The entries that reach zero on the way leave that set; at its end,
    all entries along which the objective decreases enter it. No step increases the objective, so that no active set
    returns, as it may under exchanges, and nothing needs an interior, which the dual cone of dependent rows lacks.

    Source:
        Lawson & Hanson, Solving least squares problems, 1974, chapter 23, of which this is the variant where several
        entries enter at once.
    """
    m = matrix.shape[-1]
    # Larger multipliers come of a factorisation that failed, because rounding made the matrix indefinite.
    active = old.active & (old.s > 0) & (old.s.abs().amax(-1, keepdim=True) < 1e9)
    s = torch.where(active, old.s, 0)
    whole_s, whole_active, left = s, active, torch.arange(len(q), device=q.device)
    ends = torch.zeros_like(s[..., :1])
    # Random problems of condition number 1e12 take 40 rounds at m = 16, 60 at 32, 75 at 64.
    for _ in range(4 * m + 32):
        target, failed = (_minimum_of_part if looks else _minimum)(matrix, q, active, m * _ROUNDING)
        target = torch.where(failed, s, target)
        negative = active & (target < 0)
        length = torch.where(negative, s / (s - target), 1)
        shortest = length.amin(-1, keepdim=True)
        leaving = negative & (length <= shortest)
        arrived = ~negative.any(-1, keepdim=True)
        s = torch.where(arrived, target, torch.where(leaving, 0, torch.lerp(s, target, shortest).clamp(min=0)))
        w = torch.baddbmm(q, s, matrix)
        below = -_TOLERANCE * (1 + s.sum(-1, keepdim=True))
        # Near the tolerance of the tests, rounding may let the same entries enter for ever.
        ends = ends + (arrived & (torch.where(free & ~active, w, 0) >= 10 * below).all(-1, keepdim=True))
        enters = arrived & ~failed & free & ~active & (w < 0.1 * below) & (ends <= _ENDS)
        active = active & ~leaving | enters
        moving = (leaving | enters).flatten(1).any(-1) if looks else None
        if moving is not None and not moving.all():  # what has come to rest takes no more factors
            whole_s, whole_active = whole_s.index_copy(0, left, s), whole_active.index_copy(0, left, active)
            matrix, q, free, s, active, left, ends = (x[moving] for x in (matrix, q, free, s, active, left, ends))
            if not len(left):
                break
    s, active = whole_s.index_copy(0, left, s), whole_active.index_copy(0, left, active)
    return s, active & (s > 0)


def _minimum(M: Tensor, q: Tensor, active: Tensor, ridge: float) -> tuple[Tensor, Tensor]:
    """Multipliers at the minimum on the active set, zero elsewhere; whether its factor failed, `[b, k, 1]`."""
    factor, failed = _cholesky(M, active, ridge)
    return _chord_step(M, q, solve(factor, torch.where(active, -q, 0)), active, factor), failed


def _minimum_of_part(M: Tensor, q: Tensor, active: Tensor, ridge: float) -> tuple[Tensor, Tensor]:
    """The same, one problem for each matrix, with factors of the size of the largest active set."""
    size = max(1, int(active.sum(-1).amax()))
    entries = active.byte().sort(stable=True, descending=True)[1][..., :size]
    part = M[torch.arange(len(M), device=M.device)[:, None, None], entries.mT, entries]
    target, failed = _minimum(part, q.gather(-1, entries), active.gather(-1, entries), ridge)
    return torch.zeros_like(q).scatter(-1, entries, target), failed


def _error_bound(M: Tensor, q: Tensor, free: Tensor, s: Tensor) -> Tensor:
    """A bound on the squared error of the projection that the multipliers give."""
    s = s.clamp(min=0)
    w = torch.where(free, torch.baddbmm(q, s, M), 0)
    return (s * w.abs()).sum(-1, keepdim=True) + (-w).amax(-1, keepdim=True).clamp(min=0) * (
        1 + s.sum(-1, keepdim=True)
    )
