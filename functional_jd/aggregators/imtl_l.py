"""IMTL-L: learned scales that make all scaled losses equal."""

import torch
from torch import Tensor

from functional_jd.aggregation import Aggregator, learned_with
from functional_jd.core.arguments import POSITIVE, Number, number


def imtl_l(rate: Number = 0.1) -> Aggregator:
    """Multiply each loss by a scale that is learned with the parameters.

    `s = sum_i (exp(v_i) L_i - v_i)`, so `weights_i = exp(v_i)`; then `v <- v - rate ds/dv`; v starts at 0.

    Args:
        rate: learning rate of the log-scales, positive, for one step of gradient descent per call.

    Returns:
        A rule that needs the losses only. Weights are positive. Its state is `log_scales`, `[m]`.

    Guarantees:
        Constant losses converge to `exp(v) = 1 / L`; `uw(2 rate)` has half the weights. Losses must be positive: v
        diverges at 0, and weights are NaN below. Losses far above `1 / rate` make v overshoot, and return by `rate` per
        call: divide losses by their initial values.

    Source:
        Liu et al., Towards impartial multi-task learning, ICLR 2021: loss balance, with the exponential.
    """
    rate = number("rate", rate, POSITIVE, "The default is 0.1.")

    return learned_with("imtl_l", "log_scales", value, rate)


def value(losses: Tensor, log_scales: Tensor) -> Tensor:
    """The scalarization of the losses."""
    return (torch.exp(log_scales) * losses - log_scales).sum()
