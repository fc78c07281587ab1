"""Automatic clipping: the sum of the rows, each normalized."""

from torch import Tensor

from functional_jd.aggregation import Aggregator, Weights, norms, stateless
from functional_jd.core.arguments import POSITIVE, Number, number


def auto_clipped(gamma: Number = 0.01, max_norm: Number = 1.0) -> Aggregator:
    """The sum of the rows, each divided by its norm: clipping without a threshold to tune.

    `weights_i = max_norm / (|g_i| + gamma)`

    Args:
        gamma: norm below which rows count less than others, in the unit of a gradient; positive.
        max_norm: the norm that long rows get, positive.

    Returns:
        A rule that needs the norms of the rows.

    Guarantees:
        No row adds more than `max_norm` to the direction, whatever the others are. If gamma is small against all norms,
        the unit of the losses does not matter. Heads of `multitask` losses are not clipped.

    Source:
        Bu, Wang, Zha & Karypis, NeurIPS 2023, arXiv 2206.07136: AUTO-S, with R = `max_norm`.
    """
    gamma = number("gamma", gamma, POSITIVE, "The default is 0.01.")
    max_norm = number("max_norm", max_norm, POSITIVE, "The default is 1.")

    def weigh(lengths: Tensor) -> Weights:
        return max_norm / (lengths + gamma)

    return stateless(norms, weigh)._replace(sensitivity=max_norm)
