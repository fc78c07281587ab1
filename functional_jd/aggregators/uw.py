"""Uncertainty weighting: each objective has a noise, which is learned, and counts as far as it is certain."""

from typing import NamedTuple

import torch
from torch import Tensor

from functional_jd.aggregation.aggregate import Aggregator
from functional_jd.aggregation.views import losses


class UwState(NamedTuple):
    """What uncertainty weighting remembers.

    Attributes:
        log_variances: float64 `[m]`.
    """

    log_variances: Tensor


def uw(rate: float = 0.1) -> Aggregator:
    """Divide each loss by a variance that is learned with the parameters.

    `s = sum_i (exp(-v_i) L_i + v_i) / 2`, so `weights_i = exp(-v_i) / 2`; then `v <- v - rate ds/dv`; v starts at 0.

    Args:
        rate: of the log-variances, positive. The rule learns them itself, by gradient descent, in the call that uses
            them: the optimizer need not know of them.

    Returns:
        A rule that looks at the losses: one weighted backward pass is all it costs. Weights float64 `[m]`, positive;
        differentiable with respect to losses and state.

    Raises:
        ValueError: `rate` out of range.

    Laws:
        The direction and the step of v are what gradient descent on s in both gives, from the same point. Losses that
        never change end at `exp(v) = L`, all weighted losses 1/2: so losses must be positive, else v falls for ever.
        Losses far above `2 / rate` throw v beyond its goal in the first call, from where it comes back by `rate / 2`
        per call: divide them by what they start at. Losses that are not finite give a state that is not: carry on with
        the old one.

    Source:
        Kendall, Gal & Cipolla, Multi-task learning using uncertainty to weigh losses for scene geometry and semantics,
        CVPR 2018, section 3.

    Differs:
        The paper learns v with the optimizer of the parameters; here it is plain descent, with its own rate.
    """
    if not 0 < rate < float("inf"):
        raise ValueError(f"uw: rate must be positive and finite, found {rate}. The default is 0.1.")

    def update(losses: Tensor, state: UwState) -> tuple[Tensor, UwState]:
        weights, slope = torch.func.grad(value, argnums=(0, 1))(losses, state.log_variances)
        return weights, UwState(state.log_variances - rate * slope)

    return Aggregator(losses, lambda losses: UwState(torch.zeros_like(losses)), update)


def value(losses: Tensor, log_variances: Tensor) -> Tensor:
    """The number that is descended."""
    return (torch.exp(-log_variances) * losses + log_variances).sum() / 2
