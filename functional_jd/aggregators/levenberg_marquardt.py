"""Levenberg-Marquardt: natural gradients of residuals, with a damping that follows how well steps are predicted."""

from typing import NamedTuple

import torch
from torch import Tensor

from functional_jd.aggregation import Aggregator, Gramian, Weights, gramian_and_losses
from functional_jd.core.arguments import POSITIVE, Number, number
from functional_jd.core.safe import divide
from functional_jd.solvers.spectral import damped_weights


class LevenbergMarquardtState(NamedTuple):
    """The state of Levenberg-Marquardt, all float64 `[]`."""

    damping: Tensor  # the damping of the last step; before the first, that of the first
    growth: Tensor  # what the damping is multiplied by if the next step fails
    value: Tensor  # half the sum of the squared residuals before the last step
    predicted: Tensor  # how much the last step should lower it; 0 before the first


def levenberg_marquardt(damping: Number = 1e-3) -> Aggregator:
    """The damped step of Gauss and Newton for residuals r, with a damping that adapts.

    `weights = (G + lambda 1)^-1 r`, as `natural_gradient(lambda)`. With q the decrease of `|r|^2 / 2` since the last
    call by the decrease that the last step predicts, `lambda <- lambda max(1/3, 1 - (2 q - 1)^3)` for `q > 0`; else
    `lambda <- lambda nu`, `nu <- 2 nu`, where nu starts from 2 after every step with `q > 0`.

    Args:
        damping: the first damping, in the unit of a squared gradient; positive.

    Returns:
        A rule that needs the Gramian and the losses, which are the residuals. Weights of any sign; differentiable where
        q is not zero.

    Guarantees:
        The prediction is that of a step with learning rate 1 on the same residuals: take the whole batch in every step,
        and `line_search(sgd(1.0), [1.0, 0.0])`. Rate 0 takes back a step that fails, as in the classical method. With
        `sgd(1.0)` alone it stays, and a bad start may not be made good. From the second step on, the damping is between
        the rounding of the Gramian, `8 m eps` of its largest diagonal entry, and `eps^-1/2` of that entry.

    Source:
        Nielsen, Damping parameter in Marquardt's method, IMM-REP-1999-05, 1999, equation 2.5.
    """
    damping = number("damping", damping, POSITIVE, "The default is 1e-3.")

    def init(view: tuple[Gramian, Tensor]) -> LevenbergMarquardtState:
        zero = view[1].new_zeros(())  # each field is a tensor of its own, as make_fx tells them apart by identity
        return LevenbergMarquardtState(zero + damping, zero + 2, zero, zero.clone())

    def update(view: tuple[Gramian, Tensor], state: LevenbergMarquardtState) -> tuple[Weights, LevenbergMarquardtState]:
        G, r = view
        value = r @ r / 2
        is_first = state.predicted == 0
        ratio = divide(state.value - value, state.predicted, otherwise=1)
        works = ratio > 0
        shrink = (1 - (2 * torch.where(works, ratio, 1).clamp(max=1) - 1) ** 3).clamp(min=1 / 3)
        adapted = state.damping * torch.where(works, shrink, state.growth)
        largest, eps = G.detach().diagonal().amax(), torch.finfo(G.dtype).eps
        adapted = torch.where(largest > 0, adapted.minimum(largest * eps**-0.5), adapted)
        now = torch.where(is_first, state.damping, adapted.maximum(8 * len(r) * eps * largest))
        growth = torch.where(works | is_first, 2, 2 * state.growth)
        w = damped_weights(G, r, now)
        predicted = (G @ w) @ (r + now * w) / 2  # |r|^2 - |r - G w|^2 without cancellation, as r - G w = lambda w
        return w, LevenbergMarquardtState(now, growth, value, predicted)

    return Aggregator(gramian_and_losses, init, update)
