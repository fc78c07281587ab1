"""SDMGrad: the min-norm direction near a preferred one, with gradients that two independent batches make unbiased."""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from functional_jd.aggregation.aggregate import Aggregator
from functional_jd.aggregation.per_objective import Numbers, preferences
from functional_jd.aggregation.views import cross_gramian
from functional_jd.core.safe import nonzero, sqrt_or_zero, with_nan_of
from functional_jd.solvers.simplex import simplex_projection


class SdmgradState(NamedTuple):
    """What SDMGrad remembers.

    Attributes:
        inner: float64 `[m]`: where the inner steps ended, before the preference is added.
    """

    inner: Tensor


def sdmgrad(
    rate: float = 10.0,
    momentum: float = 0.5,
    n_steps: int = 20,
    pull: float = 0.3,
    preference: Numbers | None = None,
) -> Aggregator:
    """Shorten the direction, but keep it near the preferred one.

    `weights = (w + pull u) / (1 + pull)` where w nears `argmin |(w + pull u)' J|` over the simplex by projected steps
    with momentum, `v <- momentum v + A (w + pull u)`, `w <- P(w - rate v)`. Here `A = J1 J2' / s^2`, where s is the
    mean of the roots of the diagonal (0 for what is negative) and u the preference; w starts uniform, and in later
    calls where it was.

    Args:
        rate: of the inner steps, without unit; positive.
        momentum: of the inner steps, in [0, 1); it starts anew at every call.
        n_steps: how many inner steps, at least 1.
        pull: towards the preference: 0 is the min-norm direction of all, much is the preferred one. Not negative. The
            paper calls it lambda.
        preference: u `[m]`, non-negative, finite, floating-point, at least one positive; `None` means `1 / m`.

    Returns:
        A rule that looks at `cross_gramian`: `aggregate(rule, jacobian, state, other_jacobian)`. Weights float64 `[m]`,
        in the simplex if u is; differentiable with respect to the state, the preference and both Jacobians. At the
        default rate, the steps may jump between corners of the simplex: right derivatives of them may be huge, and
        roundings may grow to the size of the direction.

    Raises:
        TypeError: a preference that is not floating-point.
        ValueError: a hyper-parameter or preference out of range; at the call, not one preference per row, or no second
            Jacobian.

    Laws:
        Scale-equivariant: the weights stay, bit by bit, when either batch is scaled by a power of four. Equal or
        opposite rows are nothing special; one row gets weight 1 (if u is one). When no objective's two gradients agree,
        the diagonal has nothing positive: there is no scale, and w stays. A Jacobian that is not finite gives weights
        and a state that are NaN: carry on with the old state, as `step` does.

    Source:
        Xiao, Ban & Ji, Direction-oriented multi-objective learning, NeurIPS 2023, arXiv 2305.18409, algorithm 1; the
        scale is that of section 6.1.

    Differs:
        Where there is no scale, the reference code divides by 1e-8 instead. The paper follows the weights on a third
        batch: `combine(third, weights)`; the direction that is returned is that of the Jacobian handed over first.
    """
    if not 0 < rate < math.inf:
        raise ValueError(f"sdmgrad: rate must be positive and finite, found {rate}. The default is 10.")
    if not 0 <= momentum < 1:
        raise ValueError(f"sdmgrad: momentum must be in [0, 1), found {momentum}. The default is 0.5.")
    if n_steps < 1:
        raise ValueError(f"sdmgrad: n_steps must be at least 1, found {n_steps}. The default is 20.")
    if not 0 <= pull < math.inf:
        raise ValueError(f"sdmgrad: pull must be finite and not negative, found {pull}. Take 0 for the min-norm point.")
    preference_for = preferences(preference, "sdmgrad")

    def init(A: Tensor) -> SdmgradState:
        return SdmgradState(torch.full_like(A[0], 1 / len(A)))

    def update(A: Tensor, state: SdmgradState) -> tuple[Tensor, SdmgradState]:
        w, u, normalised = state.inner, preference_for(A), _normalised(A)
        v = torch.zeros_like(w)
        for _ in range(n_steps):
            v = momentum * v + normalised @ (w + pull * u)
            w = simplex_projection(w - rate * v)
        return (w + pull * u) / (1 + pull), SdmgradState(w)

    return Aggregator(cross_gramian, init, update)


def _normalised(A: Tensor) -> Tensor:
    """Divided by the square of its mean norm; zero where there is none."""
    squares = A.diagonal()
    scale = sqrt_or_zero(squares, squares <= 0).mean()
    # What is not finite must not hide where there is no scale.
    return with_nan_of(torch.where(scale == 0, 0, A / nonzero(scale) ** 2), A.sum())
