"""MoDo: one projected step of the weights per call, from Jacobians on two independent batches."""

import torch
from torch import Tensor

from functional_jd.aggregation import Aggregator, cross_gramian, remembering
from functional_jd.core.arguments import NOT_NEGATIVE, POSITIVE, Number, number
from functional_jd.solvers.linear_program import simplex_projection


def modo(rate: Number = 0.1, ridge: Number = 0.1) -> Aggregator:
    """Approach the min-norm weights in the simplex by steps that two independent batches make unbiased.

    `w <- P(w - rate (A w + ridge w))`, with `A = J1 J2'` and P the projection on the simplex; w starts uniform.

    Args:
        rate: step size, in units of one over a squared gradient; positive.
        ridge: regularisation towards uniform weights, in units of a squared gradient; not negative.

    Returns:
        A rule that needs `cross_gramian`: `aggregate(rule, jacobian, state, other_jacobian)`. Weights lie in the
        simplex. Its state is the weights of the last call.

    Guarantees:
        The step is linear in each of the two batches, so that it is unbiased before its projection. On a constant
        batch, with a rate below `2 / max eigenvalue`, the weights converge to the min-norm point of `A + ridge I`. Not
        scale-equivariant, as in the paper: `rate` has a unit.

    Source:
        Chen, Fernando, Ying & Chen, Three-way trade-off, JMLR 25, 2024, equation 2.9a. The direction is that of the
        first Jacobian; the paper's is that of both batches' mean gradients or of a third batch:
        `aggregation.combine(third_jacobian, weights)`.
    """
    rate = number("rate", rate, POSITIVE, "The default is 0.1.")
    ridge = number("ridge", ridge, NOT_NEGATIVE, "Use 0 for none.")

    def update(A: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        w = simplex_projection(w - rate * (A @ w + ridge * w))
        return w, w

    return remembering("weights", cross_gramian, lambda A: torch.full_like(A[0], 1 / len(A)), update)
