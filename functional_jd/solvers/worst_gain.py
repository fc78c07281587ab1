"""The change of a vector, within a ball, that maximises the smallest gain of the rows."""

import torch
from torch import Tensor

from functional_jd.core.safe import with_nan_of
from functional_jd.solvers.lcp import solution
from functional_jd.solvers.search import Solver, empty, matvec, opaque, per_problem, solve

# The search takes 1 to 7 steps, 14 at 64 rows of very different sizes.
_STEPS = 24
# Relative tolerance within which a length equals the radius.
_TOLERANCE = 1e-12
# A float64 Gramian cannot tell a shorter convex combination of unit rows from zero.
_NOISE = 1e-6


def worst_gain_multipliers(
    cosines: Tensor, gains: Tensor, sizes: Tensor, radius: float | Tensor, solver: Solver = "host"
) -> Tensor:
    """The multipliers of the unit rows n_j to add to a unit vector x that maximise the smallest gain within a radius.

    `argmax { min_i <n_i, x + y> / rho_i : |y| <= c }` is `y = sum_j v_j n_j` with `v >= 0`, `C v + beta >= tau rho`,
    `v'(C v + beta - tau rho) = 0` and `v'C v = c^2`; tau is the smallest gain. For a given tau this is a linear
    complementarity problem, whose `|y|` is convex in tau: Newton's method from above does not overshoot. It starts from
    an upper bound of tau that a combination of the rows gives, so that every problem has a solution, and takes longer
    steps, which are exact while the active set does not change.

    The search is constant to derivatives. Two Newton steps for v and tau follow, with the factor of its last matrix,
    that change derivatives only: they make first and second derivatives correct.

    Args:
        cosines: C, float64 `[*, m, m]`, as `cosines` returns them; the gain of a row of zeros is zero.
        gains: beta, float64 `[*, m]`: the cosines of x with the rows.
        sizes: rho, float64 `[*, m]`, positive, the largest 1; 1 for a row of zeros.
        radius: c > 0, a number, or float64 `[]` or `[*, 1]`.
        solver: as of `linear_complementarity`, which the search on the device calls 25 times.

    Returns:
        v, float64 `[*, m]`, non-negative up to rounding, NaN where C, beta or c is not finite. It is 0 where the
        largest possible smallest gain is zero because the rows are stationary (a convex combination of the unit rows is
        within 1e-6 of zero, or a row is zero): then y is not unique.

    Guarantees:
        Pure; composes with vmap, grad, jvp, compile, in c too; third derivatives are not correct.

    Source:
        Liu, Liu, Jin, Stone & Liu, Conflict-averse gradient descent, NeurIPS 2021, the dual of section 3.1; with w its
        weights on the simplex, `v ~ w / rho`.
    """
    constant = radius.detach() if isinstance(radius, Tensor) else radius
    found, tau, active, upper, solved = _opaque_search(
        cosines.detach(), gains.detach(), sizes.detach(), per_problem(constant, gains), solver=solver
    )
    v = start = torch.where(solved, found, 1)
    rho = sizes.detach()
    slope = (rho * start).sum(-1, keepdim=True)
    for _ in range(2):
        image = matvec(cosines, v)
        residual = _derivatives_of(torch.where(active, image + gains - tau * sizes, 0))
        excess = _derivatives_of((v * image).sum(-1, keepdim=True) / 2)
        if isinstance(radius, Tensor):
            excess = excess - _derivatives_of(torch.where(solved, radius, 1) ** 2 / 2)
        step = ((start * residual).sum(-1, keepdim=True) - excess) / slope
        tau = tau + step
        v = v - solve(upper.mT, torch.where(active, residual - rho * step, 0))
    return torch.where(solved, v, 0 * found)


def _search(
    cosines: Tensor, gains: Tensor, sizes: Tensor, radius: Tensor, fixed: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Multipliers `[*, m]`, tau `[*, 1]`, active set, upper Cholesky factor of its part of C, whether solved."""
    m = gains.shape[-1]
    C, beta, rho = cosines.reshape(-1, m, m), gains.reshape(-1, m), sizes.reshape(-1, m)
    c = radius.reshape(-1, 1)
    one_more, farthest, shortest, longest = 1 + c, 1 + 2 * c, c * (1 - _TOLERANCE), c * (1 + _TOLERANCE)

    def bound(v: Tensor) -> Tensor:
        """The objective of the dual: an upper bound of the smallest gain for every `v >= 0`."""
        return ((beta * v).sum(-1, keepdim=True) + c * _norm(C, v)) / (rho * v).sum(-1, keepdim=True)

    allowed = torch.ones_like(rho, dtype=torch.bool).unsqueeze(-2)
    nearest = solution(C + rho.unsqueeze(-1) * rho.unsqueeze(-2), -rho.unsqueeze(-2), allowed, fixed).squeeze(-2)
    stationary = _norm(C, nearest) <= _NOISE * nearest.sum(-1, keepdim=True)
    tau = torch.minimum(((beta + c) / rho).amin(-1, keepdim=True), torch.where(stationary, 0, bound(nearest)))
    eye = torch.eye(m, dtype=C.dtype, device=C.device)
    ridged, remaining = C + _TOLERANCE * eye, _STEPS
    jumped, least = torch.zeros_like(stationary), torch.full_like(tau, -1 / _TOLERANCE)
    while True:
        # Rows with a gain far above tau stay inactive within the radius: a large offset would only cost digits.
        offset = (beta - tau * rho).clamp(max=farthest) / one_more
        v = one_more * solution(C, offset.unsqueeze(-2), allowed, fixed).squeeze(-2)
        active = v > matvec(C, v) + beta - tau * rho
        pairs = active.unsqueeze(-1) & active.unsqueeze(-2)
        upper = torch.linalg.cholesky_ex(torch.where(pairs, ridged, eye), upper=True)[0]
        length, lower = _norm(C, v), bound(v)
        below = jumped & (length < shortest)
        running = below | ((length > longest) & (lower < tau))
        remaining -= 1
        if remaining == 0 or (not fixed and not running.any()):
            break
        # While the active set does not change, v is linear in tau: its length is the radius at the root of a quadratic.
        # A Newton step follows a jump that was too long.
        turn = (rho * solve(upper.mT, torch.where(active, rho, 0))).sum(-1, keepdim=True)
        slope, excess = (rho * v).sum(-1, keepdim=True), length**2 - c**2
        root = tau - excess / (slope + (slope**2 - turn * excess).sqrt())
        least = torch.where(below, tau, least)  # a jump was too long: another one as far would go round
        jumped = running & ~below & (root < lower) & (root - least > _TOLERANCE * least.abs())
        tau = torch.where(running, torch.where(jumped, root, lower), tau)
    total = (C.sum((-2, -1)) + beta.sum(-1)).unsqueeze(-1) + c
    solved = ~(stationary & (length < c * (1 - _TOLERANCE**0.5))) & total.isfinite()
    single = (*gains.shape[:-1], 1)
    return (
        with_nan_of(v, total).view(gains.shape),
        torch.where(solved, tau, 0).view(single),
        active.view(gains.shape),
        upper.reshape(cosines.shape).contiguous(),
        solved.view(single),
    )


def _fake(cosines: Tensor, gains: Tensor, _: Tensor, radius: Tensor) -> tuple[Tensor, ...]:
    return empty(gains), empty(radius), empty(gains, torch.bool), empty(cosines), empty(radius, torch.bool)


_opaque_search = opaque("functional_jd::worst_gain_search", _search, _fake, inputs=4)


def _derivatives_of(residual: Tensor) -> Tensor:
    """Zero, with the derivatives of the residual, whose rounding would be amplified in the null space of C."""
    return residual - residual.detach()


def _norm(cosines: Tensor, v: Tensor) -> Tensor:
    return (v * matvec(cosines, v)).sum(-1, keepdim=True).clamp(min=0).sqrt()
