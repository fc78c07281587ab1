"""Automatic clipping: the sum of the rows, each normalized."""

from torch import Tensor

from functional_jd.aggregation.aggregate import Aggregator
from functional_jd.aggregation.lifts import stateless
from functional_jd.aggregation.views import norms
from functional_jd.core.arguments import POSITIVE, Number, number
from functional_jd.core.types import Weights


def auto_clipped(gamma: Number = 0.01, max_norm: Number = 1.0) -> Aggregator:
    """The sum of the rows, each divided by its norm: clipping without a threshold to tune.

    `weights_i = max_norm / (|g_i| + gamma)`

    Args:
        gamma: norm below which rows count less than others, in the unit of a gradient; positive. A number or a tensor
            `[]`.
        max_norm: the norm that long rows get, positive. A number or a tensor `[]`.

    Returns:
        A rule that needs the norms of the rows. Weights `[m]`, float64, positive; differentiable with respect to the
        norms, `gamma` and `max_norm`.

    Guarantees:
        No row adds more than `max_norm` to the direction. Rows keep the order of their norms. Weights do not depend on
        other rows. Where gamma is small against all norms, the unit of the losses does not matter. The heads of
        `multitask` losses, which follow no rule, are not clipped.

    Source:
        Bu, Wang, Zha & Karypis, Automatic clipping: differentially private deep learning made easier and stronger,
        NeurIPS 2023, arXiv 2206.07136, AUTO-S, with R = `max_norm`.
    """
    gamma = number("gamma", gamma, POSITIVE, "The default is 0.01.")
    max_norm = number("max_norm", max_norm, POSITIVE, "The default is 1.")

    def weigh(lengths: Tensor) -> Weights:
        return max_norm / (lengths + gamma)

    return stateless(norms, weigh)._replace(sensitivity=max_norm)
