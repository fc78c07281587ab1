"""Clipped: the sum of the rows, each shortened to a largest norm."""

import torch
from torch import Tensor

from functional_jd.aggregation import Aggregator, Weights, norms, stateless
from functional_jd.core.arguments import POSITIVE, Number, number


def clipped(max_norm: Number) -> Aggregator:
    """The sum of the rows, with those longer than `max_norm` scaled down to it: per-example clipping.

    `weights_i = min(1, max_norm / |g_i|)`

    Args:
        max_norm: the largest norm of a row, in the unit of a gradient; positive.

    Returns:
        A rule that needs the norms of the rows. Differentiable where no norm equals `max_norm`.

    Guarantees:
        No row adds more than `max_norm` to the direction, whatever the others are: the sensitivity of differential
        privacy. Equal to `total()` if all rows are short enough. `grouped` clips every group of parameters by itself.
        Heads of `multitask` losses are not clipped.

    Source:
        Abadi et al., CCS 2016, arXiv 1607.00133, algorithm 1. A private mean divides the sum by the expected size of a
        batch. Opacus adds 1e-6 to norms, and keeps the gradient of the entry `padding_idx` of an embedding, which torch
        sets to zero.
    """
    max_norm = number("max_norm", max_norm, POSITIVE, "A common value is 1.")

    def weigh(lengths: Tensor) -> Weights:
        return max_norm / torch.maximum(lengths, lengths.new_ones(()) * max_norm)

    return stateless(norms, weigh)._replace(sensitivity=max_norm)
