"""IMTL-L: learned scales that make all scaled losses equal."""

from typing import NamedTuple

import torch
from torch import Tensor

from functional_jd.aggregation.aggregate import Aggregator
from functional_jd.aggregation.lifts import learned_with
from functional_jd.core.arguments import POSITIVE, Number, number


class ImtlLState(NamedTuple):
    """The state of IMTL-L.

    Attributes:
        log_scales: float64 `[m]`.
    """

    log_scales: Tensor


def imtl_l(rate: Number = 0.1) -> Aggregator:
    """Multiply each loss by a scale that is learned with the parameters.

    `s = sum_i (exp(v_i) L_i - v_i)`, so `weights_i = exp(v_i)`; then `v <- v - rate ds/dv`; v starts at 0.

    Args:
        rate: learning rate of the log-scales, positive; a number or a tensor `[]`. The rule itself updates them, by
            gradient descent in every call; they are not parameters of the optimizer.

    Returns:
        A rule that needs the losses only: a step costs one weighted backward pass. Weights float64 `[m]`, positive;
        differentiable with respect to losses, state and `rate`.

    Guarantees:
        The direction and the step of v are what gradient descent on s in both gives, from the same point. Constant
        losses converge to `exp(v) = 1 / L`, with all scaled losses 1. Losses must be
        positive: v diverges at 0, and weights are NaN for negative losses.
        `uw(2 rate)` has half the weights. Losses far above `1 / rate` make v overshoot in the first call, and return by
        `rate` per call: divide losses by their initial values. Non-finite losses give a non-finite state: keep the
        previous one.

    Source:
        Liu, Li, Kuang, Xue, Chen, Yang, Liao & Zhang, Towards impartial multi-task learning, ICLR 2021: loss balance,
        with the exponential for the scaling function.

    Differences:
        The paper learns v with the optimizer of the parameters; here it is gradient descent with its own rate.
    """
    rate = number("rate", rate, POSITIVE, "The default is 0.1.")

    return learned_with("imtl_l", value, ImtlLState, rate)


def value(losses: Tensor, log_scales: Tensor) -> Tensor:
    """The scalarization of the losses."""
    return (torch.exp(log_scales) * losses - log_scales).sum()
