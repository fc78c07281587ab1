"""Fair shares: positive multiples of unit rows, whose gains are inversely proportional to a power of the shares."""

import torch
from torch import Tensor

from functional_jd.core.safe import nonzero, with_nan_of
from functional_jd.solvers.search import Solver, empty, matvec, opaque, per_problem, solve

# Newton's search takes 5 to 10 steps on most problems, 60 where sizes are spread over 1e12 or rows are nearly opposite.
# The host takes up to twice the number: 120 for powers of 50 on rows that cancel.
_STEPS = 80
# Problems that take more steps than this are tested for rounding, which keeps their steps from shrinking.
_REGULAR = 10
# After a relative Newton step this small the error is its square, which the two chord steps reduce to rounding.
_TOLERANCE = 1e-7
# Relative sizes of `|sum of multiples|^2` that count as zero: always, and if the search did not converge.
_NOISE, _DOUBTFUL = 1e-14, 1e-8
# Multiples below this fraction of the sum of all are far below the rounding of every gain.
_LEAST = 1e-60
# Times the number of rows: bounds Newton's steps where rows cancel and cosines are rounding; no part of the residual.
_RIDGE = 64 * torch.finfo(torch.float64).eps


def fair_shares(cosines: Tensor, sizes: Tensor, power: float | Tensor, solver: Solver = "host") -> Tensor:
    """Solve `C (k v) = k v^-p` for v > 0, elementwise products and powers.

    It is the minimum of `y'C y / 2 - sum_i k_i^2 v_i^(1 - p) / (1 - p)`, y = k v (the logarithm at p = 1), strictly
    convex: there is at most one solution. The search is constant to derivatives. Two chord steps with the factor of its
    last Jacobian follow, which refine the solution and make first and second derivatives correct.

    Args:
        cosines: C, float64 `[*, m, m]`, positive semi-definite, with ones on the diagonal; a row of zeros is excluded.
        sizes: k, float64 `[*, m]`, positive; only their ratios matter.
        power: p > 0, a number, or float64 `[]` or `[*, 1]`.
        solver: `"host"`, or `"device"`: where its inputs stand, in 80 steps, without a synchronization.

    Returns:
        v, float64 `[*, m]`, 0 for a row of zeros, NaN where C or p is not finite. If rows are stationary (a convex
        combination of the unit rows is within 1e-6 of zero) no solution exists. All are 0 then for p <= 1, or where
        all gains `C y` vanish. For p > 1, v is where the equation holds to the rounding of `C y`. A share below 1e-60
        of the sum of all `k v` may be too large, with derivative zero. A search that did not converge gives 0 within
        1e-4 of stationary rows, else its last iterate, with derivative zero: for p above 50 and sizes 1e4 apart.

    Guarantees:
        Pure; composes with vmap, grad, jvp, compile, in p too; third derivatives are not correct.

    Source:
        The search treats `C (k v) = k t` and `p log v + log t = 0` separately, as primal-dual interior-point methods
        do: Wright, Primal-Dual Interior-Point Methods, SIAM 1997, chapter 1.
    """
    is_zero = cosines.diagonal(dim1=-2, dim2=-1) == 0
    # A row of zeros is decoupled, at v = 1, and too small to affect the test whether the others cancel.
    k = torch.where(is_zero, 1e-30, sizes / nonzero(sizes.detach().masked_fill(is_zero, 0).amax(-1, keepdim=True)))
    C = cosines + torch.diag_embed(is_zero.to(cosines.dtype))
    constant = power.detach() if isinstance(power, Tensor) else power
    found, upper, solved, rounded = _opaque_search(C.detach(), k.detach(), per_problem(constant, k), solver=solver)
    v = start = torch.where(solved, found, 1)
    size, negligible = _no_larger_than_one(start, constant), _negligible(k * start)
    for _ in range(2):
        residual = torch.where(negligible, 0, matvec(C, k * v) - k * v**-power)
        # Where the residual is rounding, only its derivatives matter.
        residual = torch.addcmul(residual, rounded, residual.detach(), value=-1)
        v = v - torch.where(solved & ~negligible, size / k.detach() * solve(upper.mT, size * residual), 0)
    return torch.where(is_zero, 0, torch.where(solved, v, found))


def _search(cosines: Tensor, sizes: Tensor, power: Tensor, fixed: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Shares `[*, m]`; the upper Cholesky factor of `S (C + p v^-(1 + p)) S`, `S = min(1, v^((1 + p) / 2))`;
    convergence, `[*, 1]`; 1 where the residual is rounding, else 0, `[*, 1]`.
    """
    m = sizes.shape[-1]
    C, k, p = cosines.reshape(-1, m, m), sizes.reshape(-1, m), power.reshape(-1, 1)
    ridged = C + m * _RIDGE * torch.eye(m, dtype=C.dtype, device=C.device)
    v = t = torch.ones_like(k)
    solved = rounded = finished = arrived = torch.zeros(len(C), 1, dtype=torch.bool, device=C.device)
    smallest = least = torch.full_like(k[:, :1], torch.inf)
    best, one_at_most = v, p <= 1
    for step in range(_STEPS if fixed else 2 * _STEPS):
        y = k * v
        gain = matvec(C, y)
        if step >= _REGULAR:
            relative = _relative_size(y, gain, p)
            smallest = torch.minimum(smallest, relative)
            error = (gain - k * v**-p).abs().amax(-1, keepdim=True) / y.sum(-1, keepdim=True)
            better = (error < least) & ~one_at_most
            best, least = torch.where(better, v, best), torch.where(better, error, least)
            finished = finished | (relative <= _NOISE)
            rounded = rounded | (~finished & _is_rounding(C, y, gain, k * v**-p))
            finished = finished | rounded
        elif step % 2:  # steps from where multiples of stationary rows cancel lead to rounding, and away again
            finished = finished | (one_at_most & (_relative_square(y, gain) <= _NOISE))
        if not fixed and finished.all():
            break
        rate = t / v
        size = rate.clamp(min=1).rsqrt()
        factor = _factor(ridged, size, rate.clamp(max=1), p)
        log_residual = p * v.log() + t.log()
        dv = size / y * solve(factor, size * ((1 - log_residual) * k * t - gain))
        dt = -log_residual - p * dv
        change = torch.maximum(dv.abs(), dt.abs()).amax(-1, keepdim=True)
        running = change.isfinite() & ~finished
        solved = solved | (running & (change < _TOLERANCE))
        # A share that is too small to matter to any gain may go on shrinking.
        seen = torch.where(_negligible(y) & (dv < 0), 0, dv.abs()).maximum(dt.abs()).amax(-1, keepdim=True)
        arrived = ~running & arrived | running & (seen < _TOLERANCE)
        v, t = torch.where(running, v * _step_factor(dv), v), torch.where(running, t * _step_factor(dt), t)
        finished = solved | ~running
    # The last iterate may have left the solution again, by rounding.
    v = torch.where(solved | rounded | arrived | least.isinf(), v, best)
    relative = _relative_size(k * v, matvec(C, k * v), p)
    solved = (solved | rounded | arrived) & (relative > _NOISE)
    start = torch.where(solved, v, 1)
    rate = (start ** -(1 + p)).clamp(max=1)
    factor = _factor(ridged, _no_larger_than_one(start, p), rate, p)
    v = torch.where(solved | (torch.minimum(smallest, relative) > _DOUBTFUL), v, 0)
    v = with_nan_of(v, C.sum((-2, -1)).unsqueeze(-1) + p)
    single = (*sizes.shape[:-1], 1)
    upper = factor.mT.contiguous().view(cosines.shape)  # the layout that compiled code expects, without a copy
    return v.view(sizes.shape), upper, solved.view(single), rounded.to(v.dtype).view(single)


def _factor(C: Tensor, size: Tensor, rate: Tensor, power: Tensor) -> Tensor:
    """The lower Cholesky factor of C with rows and columns multiplied by a size, plus `power rate` on the diagonal."""
    return torch.linalg.cholesky_ex(C * size.unsqueeze(-1) * size.unsqueeze(-2) + torch.diag_embed(rate * power))[0]


def _no_larger_than_one(v: Tensor, power: float | Tensor) -> Tensor:
    """Factors that bring the rows and columns of Newton's matrix to order one, although powers of v may overflow."""
    return (v ** ((1 + power) / 2)).clamp(max=1)


def _negligible(y: Tensor) -> Tensor:
    return y.detach() <= _LEAST * y.detach().sum(-1, keepdim=True)


def _relative_size(y: Tensor, gain: Tensor, power: Tensor) -> Tensor:
    """How large `C y` is for positive multiples y of unit rows: what tells stationary rows."""
    # For p > 1, rows that are stationary need not be all that count: it takes small gains of all rows.
    largest = gain.abs().amax(-1, keepdim=True) / y.sum(-1, keepdim=True)
    return torch.where(power > 1, largest, _relative_square(y, gain))


def _relative_square(y: Tensor, gain: Tensor) -> Tensor:
    return torch.linalg.vecdot(y, gain).unsqueeze(-1) / y.sum(-1, keepdim=True).square()


def _is_rounding(C: Tensor, y: Tensor, gain: Tensor, wanted: Tensor) -> Tensor:
    """Whether the gains are as wanted, up to the rounding of `C y`."""
    return ((gain - wanted).abs() <= (4 * torch.finfo(C.dtype).eps * matvec(C.abs(), y))).all(-1, keepdim=True)


def _fake(cosines: Tensor, sizes: Tensor, power: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return empty(sizes), empty(cosines), empty(power, torch.bool), empty(power)


_opaque_search = opaque("functional_jd::fair_shares_search", _search, _fake, inputs=3)


def _step_factor(relative: Tensor) -> Tensor:
    """The factor of a relative Newton step z: `1 + z` upwards, `1 / (1 - z)` downwards, always positive."""
    return torch.where(relative > 0, 1 + relative.clamp(0, 1e3), 1 / (1 - relative.clamp(-1e3, 0)))
