"""The linear complementarity problem of a positive semi-definite matrix, many right-hand sides at once."""

import os
import warnings
from importlib.util import find_spec
from pathlib import Path
from shutil import which
from sysconfig import get_config_var

import torch
from torch import Tensor

from functional_jd.core.safe import cosines, nonzero
from functional_jd.solvers.by_numbers import solve_by_numbers
from functional_jd.solvers.by_products import guessed_multipliers, solve_by_products
from functional_jd.solvers.pivoting import TOLERANCE, solve_by_pivots
from functional_jd.solvers.search import Solver, matvec, may_be_differentiated, opaque, solve
from functional_jd.torch_compat.callers import SlowPathWarning, user_level

# Added to the diagonal of matrices to factorise, with entries of order one: large enough to tell signs on dependent
# rows. Chord steps remove its effect where no pivot is below the second.
_RIDGE, _WELL_CONDITIONED = 1e-12, 1e-4
_EXCHANGES = 10  # they converge within 1 to 9 rounds or not at all
# From so many entries in all factors on, operations on tensors cost less than those on numbers, guessing the active set
# costs less than the exchanges that it saves, and products cost less than factors.
_TENSORS_FROM, _GUESSED_FROM, _PRODUCTS_FROM = 600, 12_000, 400_000
_MOST_ROWS_OF_A_LAUNCH = 64
# The first launch of Triton on a GPU takes a compiler of C, that of CC alone if it is set, and the headers of Python.
_COMPILERS, _HEADERS = [os.environ["CC"]] if "CC" in os.environ else ["gcc", "clang"], get_config_var("INCLUDEPY") or ""
_LAUNCHES = bool(find_spec("triton") and any(map(which, _COMPILERS)) and Path(_HEADERS, "Python.h").exists())
_INTERPRETS = os.environ.get("TRITON_INTERPRET") == "1"
# From so many entries in all tableaus on, these take about a second.
_SLOW_FROM = 500_000
_SLOW = (
    "{} projections on the dual cone of {} rows that nearly depend on one another, as residuals at neighbouring points "
    "do, are searched one by one, which may take seconds. Of the rules, upgrad projects every row, dualproj one "
    "vector; for residuals take natural_gradient, levenberg_marquardt or losses that are their means."
)


def linear_complementarity(
    matrix: Tensor, offset: Tensor, allowed: Tensor | None = None, solver: Solver = "host"
) -> Tensor:
    """Solve `s >= 0, M s + q >= 0, s'(M s + q) = 0` for every row q of `offset`, with `s = 0` where not allowed.

    Equivalent to `argmin_{s >= 0} s'M s / 2 + q's`: with the cosines M of unit rows n_j and `q_j = <n_j, x>`, the point
    `x + sum_j s_j n_j` is the projection of x on the dual cone of the rows.

    The search for the active set F = {s > 0} is constant to derivatives. Two chord steps with the inverse that it found
    follow, `s <- s - (M_FF)^-1 (M s + q)_F`. They change derivatives only: the k-th step makes the k-th derivative
    correct, so that first and second derivatives are those of `s_F = -(M_FF)^-1 q_F`. F holds independent rows.

    Args:
        matrix: float64 `[*, m, m]`, symmetric positive semi-definite, entries at most of order one, such as cosines.
        offset: float64 `[*, k, m]`, of order one, such that a solution exists, as for any q in the range of `M`.
        allowed: bool `[*, k, m]`; `None` allows all.
        solver: `"host"`: the search runs on the host, and stops at convergence. `"device"`: it runs where its inputs
            stand, without a synchronization: up to 64 rows as one launch where Triton is installed, else in `8 m + 24`
            rounds, with about `50 k m^2` bytes of tableaus. `"auto"`: on a GPU as one launch if it can, else the host.

    Returns:
        float64 `[*, k, m]`, non-negative up to rounding. If several s solve the problem, `M s` is the same for all
        of them. A row is NaN where `M s + q` is not finite, or below zero by half of the digits.

    Guarantees:
        Pure; composes with vmap, grad, jvp, compile; third derivatives are not correct. The error e, measured as
        `(e'M e)^1/2`, is that of rounding the entries of M and q: at most about 1e-16 times the condition number
        of the active part of M, however singular M itself, and that only where s is as large as its root, as on
        nearly opposite rows; on random matrices 1e-15 at 1e8, 1e-13 at 1e10, 2e-11 at 1e12. An eigenvalue of 1e-14 or
        less of the active part counts as zero.
    """
    if allowed is None:
        allowed = torch.ones_like(offset, dtype=torch.bool)
    if solver == "auto":
        solver = "device" if offset.is_cuda and can_be_launched(offset) else "host"
    if not may_be_differentiated(matrix, offset):
        return _opaque_solution(matrix, offset, allowed, solver=solver)
    s, inverse = _opaque_search(matrix.detach(), offset.detach(), allowed, solver=solver)
    for _ in range(2):
        residual = s @ matrix + offset
        s = s - matvec(inverse, residual - residual.detach())
    return s


def row_multipliers(cosines: Tensor, solver: Solver = "host") -> Tensor:
    """The multipliers `[*, m, m]` for the projections of the unit rows on their dual cone: column i is for row i.

    The multiplier of row i in its own projection is 0; fixing it at 0 keeps the problem regular.
    """
    if cosines.shape[-1] == 2:  # one constraint per row: in closed form
        return (-cosines).clamp(min=0)
    own = torch.eye(cosines.shape[-1], dtype=torch.bool, device=cosines.device)
    return linear_complementarity(cosines, cosines, (~own).expand_as(cosines), solver).mT


def solution(matrix: Tensor, offset: Tensor, allowed: Tensor, fixed: bool) -> Tensor:
    """`linear_complementarity` without derivatives; `fixed` takes a fixed number of steps, and looks at no value."""
    return _search(matrix, offset, allowed, fixed, inverses=False)[0]


def _search(
    matrix: Tensor, offset: Tensor, allowed: Tensor, fixed: bool, inverses: bool = True
) -> tuple[Tensor, Tensor]:
    """Multipliers, and the inverses `[*, k, m, m]` of the active parts of M, else zero."""
    k, m = offset.shape[-2:]
    inputs = matrix.reshape(-1, m, m), offset.reshape(-1, k, m), allowed.reshape(-1, k, m)
    found, size = None, offset.numel() * m
    if fixed and can_be_launched(offset):
        from functional_jd.solvers.one_launch import solve_in_one_launch  # imports Triton

        found = solve_in_one_launch(*inputs, inverses)
    elif not (fixed or inverses) and size < min(_TENSORS_FROM, _PRODUCTS_FROM):
        s = solve_by_numbers(*inputs)
        found = None if s is None else (s, s)
    if found is None:
        if fixed:
            every = inputs[0].repeat_interleave(k, 0), inputs[1].flatten(0, 1), inputs[2].flatten(0, 1)
            s, inverse = solve_by_pivots(*every, looks=False)
            found = s.view_as(inputs[1]), inverse
        else:
            found = _by_tensors(*inputs, inverses)
        # NaN where `M s + q` is not finite.
        sums = torch.baddbmm(inputs[1], found[0], inputs[0]).sum(-1, keepdim=True)
        found = torch.add(found[0], sums, alpha=0), found[1]
    s, inverse = found
    return s.view(offset.shape), inverse.view(*offset.shape, m) if inverses else inverse


def can_be_launched(offset: Tensor) -> bool:
    """Whether Triton runs there, for so few rows on such a device; while torch.compile traces, on any GPU."""
    gpu = offset.is_cuda and _LAUNCHES
    gpu = gpu and (torch.compiler.is_compiling() or torch.cuda.get_device_capability(offset.device) >= (7, 0))
    return (gpu or _INTERPRETS) and offset.shape[-1:] <= (_MOST_ROWS_OF_A_LAUNCH,)


_opaque_solution = opaque(
    "functional_jd::complementarity_solution", solution, lambda _, q, allowed: q.new_empty(allowed.shape), inputs=3
)
_opaque_search = opaque(
    "functional_jd::complementarity_search",
    _search,
    lambda _, q, allowed: (q.new_empty(allowed.shape), q.new_empty(*q.shape, q.shape[-1])),
    inputs=3,
)


def _by_tensors(M: Tensor, q: Tensor, free: Tensor, inverses: bool) -> tuple[Tensor, Tensor]:
    """By products or exchanges where that is enough, else by pivots."""
    k, m = q.shape[-2:]
    if q.numel() * m < _PRODUCTS_FROM:
        guess = q.numel() * m >= _GUESSED_FROM
        active = guessed_multipliers(M.float(), q.float(), free) > 0 if guess else free & (q < 0)
        s, active, factor, unsolved = _exchange(M, q, free, active)
    else:
        s, active, _, solved = solve_by_products(M, q, free, TOLERANCE)
        factor, unsolved = None, ~solved
    left, inverse = unsolved, s
    if inverses:
        factor = _factor(M, active) if factor is None else factor
        inverse = (torch.cholesky_inverse(factor) * active.unsqueeze(-1)).contiguous()
        left = left | _is_doubtful(factor)
    if left.any():
        problem = left.flatten().nonzero().squeeze(-1)
        if len(problem) * m * m >= _SLOW_FROM:
            warnings.warn(_SLOW.format(len(problem), m), SlowPathWarning, stacklevel=user_level())
        new = solve_by_pivots(M[problem // k], q.flatten(0, 1)[problem], free.flatten(0, 1)[problem])
        s = torch.where(unsolved, s.flatten(0, 1).index_copy(0, problem, new[0]).view_as(s), s)
        if inverses:
            inverse = inverse.flatten(0, 1).index_copy(0, problem, new[1]).view_as(inverse)
    return s, inverse


def _exchange(M: Tensor, q: Tensor, free: Tensor, active: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Block principal pivoting: all entries of the wrong sign enter or leave the active set at once.

    Returns:
        Multipliers, active sets, factors as `_factor` returns them, and whether pivots are needed, `[b, k, 1]`.
    """
    remaining = _EXCHANGES
    while True:
        factor = _factor(M, active)
        s = solve(factor, torch.where(active, -q, 0))
        wrong = (torch.where(active, s, torch.baddbmm(q, s, M)) < -TOLERANCE) & free
        remaining -= 1
        if remaining == 0 or not wrong.any():
            break
        active = active ^ wrong
    s = s - solve(factor, torch.where(active, torch.baddbmm(q, s, M), 0))
    return s, active, factor, _is_doubtful(factor) | wrong.any(-1, keepdim=True)


def _factor(M: Tensor, active: Tensor) -> Tensor:
    """Lower Cholesky factors `[b, k, m, m]` of `M_FF` plus a ridge, else identity."""
    eye = torch.eye(M.shape[-1], dtype=M.dtype, device=M.device)
    pairs = active.unsqueeze(-1) & active.unsqueeze(-2)
    return torch.linalg.cholesky_ex(torch.where(pairs, torch.add(M, eye, alpha=_RIDGE).unsqueeze(-3), eye))[0]


def _is_doubtful(factor: Tensor) -> Tensor:
    return factor.diagonal(dim1=-2, dim2=-1).amin(-1, keepdim=True) < _WELL_CONDITIONED**0.5


def projected(u: Tensor, G: Tensor, allowed: Tensor, solver: Solver) -> Tensor:
    """Weights of the point nearest to `J'u` that conflicts with no row where `allowed` `[1, m]` holds."""
    C, norms = cosines(G)
    lengths = torch.where(G.diagonal() == 0, 0, norms) * u
    # The multipliers are linear in x: a factor that is constant to derivatives brings it to order one.
    size = nonzero(lengths.detach().abs().sum())
    s = linear_complementarity(C, (C @ (lengths / size)).unsqueeze(0), allowed, solver=solver).squeeze(0)
    return u + size * s / norms
