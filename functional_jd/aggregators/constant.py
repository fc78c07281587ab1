"""Constant: weights given by the user."""

from functional_jd.aggregation import Aggregator, Numbers, no_gradients, per_objective, stateless


def constant(weights: Numbers) -> Aggregator:
    """The sum of the rows with given weights: the direction of ordinary training on weighted losses.

    `weights_i = given_i`

    Args:
        weights: `[m]`, any sign, in the order of `objective_names(losses)`, which sorts the keys of a dict. Keep a
            tensor on the Jacobian's device, else every call copies it there.

    Returns:
        A rule that needs no gradients: a step costs one weighted backward pass.

    Guarantees:
        Linear in the Jacobian and in the weights; `constant([1/m] * m) = mean()`.
    """
    return stateless(no_gradients, per_objective("weights", weights, domain=None))
