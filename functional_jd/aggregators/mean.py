"""Mean: equal weights that sum to one."""

from functional_jd.aggregation import Aggregator, equal_weights, stateless


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
