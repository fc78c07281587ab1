"""Uncertainty weighting: weights inverse to learned noise variances."""

import torch
from torch import Tensor

from functional_jd.aggregation import Aggregator, learned_with
from functional_jd.core.arguments import POSITIVE, Number, number


def uw(rate: Number = 0.1) -> Aggregator:
    """Divide each loss by a variance that is learned with the parameters.

    `s = sum_i (exp(-v_i) L_i + v_i) / 2`, so `weights_i = exp(-v_i) / 2`; then `v <- v - rate ds/dv`; v starts at 0.

    Args:
        rate: learning rate of the log-variances, positive, for one step of gradient descent per call.

    Returns:
        A rule that needs the losses only. Weights are positive. Its state is `log_variances`, `[m]`.

    Guarantees:
        Constant losses converge to `exp(v) = L`. Losses must be positive: v diverges at 0, and weights are NaN below.
        Losses far above `2 / rate` make v overshoot, and return by `rate / 2` per call: divide losses by their initial
        values.

    Source:
        Kendall, Gal & Cipolla, CVPR 2018, section 3. The paper learns v with the optimizer of the parameters.
    """
    rate = number("rate", rate, POSITIVE, "The default is 0.1.")

    return learned_with("uw", "log_variances", value, rate)


def value(losses: Tensor, log_variances: Tensor) -> Tensor:
    """The scalarization of the losses."""
    return (torch.exp(-log_variances) * losses + log_variances).sum() / 2
