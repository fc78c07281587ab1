"""Geometric mean: equal weights for the relative decreases of the losses."""

from torch import Tensor

from functional_jd.aggregation import Aggregator, scalarized
from functional_jd.core.arguments import POSITIVE


def geometric_mean() -> Aggregator:
    """Minimise the geometric mean of the losses.

    `s = (prod_i L_i)^(1/m)`, so `weights_i = s / (m L_i)`

    Returns:
        A rule that needs the losses only.

    Guarantees:
        The unit of a loss affects only the length of the direction: multiplying `L_i` by c multiplies it by `c^(1/m)`.
        Losses must be positive. A loss that approaches zero takes all the weight, and the others stay where they are.

    Source:
        Chennupati, Sistu, Yogamani & Rawashdeh, MultiNet++, CVPR workshops 2019.
    """
    return scalarized(value)._replace(takes=("geometric_mean", POSITIVE))


def value(losses: Tensor) -> Tensor:
    """The geometric mean by logarithms, as the product may overflow or underflow."""
    return losses.log().mean().exp()
