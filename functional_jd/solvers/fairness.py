"""Fair shares: positive multiples of unit rows, whose gains are inversely proportional to a power of the shares."""

import torch
from torch import Tensor

from functional_jd.core.safe import nonzero, with_nan_of
from functional_jd.solvers.search import matvec, on_host, opaque, solve

# Newton's search takes 5 to 10 steps on most problems, 60 where sizes are spread over 1e12 or rows are nearly opposite.
_STEPS = 80
# After a relative Newton step this small the error is its square, which the two chord steps reduce to rounding.
_TOLERANCE = 1e-7
# |sum of multiples|^2 relative to (sum of |multiples|)^2: what a float64 Gramian cannot tell from zero, and what is
# treated as zero if the search did not converge.
_NOISE, _DOUBTFUL = 1e-14, 1e-8
# Keeps Newton's matrix positive definite on dependent rows; it is not part of the residual.
_RIDGE = 1e-15


def fair_shares(cosines: Tensor, sizes: Tensor, power: float) -> Tensor:
    """Solve `C (k v) = k v^-p` for v > 0, elementwise products and powers.

    It is the minimum of `y'C y / 2 - sum_i k_i^2 v_i^(1 - p) / (1 - p)`, y = k v (the logarithm at p = 1), strictly
    convex: there is at most one solution. The search is constant to derivatives. Two chord steps with the factor of its
    last Jacobian follow: they refine the solution, and the k-th step makes the k-th derivative correct, so that first
    and second derivatives are those of the solution.

    Args:
        cosines: C, float64 `[*, m, m]`, positive semi-definite, with ones on the diagonal; a row of zeros is excluded.
        sizes: k, float64 `[*, m]`, positive; only their ratios matter.
        power: p > 0.

    Returns:
        v, float64 `[*, m]`, 0 for a row of zeros, NaN where C is not finite. All are 0 where a float64 Gramian shows no
        solution: a convex combination of the unit rows is within 1e-7 of zero (stationary), or within 1e-4 and the
        search did not converge. Elsewhere, a search that did not converge gives its last iterate, positive and finite,
        with derivative zero: for p below 0.02 or above 50 when sizes are spread over 1e4 or more.

    Laws:
        Pure; composes with vmap, grad, jvp, compile; third derivatives are not correct. On a CPU the search stops at
        convergence; on other devices it takes a fixed number of steps, without synchronization.

    Source:
        The search treats `C (k v) = k t` and `p log v + log t = 0` separately, as primal-dual interior-point methods
        do: Wright, Primal-Dual Interior-Point Methods, SIAM 1997, chapter 1.
    """
    is_zero = cosines.diagonal(dim1=-2, dim2=-1) == 0
    largest = torch.where(is_zero, 0, sizes.detach()).amax(-1, keepdim=True)
    # A row of zeros is decoupled, at v = 1, and too small to affect the test whether the others cancel.
    k = torch.where(is_zero, 1e-30, sizes / nonzero(largest))
    C = cosines + torch.diag_embed(is_zero.to(cosines.dtype))
    found, factor, solved = _opaque_search(C.detach(), k.detach(), power)
    v = start = torch.where(solved, found, 1)
    slope = start ** ((1 + power) / 2)
    for _ in range(2):
        residual = matvec(C, k * v) - k * v**-power
        v = v - torch.where(solved, slope / k.detach() * solve(factor, slope * residual), 0)
    return torch.where(is_zero, 0, torch.where(solved, v, found))


def _search(cosines: Tensor, sizes: Tensor, power: float) -> tuple[Tensor, Tensor, Tensor]:
    """Shares `[*, m]`, the Cholesky factor of `S C S + p`, `S = v^((1 + p) / 2)`, and convergence, `[*, 1]`."""
    m = sizes.shape[-1]
    C, k = cosines.reshape(-1, m, m), sizes.reshape(-1, m)
    eye = torch.eye(m, dtype=C.dtype, device=C.device)
    ridged = C + _RIDGE * eye
    v = t = torch.ones_like(k)
    solved = torch.zeros(len(C), 1, dtype=torch.bool, device=C.device)
    smallest = torch.full_like(k[:, :1], torch.inf)
    for _ in range(_STEPS):
        y = k * v
        gain = matvec(C, y)
        relative = (y * gain).sum(-1, keepdim=True) / y.sum(-1, keepdim=True) ** 2
        smallest = torch.minimum(smallest, relative)
        stationary = relative <= _NOISE
        if on_host(C) and (solved | stationary | ~relative.isfinite()).all():
            break
        rate = (t / v).sqrt()
        factor = torch.linalg.cholesky_ex(ridged / rate.unsqueeze(-1) / rate.unsqueeze(-2) + power * eye)[0]
        log_residual = power * v.log() + t.log()
        dv = solve(factor, ((1 - log_residual) * k * t - gain) / rate) / (rate * y)
        dt = -log_residual - power * dv
        step = torch.maximum(dv.abs(), dt.abs()).amax(-1, keepdim=True)
        running = step.isfinite() & ~solved & ~stationary
        # Near a stationary problem rounding keeps the steps from shrinking; there the gains themselves are tested.
        satisfied = ((gain - k * t).abs() < 0.1 * k * t).all(-1, keepdim=True)
        solved = solved | (running & ((step < _TOLERANCE) | (satisfied & (step < 1e-15 / relative))))
        v, t = torch.where(running, v * _step_factor(dv), v), torch.where(running, t * _step_factor(dt), t)
    slope = torch.where(solved, v, 1) ** ((1 + power) / 2)
    factor = torch.linalg.cholesky_ex(ridged * slope.unsqueeze(-1) * slope.unsqueeze(-2) + power * eye)[0]
    v = with_nan_of(torch.where(solved | (smallest > _DOUBTFUL), v, 0), C.sum((-2, -1)).unsqueeze(-1))
    return v.view(sizes.shape), factor.view(cosines.shape), solved.view(*sizes.shape[:-1], 1)


def _fake(cosines: Tensor, sizes: Tensor, power: float) -> tuple[Tensor, Tensor, Tensor]:  # noqa: ARG001
    solved = sizes.new_empty((*sizes.shape[:-1], 1), dtype=torch.bool)
    return sizes.new_empty(sizes.shape), cosines.new_empty(cosines.shape), solved


_opaque_search = opaque("functional_jd::fair_shares_search", _search, _fake)


def _step_factor(relative: Tensor) -> Tensor:
    """The factor of a relative Newton step z: `1 + z` upwards, `1 / (1 - z)` downwards, always positive."""
    return torch.where(relative > 0, 1 + relative.clamp(0, 1e3), 1 / (1 - relative.clamp(-1e3, 0)))
