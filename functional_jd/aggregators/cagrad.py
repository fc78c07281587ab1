"""CAGrad: the direction near the mean of the rows that maximises the smallest gain."""

import torch
from torch import Tensor

from functional_jd.aggregation import Aggregator, Gramian, Numbers, Solver, Weights, gramian, no_gradients, preferences
from functional_jd.aggregation.hyper_parameters import runs_on_host
from functional_jd.aggregation.lifts import stateless
from functional_jd.aggregation.views import equal_weights
from functional_jd.core.arguments import NOT_NEGATIVE, Number, check_flag, number
from functional_jd.core.safe import cosines, divide
from functional_jd.solvers.worst_gain import worst_gain_multipliers

# A float64 Gramian cannot tell a mean from zero below this: its squared norm relative to the squared mean norm.
_VANISHING = 1e-14
# Below this radius the change of the mean is proportional to the radius, to rounding.
_LEAST_RADIUS = 1e-8


def cagrad(c: Number, preference: Numbers | None = None, clip: bool = False, *, solver: Solver = "host") -> Aggregator:
    """Maximise the smallest gain in a ball around the preferred combination of the rows.

    `direction = argmax { min_i <g_i, d> : |d - g_0| <= c |g_0| }`, with `g_0 = sum_i u_i g_i`. In terms of the unit
    rows that is `d = g_0 + |g_0| sum_j v_j n_j` with `v >= 0` of length c: so `weights = u + |g_0| v / norms`.

    Args:
        c: radius of the ball relative to the norm of its centre: 0 gives `constant(u)`; below 1 the preferred sum of
            the losses still decreases; larger values approach `mgda`. Not negative. The paper uses 0.4 and 0.5.
        preference: u `[m]`, not negative, one at least positive. Default: `1 / m` each.
        clip: whether no objective may get a larger share of the correction than of u: `w = min(w, u / sum(u))`, where w
            is v / norms with sum 1. The correction keeps its length `c |g_0|`.
        solver: `"host"` or `"device"`.

    Returns:
        A rule that needs the Gramian (no gradients for the number 0). Weights are at least u, or all 0; not unique for
        dependent rows. Twice differentiable where the set of rows with the smallest gain does not change.

    Guarantees:
        `|direction - g_0| = c |g_0|`, to 1e-12 (to `4e-16 / r^2` where rows nearly cancel, `|g_0|` being r times their
        weighted norms). But all weights are 0 for g_0 within 1e-7 of zero; and if the largest possible smallest gain is
        0, since the Jacobian is stationary (a convex combination of the unit rows is zero within 1e-6, or a row is
        zero). Homogeneous. For `c >= 1` without clip it never conflicts.

    Source:
        Liu, Liu, Jin, Stone & Liu, NeurIPS 2021, arXiv 2110.14048, equation 3; algorithm 1. Preference and clip: Chen,
        Li, Chen & Lin, Reward-free alignment for conflicting objectives, ICML 2026, arXiv 2602.02495. Exact, where the
        code of the former minimises the dual with a tolerance, and treats short Jacobians as stationary.
    """
    c = number("c", c, NOT_NEGATIVE, "The paper uses 0.4 and 0.5.")
    preference_of, on_host = preferences("preference", preference), runs_on_host(solver, c)
    check_flag("clip", clip)
    if not isinstance(c, Tensor) and c == 0:
        equal = stateless(equal_weights, lambda weights: weights)
        return equal if preference is None else stateless(no_gradients, preference_of)
    radius = c.clamp(min=_LEAST_RADIUS) if isinstance(c, Tensor) else max(c, _LEAST_RADIUS)

    def weigh(G: Gramian) -> Weights:
        u, (C, norms) = preference_of(G), cosines(G)
        is_zero, square = G.diagonal() == 0, u @ G @ u
        vanishing = square <= _VANISHING * (u @ torch.where(is_zero, 0, norms)) ** 2
        length = torch.where(vanishing, (u @ norms) ** 2, square).sqrt()
        shortest = torch.where(is_zero, norms.amax(), norms).amin().detach()
        v = worst_gain_multipliers(C, G @ u / length / norms, torch.where(is_zero, 1, shortest / norms), radius, solver)
        degenerate = vanishing | (v == 0).all()
        y = _clipped(v, u, norms, C, radius) if clip else v
        return torch.where(degenerate, 0 * v, u + c / radius * length * y / norms)

    return stateless(gramian, weigh, on_host=on_host)


def _clipped(v: Tensor, u: Tensor, norms: Tensor, C: Tensor, radius: Number) -> Tensor:
    """Multipliers of unit rows, of length `radius`, whose weights have no larger share than u."""
    w = v / norms
    y = torch.minimum(divide(w, w.sum()), u / u.sum()) * norms
    square = y @ C @ y
    vanishing = square <= _VANISHING * y.sum() ** 2
    return torch.where(vanishing, 0, radius * y / torch.where(vanishing, 1, square).sqrt())
