"""SoftAdapt: larger weights for losses that rise, or fall slowest, from step to step."""

import torch
from torch import Tensor

from functional_jd.aggregation import Aggregator, losses
from functional_jd.core.arguments import NOT_NEGATIVE, Number, check_option, number
from functional_jd.core.safe import divide


def softadapt(beta: Number = 0.1, variant: str = "original") -> Aggregator:
    """Weight each loss by a softmax of its change since the last call.

    `weights = softmax(beta s)` with `s = L - L_before`. `"normalized"` divides s by `sum_i |s_i|`; `"loss_weighted"`
    multiplies the weights by the losses, and divides them by their sum.

    Args:
        beta: not negative; larger values give the losses that rise most, or fall least, more weight.
        variant: `"original"`, `"normalized"` or `"loss_weighted"`.

    Returns:
        A rule that needs the losses only. Weights sum to one. Its state is the losses of the last call.

    Guarantees:
        `"normalized"` is invariant to a common unit of the losses.

    Source:
        Heydari, Thompson & Mehmood, 2019, arXiv 1912.12355, section 3.1. The authors' code takes differences of up to
        five calls, and divides s by its sum, which may be zero.
    """
    beta = number("beta", beta, NOT_NEGATIVE, "The paper uses 0.1.")
    check_option("variant", variant, ("original", "normalized", "loss_weighted"), 'The default is "original".')

    def update(values: Tensor, before: Tensor) -> tuple[Tensor, Tensor]:
        change = values - before
        if variant == "normalized":
            change = divide(change, change.abs().sum())
        weights = torch.softmax(beta * change, dim=0)
        if variant == "loss_weighted":
            weights = divide(weights * values, weights @ values, otherwise=1 / len(values))
        return weights, values.clone()

    return Aggregator(losses, torch.clone, update)
