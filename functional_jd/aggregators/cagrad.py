"""CAGrad: the direction near the mean of the rows that maximises the smallest gain."""

import torch
from torch import Tensor

from functional_jd.aggregation import Aggregator, Gramian, Weights, equal_weights, gramian, runs_on_host, stateless
from functional_jd.core.arguments import NOT_NEGATIVE, Number, number
from functional_jd.core.safe import cosines
from functional_jd.solvers.search import Solver
from functional_jd.solvers.worst_gain import worst_gain_multipliers

# A float64 Gramian cannot tell a mean from zero below this: its squared norm relative to the squared mean norm.
_VANISHING = 1e-14
# Below this radius the change of the mean is proportional to the radius, to rounding.
_LEAST_RADIUS = 1e-8


def cagrad(c: Number, *, solver: Solver = "host") -> Aggregator:
    """Maximise the smallest gain in a ball around the mean of the rows.

    `direction = argmax { min_i <g_i, d> : |d - g_0| <= c |g_0| }`, g_0 the mean. In terms of the unit rows that is
    `d = g_0 + |g_0| sum_j v_j n_j` with `v >= 0` of length c: so `weights = 1 / m + |g_0| v / norms`.

    Args:
        c: radius of the ball relative to the norm of its centre: 0 gives the mean; below 1 the mean of the losses still
            decreases; larger values approach the direction of `mgda`. Finite, not negative. A number or a
            tensor `[]`. The paper uses 0.4 and 0.5.
        solver: off the CPU, the `"host"` searches, or the `"device"`, in a fixed number of steps without a wait.

    Returns:
        A rule that needs the Gramian (no gradients for the number 0). Weights `[m]`, float64, at least `1 / m`, or all
        0; not unique where rows are dependent. Twice differentiable with respect to the Gramian and to c, where the set
        of rows with the smallest gain does not change.

    Guarantees:
        `|direction - g_0| = c |g_0|`, to 1e-12 (to `4e-16 / r^2` where rows nearly cancel, `|g_0|` being r times the
        mean norm), except where all weights are 0: for a mean of zero, within 1e-7 of the mean norm, and for a
        stationary Jacobian (a convex combination of the unit rows is zero within 1e-6, or a row is zero), if the
        largest possible smallest gain is 0; if it is negative, because `c < 1`, the formula holds.
        Homogeneous in the Jacobian. For `c >= 1` it never conflicts. A non-finite Gramian gives NaN weights.

    Source:
        Liu, Liu, Jin, Stone & Liu, Conflict-averse gradient descent for multi-task learning, NeurIPS 2021,
        arXiv 2110.14048, equation 3; algorithm 1.

    Differences:
        Exact, where the reference code minimises the dual with a tolerance, and treats short Jacobians as stationary.
        The best directions of a stationary Jacobian are not unique: the paper divides 0 by 0 there.
    """
    c = number("c", c, NOT_NEGATIVE, "The paper uses 0.4 and 0.5.")
    on_host = runs_on_host(solver, c)
    if not isinstance(c, Tensor) and c == 0:
        return stateless(equal_weights, lambda weights: weights)
    radius = c.clamp(min=_LEAST_RADIUS) if isinstance(c, Tensor) else max(c, _LEAST_RADIUS)

    def weigh(G: Gramian) -> Weights:
        C, norms = cosines(G)
        is_zero, m = G.diagonal() == 0, len(G)
        vanishing = G.sum() <= _VANISHING * torch.where(is_zero, 0, norms).sum() ** 2
        mean_norm = torch.where(vanishing, norms.sum() ** 2, G.sum()).sqrt() / m
        shortest = torch.where(is_zero, norms.amax(), norms).amin().detach()
        sizes = torch.where(is_zero, 1, shortest / norms)
        v = worst_gain_multipliers(C, G.sum(1) / m / mean_norm / norms, sizes, radius, solver)
        degenerate = vanishing | (v == 0).all()
        return torch.where(degenerate, 0 * v, 1 / m + c / radius * mean_norm * v / norms)

    return stateless(gramian, weigh, on_host=on_host)
