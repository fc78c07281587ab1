"""Geometric mean: every objective falls by the same share."""

from torch import Tensor

from functional_jd.aggregation.aggregate import Aggregator
from functional_jd.aggregation.lifts import scalarized


def geometric_mean() -> Aggregator:
    """Descend the geometric mean of the losses.

    `s = (prod_i L_i)^(1/m)`, so `weights_i = s / (m L_i)`

    Returns:
        A rule that looks at the losses: one weighted backward pass is all it costs. Weights float64 `[m]`, positive;
        differentiable with respect to the losses.

    Laws:
        The unit of a loss does not matter but for the length of the direction: `L_i` times c gives the direction of
        before times `c^(1/m)`. One loss alone has weight 1. Losses must be positive: at zero and below, weights are not
        finite.

    Source:
        Chennupati, Sistu, Yogamani & Rawashdeh, MultiNet++, CVPR workshops 2019: the geometric loss strategy.
    """
    return scalarized(value)


def value(losses: Tensor) -> Tensor:
    """The number that is descended; the sum of logarithms neither overflows nor underflows as the product does."""
    return losses.log().mean().exp()
