"""Constant: the rows count what the user says."""

from functional_jd.aggregation.aggregate import Aggregator
from functional_jd.aggregation.lifts import stateless
from functional_jd.aggregation.per_objective import Numbers, per_objective
from functional_jd.aggregation.views import no_gradients


def constant(weights: Numbers) -> Aggregator:
    """The sum of the rows with weights that are given: the direction of ordinary training on weighted losses.

    `weights_i = given_i`

    Args:
        weights: `[m]`, one per objective, floating-point; any sign, not normalised. Copied: what happens to the tensor
            afterwards is not seen. Keep it on the Jacobian's device, else every call copies it there.

    Returns:
        A rule that looks at nothing: one weighted backward pass is all it costs. Its weights are float64 and
        differentiable with respect to those given.

    Raises:
        TypeError: a tensor that is not floating-point.
        ValueError: not one-dimensional, or empty; at the call, not one weight per row.

    Laws:
        Linear in the Jacobian and in the weights; `constant([1/m] * m) = mean()`.
    """
    return stateless(no_gradients, per_objective(weights, "constant", "weights", domain=None))
