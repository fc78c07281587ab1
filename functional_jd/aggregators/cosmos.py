"""COSMOS: a weighted sum of the losses that asks them to keep the proportions of the weights."""

import torch
from torch import Tensor

from functional_jd.aggregation.aggregate import Aggregator
from functional_jd.aggregation.lifts import scalarized
from functional_jd.aggregation.per_objective import PREFERENCES, Numbers, per_objective


def cosmos(lambda_: float, weights: Numbers) -> Aggregator:
    """Descend the weighted sum of the losses less a reward for the cosine between losses and weights.

    `s = u'L - lambda_ u'L / (|u| |L|)`

    Args:
        lambda_: the reward for a cosine of one, in the unit of the weighted losses; not negative. The paper takes 0.01
            to 8.
        weights: u `[m]`, how much each objective matters. For a whole front of solutions, draw them anew for each step
            and build the rule in the step.

    Returns:
        A rule that looks at the losses: one weighted backward pass is all it costs. Weights float64 `[m]`, of any sign;
        differentiable with respect to the losses and to `weights`.

    Raises:
        TypeError: `weights` not floating-point.
        ValueError: `lambda_` negative or not finite, `weights` negative, all zero, not finite or of another shape; at
            the call, not one per loss.

    Laws:
        `cosmos(0, u)` is `constant(u)`, and any `cosmos` is so where the losses are a multiple of the weights. What the
        reward adds is orthogonal to the losses: `weights'L = u'L`. Losses that are all zero have no cosine: weights
        NaN.

    Source:
        Ruchte & Grabocka, Scalable Pareto front approximation for deep multi-objective learning, ICDM 2021, arXiv
        2103.13392: the loss with the cosine penalty.

    Differs:
        The paper also feeds the weights to the model, which is the model's own affair.
    """
    if not 0 <= lambda_ < float("inf"):
        raise ValueError(f"cosmos: lambda_ must be finite and not negative, found {lambda_}. Use 0 for no reward.")
    u = per_objective(weights, "cosmos", "weights", PREFERENCES)
    return scalarized(lambda losses: value(losses, lambda_, u(losses)))


def value(losses: Tensor, lambda_: float, weights: Tensor) -> Tensor:
    """The number that is descended."""
    total, norm = weights @ losses, torch.linalg.vector_norm
    return total - lambda_ * total / (norm(weights) * norm(losses))
