"""COSMOS: a weighted sum of the losses, with a reward for losses proportional to the weights."""

import torch
from torch import Tensor

from functional_jd.aggregation import PREFERENCES, Aggregator, Numbers, per_objective, scalarized_with
from functional_jd.core.arguments import NOT_NEGATIVE, Number, number
from functional_jd.core.safe import order_of


def cosmos(lambda_: Number, weights: Numbers) -> Aggregator:
    """Minimise the weighted sum of the losses minus a reward for the cosine between losses and weights.

    `s = u'L - lambda_ u'L / (|u| |L|)`

    Args:
        lambda_: the reward for a cosine of one, in the unit of the weighted losses; not negative. Paper: 0.01 to 8.
        weights: u `[m]`, the importance of each objective. For a whole front, draw new weights in every step.

    Returns:
        A rule that needs the losses only. Weights of any sign.

    Guarantees:
        Equal to `constant(u)` for `lambda_` 0, and if the losses are a multiple of the weights. `weights'L = u'L`.
        Losses that are all zero give NaN weights.

    Source:
        Ruchte & Grabocka, ICDM 2021, arXiv 2103.13392. The paper also passes the weights to the model.
    """
    reward = number("lambda_", lambda_, NOT_NEGATIVE, "Use 0 for no reward.")
    u = per_objective("weights", weights, PREFERENCES)
    return scalarized_with(lambda losses, u: value(losses, reward, u), u)


def value(losses: Tensor, lambda_: Number, weights: Tensor) -> Tensor:
    """The scalarization of the losses."""
    total, ray, point = weights @ losses, weights / order_of(weights), losses / order_of(losses)
    return total - lambda_ * (ray @ point) / (torch.linalg.vector_norm(ray) * torch.linalg.vector_norm(point))
