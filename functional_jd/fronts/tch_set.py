"""Few solutions for many losses: each loss needs one solution that is good at it."""

import torch
from torch import Tensor

from functional_jd.aggregation.hyper_parameters import Numbers, per_objective, preferences
from functional_jd.aggregation.views import losses
from functional_jd.core.arguments import POSITIVE, Number, number
from functional_jd.core.types import Weights
from functional_jd.fronts.population import Population


def tch_set(mu: Number = 0.1, weights: Numbers | None = None, reference: Numbers | None = None) -> Population:
    """K solutions that share m losses among them, K far below m: smooth Tchebycheff set scalarization (STCH-Set).

    `s = mu log sum_i exp(u_i (n_i - z_i) / mu)` with `n_i = -mu log sum_k exp(-L_ki / mu)`, the smooth least of loss i,
    so that `w_ki = u_i softmax_i(u (n - z) / mu) softmax_k(-L_i / mu)`

    Args:
        mu: smoothing, in the unit of the losses; positive. A number or a tensor `[]`.
        weights: u `[m]`, the importance of each loss. Default: `1 / m` each.
        reference: z `[m]`, the best value of each loss. Default: 0.

    Returns:
        A `Population` that needs the losses, in like units; its solutions start apart. Weights `[K, m]`, float64, not
        negative. Differentiable with respect to losses and hyper-parameters.

    Guarantees:
        s lies between `t - mu max_i u_i log K` and `t + mu log m`, with `t = max_i u_i (min_k L_ki - z_i)`. One
        solution follows `stch`. Equivariant to permutations; homogeneous in losses, reference, mu. A solution that is
        not finite has NaN weights, and does not touch the others.

    Source:
        Lin, Liu, Zhang, Liu, Wang & Zhang, Few for many: Tchebycheff set scalarization for many-objective optimization,
        ICLR 2025, arXiv 2405.19650, with one mu for both maximum and minimum.

    Differences:
        The reference code has `u_i = 1` and `z = 0`; on one problem mu decays from 1.
    """
    mu = number("mu", mu, POSITIVE, "The default is 0.1.")
    importance = preferences("weights", weights)
    best = per_objective("reference", reference, default=lambda _: 0.0)

    def weigh(points: Tensor) -> Weights:
        points = points.double()
        u, z = importance(points[0]), best(points[0])
        finite = points.isfinite().all(-1, keepdim=True)
        least = torch.where(finite, points.detach(), torch.inf).amin(0)  # cancels: it may be too large to divide by mu
        known = torch.where(finite, points, 0)
        below = torch.where(finite, (least - known) / mu, -torch.inf)
        scaled = u * (least - mu * torch.logsumexp(below, 0) - z)
        shares = u * torch.softmax((scaled - scaled.detach().amax()) / mu, 0)
        return torch.where(finite, shares * torch.softmax(below, 0), torch.nan)

    return Population(losses, weigh)
