"""GradNorm: learned weights that give slowly training objectives larger weighted gradient norms."""

from typing import NamedTuple

import torch
from torch import Tensor

from functional_jd.aggregation import Aggregator, norms_and_losses
from functional_jd.core.arguments import NOT_NEGATIVE, POSITIVE, Number, number
from functional_jd.core.safe import divide, nan_unless, nonzero, with_nan_of

# Relative distance at which a norm has reached its target, well above the rounding of a mean in float64.
_BALANCED = 2.0**-40


class GradNormState(NamedTuple):
    """The state of GradNorm."""

    initial: Tensor  # float64 `[m]`: the losses at the start, the reference for progress
    logits: Tensor  # float64 `[m]`: `weights = m softmax(logits)`


def gradnorm(alpha: Number = 1.5, rate: Number = 0.025) -> Aggregator:
    """Give slowly training objectives larger weighted gradient norms, by one gradient step on the weights per call.

    `L = sum_i | N_i - mean(N) r_i^alpha |` with the weighted norms `N_i = w_i |g_i|` and the relative inverse training
    rates `r_i = q_i / mean(q)`, `q_i = loss_i / loss_i(0)`, the target constant to derivatives; `w = m softmax(s)`, `s
    <- s - rate / mean(N) dL/ds` after the weights are used; s starts at 0.

    Args:
        alpha: strength of the pull to a common rate of training; not negative, 0 for equal norms.
        rate: learning rate of the logits, dimensionless; positive.

    Returns:
        A rule that needs the norms of the rows and the losses. Weights are positive with sum m; differentiable where no
        norm equals its target.

    Guarantees:
        The first direction is `total()`. The weights do not depend on the scale of the Jacobian. The rates r do not
        depend on the unit of a loss. Norms at their targets stay there (the sign is linear within 2^-40). Losses must
        be positive at the start and not negative later: else the direction is NaN.

    Source:
        Chen, Badrinarayanan, Lee & Rabinovich, ICML 2018, arXiv 1711.02257: equations 1 and 2, algorithm 1. A softmax
        keeps the weights positive and their sum m, as in LibMTL; the paper renormalises weights that a step may have
        made negative. L is divided by mean(N), so that the rate is dimensionless. The norms are those of all
        parameters; those of the last shared layer, as in the paper: `aggregation.from_part(gradnorm(), ["layer"])`.
    """
    alpha = number("alpha", alpha, NOT_NEGATIVE, "The default is 1.5.")
    rate = number("rate", rate, POSITIVE, "The default is 0.025.")

    def update(view: tuple[Tensor, Tensor], state: GradNormState) -> tuple[Tensor, GradNormState]:
        norms, losses = view
        w = len(losses) * torch.softmax(state.logits, dim=0)
        weighted = w * norms
        relative = weighted / nonzero(weighted.mean())
        ratios = nan_unless(losses >= 0, losses) / nan_unless(state.initial > 0, state.initial)
        target = divide(ratios, ratios.mean(), otherwise=1) ** alpha  # all 1 where all losses are zero
        error = relative - target
        slopes = (error.detach() / _BALANCED).clamp(-1, 1) * relative  # the sign, linear near 0, NaN at NaN
        logits = state.logits - rate * (slopes - w / len(w) * slopes.sum())
        return with_nan_of(w, logits), GradNormState(state.initial, logits)

    start = lambda view: GradNormState(view[1], torch.zeros_like(view[1]))
    return Aggregator(norms_and_losses, start, update, takes=("gradnorm", POSITIVE))
