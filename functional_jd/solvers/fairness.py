"""Fair shares: positive multiples of unit rows, each gaining in inverse proportion to a power of its own share."""

import torch
from torch import Tensor

from functional_jd.core.safe import nonzero, with_nan_of
from functional_jd.solvers.search import on_host, opaque, solve, times

# Newton's search takes 5 to 10 steps on most problems, 60 where sizes are spread over 1e12 or rows are nearly opposite.
_STEPS = 80
# A relative Newton step this small leaves an error of its square, which the two chord steps outside take to rounding.
_TOLERANCE = 1e-7
# |sum of shares|^2 relative to (sum of |shares|)^2: what a Gramian in float64 cannot tell from zero, and what is taken
# for zero if the search did not end for it.
_NOISE, _DOUBT = 1e-14, 1e-8
# What Newton's matrix needs to stay positive on dependent rows; the residual has none.
_RIDGE = 1e-15


def fair_shares(cosines: Tensor, sizes: Tensor, power: float) -> Tensor:
    """Solve `C (k v) = k v^-p` for v > 0, elementwise products and powers.

    It is the point of least `y'C y / 2 - sum_i k_i^2 v_i^(1 - p) / (1 - p)`, y = k v (the logarithm at p = 1), strictly
    convex: so there is one solution at most. The search is constant to derivatives. Two chord steps with the factor of
    its last Jacobian follow: they polish, and as the k-th of them makes the k-th derivative right, first and second
    derivatives are those of the solution.

    Args:
        cosines: C, float64 `[*, m, m]`, positive semi-definite, with ones on the diagonal; a row of zeros is left out.
        sizes: k, float64 `[*, m]`, positive; only their ratios matter.
        power: p > 0.

    Returns:
        v, float64 `[*, m]`, 0 for a row of zeros, NaN where C is not finite. All are 0 where no solution exists that a
        Gramian could tell: a convex combination of the unit rows is within 1e-7 of zero (stationary), or within 1e-4
        and the search did not end. Where else it did not end, its last step, positive and finite, with derivative
        zero: for p below 0.02 or above 50 when sizes are spread over 1e4 or more.

    Laws:
        Pure; composes with vmap, grad, jvp, compile; third derivatives are not right. On a CPU the search ends as soon
        as it is done; elsewhere it takes the same steps whatever the values, and never waits for one.

    Source:
        The search treats `C (k v) = k t` and `p log v + log t = 0` apart, as primal-dual interior-point methods do:
        Wright, Primal-Dual Interior-Point Methods, SIAM 1997, chapter 1.
    """
    blank = cosines.diagonal(dim1=-2, dim2=-1) == 0
    largest = torch.where(blank, 0, sizes.detach()).amax(-1, keepdim=True)
    # A blank row stands alone, at v = 1, and is too small to count when it is asked whether the others cancel.
    k = torch.where(blank, 1e-30, sizes / nonzero(largest))
    C = cosines + torch.diag_embed(blank.to(cosines.dtype))
    found, factor, solved = _opaque_search(C.detach(), k.detach(), power)
    v = start = torch.where(solved, found, 1)
    slope = start ** ((1 + power) / 2)
    for _ in range(2):
        short = times(C, k * v) - k * v**-power
        v = v - torch.where(solved, slope / k.detach() * solve(factor, slope * short), 0)
    return torch.where(blank, 0, torch.where(solved, v, found))


def _search(cosines: Tensor, sizes: Tensor, power: float) -> tuple[Tensor, Tensor, Tensor]:
    """Shares `[*, m]`, the Cholesky factor of `S C S + p`, `S = v^((1 + p) / 2)`, and whether they solve, `[*, 1]`."""
    m = sizes.shape[-1]
    C, k = cosines.reshape(-1, m, m), sizes.reshape(-1, m)
    eye = torch.eye(m, dtype=C.dtype, device=C.device)
    ridged = C + _RIDGE * eye
    v = t = torch.ones_like(k)
    solved = torch.zeros(len(C), 1, dtype=torch.bool, device=C.device)
    least = torch.full_like(k[:, :1], torch.inf)
    for _ in range(_STEPS):
        y = k * v
        gain = times(C, y)
        clear = (y * gain).sum(-1, keepdim=True) / y.sum(-1, keepdim=True) ** 2
        least = torch.minimum(least, clear)
        stationary = clear <= _NOISE
        if on_host(C) and (solved | stationary | ~clear.isfinite()).all():
            break
        rate = (t / v).sqrt()
        factor = torch.linalg.cholesky_ex(ridged / rate.unsqueeze(-1) / rate.unsqueeze(-2) + power * eye)[0]
        apart = power * v.log() + t.log()
        dv = solve(factor, ((1 - apart) * k * t - gain) / rate) / (rate * y)
        dt = -apart - power * dv
        step = torch.maximum(dv.abs(), dt.abs()).amax(-1, keepdim=True)
        moving = step.isfinite() & ~solved & ~stationary
        # Near a stationary problem rounding ends the descent of the steps; there the gains must be seen to be right.
        right = ((gain - k * t).abs() < 0.1 * k * t).all(-1, keepdim=True)
        solved = solved | (moving & ((step < _TOLERANCE) | (right & (step < 1e-15 / clear))))
        v, t = torch.where(moving, v * _grown(dv), v), torch.where(moving, t * _grown(dt), t)
    slope = torch.where(solved, v, 1) ** ((1 + power) / 2)
    factor = torch.linalg.cholesky_ex(ridged * slope.unsqueeze(-1) * slope.unsqueeze(-2) + power * eye)[0]
    v = with_nan_of(torch.where(solved | (least > _DOUBT), v, 0), C.sum((-2, -1)).unsqueeze(-1))
    return v.view(sizes.shape), factor.view(cosines.shape), solved.view(*sizes.shape[:-1], 1)


def _fake(cosines: Tensor, sizes: Tensor, power: float) -> tuple[Tensor, Tensor, Tensor]:  # noqa: ARG001
    solved = sizes.new_empty((*sizes.shape[:-1], 1), dtype=torch.bool)
    return sizes.new_empty(sizes.shape), cosines.new_empty(cosines.shape), solved


_opaque_search = opaque("functional_jd::fair_shares_search", _search, _fake)


def _grown(relative: Tensor) -> Tensor:
    """One Newton step's factor: `1 + z` upwards and `1 / (1 - z)` downwards never lose the sign and cross any range."""
    return torch.where(relative > 0, 1 + relative.clamp(0, 1e3), 1 / (1 - relative.clamp(-1e3, 0)))
