"""Constant: weights given by the user."""

from functional_jd.aggregation.aggregate import Aggregator
from functional_jd.aggregation.hyper_parameters import Numbers, per_objective
from functional_jd.aggregation.lifts import stateless
from functional_jd.aggregation.views import no_gradients


def constant(weights: Numbers) -> Aggregator:
    """The sum of the rows with given weights: the direction of ordinary training on weighted losses.

    `weights_i = given_i`

    Args:
        weights: `[m]`, one per objective in the order of `objective_names(losses)`, which sorts the keys of a dict;
            floating-point; any sign, not normalised. Copied: later changes to the tensor have no effect. Keep it on the
            Jacobian's device, else every call copies it there.

    Returns:
        A rule that needs no gradients: a step costs one weighted backward pass. Its weights are float64 and
        differentiable with respect to `weights`.

    Guarantees:
        Linear in the Jacobian and in the weights; `constant([1/m] * m) = mean()`.
    """
    return stateless(no_gradients, per_objective("weights", weights, domain=None))
