"""Clipped: the sum of the rows, each shortened to a largest norm."""

import torch
from torch import Tensor

from functional_jd.aggregation.aggregate import Aggregator
from functional_jd.aggregation.lifts import stateless
from functional_jd.aggregation.views import norms
from functional_jd.core.arguments import POSITIVE, Number, number
from functional_jd.core.types import Weights


def clipped(max_norm: Number) -> Aggregator:
    """The sum of the rows, of which those longer than `max_norm` are scaled down to it: per-example clipping.

    `weights_i = min(1, max_norm / |g_i|)`

    Args:
        max_norm: the largest norm of a row, in the unit of a gradient; positive. A number or a tensor `[]`.

    Returns:
        A rule that needs the norms of the rows. Weights `[m]`, float64, in (0, 1]; differentiable with respect to the
        norms and `max_norm` where no norm equals `max_norm`.

    Guarantees:
        No row adds more than `max_norm` to the direction, which moves by at most that if a row is left out: the
        sensitivity of differential privacy. Equal to `total()` where all rows are short enough. Weights do not depend
        on other rows. `grouped` clips every group of parameters by itself. The heads of `multitask` losses, which
        follow no rule, are not clipped.

    Source:
        Abadi et al., Deep learning with differential privacy, CCS 2016, arXiv 1607.00133, algorithm 1.

    Differences:
        The direction is the sum, not the mean: a private mean divides by the expected size of a batch, not by the size
        that was drawn. Opacus sums too, divides by the expected size after it has added noise, and adds 1e-6 to norms.
        For an embedding with `padding_idx`, torch sets the gradient of that entry to zero, and so do rows here; those
        of Opacus keep it, in norms and sums.
    """
    max_norm = number("max_norm", max_norm, POSITIVE, "A common value is 1.")

    def weigh(lengths: Tensor) -> Weights:
        return max_norm / torch.maximum(lengths, lengths.new_ones(()) * max_norm)

    return stateless(norms, weigh)._replace(sensitivity=max_norm)
