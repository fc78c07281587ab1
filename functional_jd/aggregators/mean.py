"""Mean: equal weights that sum to one."""

from functional_jd.aggregation.aggregate import Aggregator
from functional_jd.aggregation.lifts import stateless
from functional_jd.aggregation.views import equal_weights


def mean() -> Aggregator:
    """The mean of the rows: the direction of ordinary training on the mean of the losses.

    `weights_i = 1 / m`

    Returns:
        A rule that needs no gradients: a step costs one weighted backward pass.

    Guarantees:
        Linear in the Jacobian; `mean() = total() / m`. It conflicts with a row that the others outweigh.
    """
    return _MEAN


_MEAN = stateless(equal_weights, lambda weights: weights)
