"""Smooth Tchebycheff: a smooth maximum of the weighted losses."""

import torch
from torch import Tensor

from functional_jd.aggregation import Aggregator, Numbers, per_objective, preferences, scalarized_with
from functional_jd.core.arguments import POSITIVE, Number, number


def stch(mu: Number = 1.0, weights: Numbers | None = None, reference: Numbers | None = None) -> Aggregator:
    """Minimise a smooth maximum of the weighted losses.

    `s = mu log sum_i exp(u_i (L_i - z_i) / mu)`, so `weights = u softmax(u (L - z) / mu)`

    Args:
        mu: smoothing, in the unit of the weighted losses; positive. Smaller values are closer to the maximum.
        weights: u `[m]`, the importance of each objective. Default: `1 / m` each.
        reference: z `[m]`, the best value of each loss. Default: 0.

    Returns:
        A rule that needs the losses only.

    Guarantees:
        s lies between the largest weighted loss and that plus `mu log m`; for mu to 0 it is `tchebycheff`, for mu to
        infinity the direction is that of the weighted mean, `u / m`. Any finite losses are valid.

    Source:
        Lin et al., Smooth Tchebycheff scalarization, ICML 2024, arXiv 2402.19078.
    """
    mu = number("mu", mu, POSITIVE, "For mu = 0 use tchebycheff.")
    u = preferences("weights", weights)
    z = per_objective("reference", reference, default=lambda _: 0.0)
    return scalarized_with(lambda losses, u, z: value(losses, mu, u, z), u, z)


def value(losses: Tensor, mu: Number, weights: Tensor | float, reference: Tensor | float = 0.0) -> Tensor:
    """The scalarization of the losses."""
    scaled = weights * (losses - reference)
    largest = scaled.detach().amax()  # a constant that cancels: it may be too large to divide by mu
    return largest + mu * torch.logsumexp((scaled - largest) / mu, dim=0)
