"""Soft optimal uncertainty weighting: a softmax of the inverse losses."""

import torch
from torch import Tensor

from functional_jd.aggregation import Aggregator, losses, stateless
from functional_jd.core.arguments import POSITIVE, Number, number
from functional_jd.core.safe import nan_unless


def uw_so(temperature: Number) -> Aggregator:
    """Weight each loss by a softmax of the inverse losses: `uw` at its optimum, softened.

    `weights = softmax(1 / (temperature L))`, where the losses are constants.

    Args:
        temperature: in the unit of one by a loss; positive. Larger values give more uniform weights. Tune it.

    Returns:
        A rule that needs the losses only. Weights are positive with sum one.

    Guarantees:
        The smallest loss has the largest weight. Losses must be positive: else all weights are NaN.

    Source:
        Kirchdorfer et al., 2024, arXiv 2408.07985: UW-SO.
    """
    temperature = number("temperature", temperature, POSITIVE, "Try 1 divided by the losses.")

    def weigh(values: Tensor) -> Tensor:
        return torch.softmax(1 / (temperature * nan_unless(values > 0, values)), dim=0)

    return stateless(losses, weigh)._replace(takes=("uw_so", POSITIVE))
