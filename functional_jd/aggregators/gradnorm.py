"""GradNorm: weights that learn, until objectives that lag behind have the longer weighted rows."""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from functional_jd.aggregation.aggregate import Aggregator
from functional_jd.aggregation.moving_average import row_norms
from functional_jd.aggregation.views import full_jacobian
from functional_jd.aggregation.views import losses as values_of
from functional_jd.core.safe import divide, nan_unless, nonzero, with_nan_of
from functional_jd.core.types import Jacobian, Losses

# How near to its target a norm counts as there: relative, well above what a mean of float64 numbers rounds off.
_BALANCED = 2.0**-40

_Seen = tuple[Tensor, Tensor]


class GradNormState(NamedTuple):
    """What GradNorm remembers.

    Attributes:
        initial: float64 `[m]`: the losses at the start, with which progress is compared.
        logits: float64 `[m]`: `weights = m softmax(logits)`.
    """

    initial: Tensor
    logits: Tensor


def gradnorm(alpha: float = 1.5, rate: float = 0.025) -> Aggregator:
    """Give the objectives that train slowly the longer weighted rows, by one gradient step per call on the weights.

    `L = sum_i | N_i - mean(N) r_i^alpha |` with the weighted norms `N_i = w_i |g_i|` and the relative inverse training
    rates `r_i = q_i / mean(q)`, `q_i = loss_i / loss_i(0)`, the target constant to derivatives; `w = m softmax(s)`,
    `s <- s - rate / mean(N) dL/ds` after the weights were used, from s = 0.

    Args:
        alpha: how strongly objectives are pulled to a common rate of training; not negative, 0 for equal norms.
        rate: of the logits, without unit; positive.

    Returns:
        A rule that looks at the norms of the rows and at the losses: `aggregate(rule, jacobian, state, losses=losses)`.
        Its weights, float64 `[m]`, are positive and add up to m; differentiable with respect to Jacobian, losses and
        state where no norm hits its target.

    Raises:
        ValueError: `alpha` or `rate` out of range; at the call, no losses.

    Laws:
        The first direction is `total()`. Scaling the Jacobian does not change the weights, nor does the unit of a loss
        that was the same from the start. Norms that hit their targets stay (the sign fades out within 2^-40, to hold
        against rounding); one row keeps weight 1. A row of zeros is too short, but does not pull: its weight changes
        only as the others' do. Losses must be positive at the start and not negative later: otherwise the direction is
        NaN. What is not finite gives a state that is not: carry on with the old one, as `step` does.

    Source:
        Chen, Badrinarayanan, Lee & Rabinovich, GradNorm, ICML 2018, arXiv 1711.02257: equations 1 and 2, algorithm 1.

    Differs:
        A softmax keeps the weights positive and their sum m, as in LibMTL, where the paper renormalises weights that a
        step may have made negative. L is divided by mean(N), so that the rate has no unit. The norms are those of all
        parameters that the Jacobian has, not of the last shared layer: `grouped` gives that layer alone a rule.
    """
    if not 0 <= alpha < math.inf:
        raise ValueError(f"gradnorm: alpha must be finite and not negative, found {alpha}. The default is 1.5.")
    if not 0 < rate < math.inf:
        raise ValueError(f"gradnorm: rate must be positive and finite, found {rate}. The default is 0.025.")

    def norms_and_losses(jacobian: Jacobian, *others: Jacobian, losses: Losses = None) -> _Seen:  # noqa: ARG001
        return row_norms(full_jacobian(jacobian)), values_of(jacobian, losses=losses)

    def init(seen: _Seen) -> GradNormState:
        _, losses = seen
        return GradNormState(losses, torch.zeros_like(losses))

    def update(seen: _Seen, state: GradNormState) -> tuple[Tensor, GradNormState]:
        norms, losses = seen
        w = len(losses) * torch.softmax(state.logits, dim=0)
        weighted = w * norms
        mean = weighted.mean()
        shares = weighted / nonzero(mean)
        target = _inverse_rates(losses, state.initial) ** alpha
        off = shares - target
        pulls = (off.detach() / _BALANCED).clamp(-1, 1) * shares  # a sign that is nothing at zero, and NaN at NaN
        logits = state.logits - rate * (pulls - w / len(w) * pulls.sum())
        return with_nan_of(w, logits), GradNormState(state.initial, logits)

    return Aggregator(norms_and_losses, init, update)


def _inverse_rates(losses: Tensor, initial: Tensor) -> Tensor:
    """How little every loss has sunk, beside the mean; all equal where all have reached zero."""
    left = nan_unless(losses >= 0, losses) / nan_unless(initial > 0, initial)
    return divide(left, left.mean(), otherwise=1)
