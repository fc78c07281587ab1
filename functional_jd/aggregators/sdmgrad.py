"""SDMGrad: the min-norm direction near a preferred one, from Jacobians on two independent batches."""

import torch
from torch import Tensor

from functional_jd.aggregation import Aggregator, Numbers, Solver, cross_gramian, preferences, remembering, runs_on_host
from functional_jd.core.arguments import BELOW_1, NOT_NEGATIVE, POSITIVE, Number, check_integer, number
from functional_jd.core.safe import nonzero, sqrt_or_zero, with_nan_of
from functional_jd.solvers.linear_program import simplex_projection


def sdmgrad(
    rate: Number = 10.0,
    momentum: Number = 0.5,
    n_steps: int = 20,
    pull: Number = 0.3,
    preference: Numbers | None = None,
    *,
    solver: Solver = "host",
) -> Aggregator:
    """Minimise the norm of the direction, with a pull towards the preferred one.

    `weights = (w + pull u) / (1 + pull)` where w approaches `argmin |(w + pull u)' J|` over the simplex by projected
    steps with momentum, `v <- momentum v + A (w + pull u)`, `w <- P(w - rate v)`. Here `A = J1 J2' / s^2`, where s is
    the mean of the roots of the diagonal (0 for negative entries) and u the preference; w starts uniform and continues
    from the previous call.

    Args:
        rate: size of the inner steps, dimensionless; positive.
        momentum: of the inner steps, in [0, 1); v starts at 0 in every call.
        n_steps: number of inner steps, at least 1.
        pull: weight of the preference, the paper's lambda: 0 gives the min-norm direction. Not negative.
        preference: u `[m]`, not negative, one at least positive. Default: `1 / m` each.
        solver: `"host"` or `"device"`.

    Returns:
        A rule that needs `cross_gramian`: `aggregate(rule, jacobian, state, other_jacobian)`. Weights lie in the
        simplex if u does. Its state is w. At the default rate, steps may jump between its corners: derivatives, and
        rounding, may be huge.

    Guarantees:
        The weights stay the same, bit for bit, when either batch is scaled by a power of four. If the diagonal has no
        positive entry, since every objective's two gradients conflict, then s is 0 and w does not change.

    Source:
        Xiao, Ban & Ji, NeurIPS 2023, arXiv 2305.18409, algorithm 1; the scale is that of section 6.1. If s is 0, the
        authors' code divides by 1e-8 instead. The direction is that of the first Jacobian; the paper's is that of a
        third batch: `aggregation.combine(third_jacobian, weights)`.
    """
    rate = number("rate", rate, POSITIVE, "The default is 10.")
    momentum = number("momentum", momentum, BELOW_1, "The default is 0.5.")
    check_integer("n_steps", n_steps, 1, "The default is 20.")
    pull = number("pull", pull, NOT_NEGATIVE, "Use 0 for the min-norm point.")
    preference_of = preferences("preference", preference)

    def update(A: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        u, normalised = preference_of(A), _normalised(A)
        v = torch.zeros_like(w)
        for _ in range(n_steps):
            v = momentum * v + normalised @ (w + pull * u)
            w = simplex_projection(w - rate * v)
        return (w + pull * u) / (1 + pull), w

    start = lambda A: torch.full_like(A[0], 1 / len(A))
    return remembering("inner", cross_gramian, start, update, runs_on_host(solver, rate, momentum, pull))


def _normalised(A: Tensor) -> Tensor:
    """`A / s^2`, and zeros where s is 0."""
    squares = A.diagonal()
    scale = sqrt_or_zero(squares, squares <= 0).mean()
    # Zeros must not hide that A is not finite.
    return with_nan_of(torch.where(scale == 0, 0, A / nonzero(scale) ** 2), A.sum())
