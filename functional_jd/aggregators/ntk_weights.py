"""NTK weights: terms of residuals, weighted by the traces of their tangent kernels."""

from itertools import accumulate, pairwise

import torch
from torch import Tensor

from functional_jd.aggregation import Aggregator, Observation, View, Weights, loss_vector, norms, stateless
from functional_jd.core.safe import divide
from functional_jd.core.tree import tree_leaves


def ntk_weights() -> Aggregator:
    """Weight the terms of a physics-informed loss so that their residuals fall at comparable rates.

    The losses are the residuals r themselves. Each tensor among them is a term T of n_T residuals, such as those at the
    boundary. The direction is the gradient of `sum_T lambda_T / (2 n_T) sum_i r_i^2` with constants
    `lambda_T = tr(K) / tr(K_T)`, where `tr(K_T) = sum_i |g_i|^2` over the residuals of the term:
    `weights_i = lambda_T r_i / n_T`.

    Returns:
        A rule that needs the norms of the rows and the residuals. Weights of any sign. The paper takes it every few
        steps: see `held`.

    Guarantees:
        Invariant to the order of residuals in a term. A term whose rows are zero gets weight 0. With one term, it is
        the gradient of the mean of half the squares.

    Source:
        Wang, Yu & Perdikaris, When and why PINNs fail to train, 2022, arXiv 2007.14527, algorithm 1.
    """

    def weigh(received: tuple[Tensor, Tensor, Tensor]) -> Weights:
        lengths, residuals, member = received
        traces = member @ lengths.square()
        return residuals * (divide(traces.sum(), traces * member.sum(1)) @ member)

    return stateless(_terms, weigh)


def _receive(seen: Observation) -> tuple[Tensor, Tensor, Tensor]:
    """The norms `[m]`, the residuals `[m]`, and 1 where one belongs to a term `[terms, m]`."""
    lengths, residuals = norms.receive(seen), loss_vector(seen.losses)
    index = torch.arange(len(lengths), device=lengths.device)
    bounds = pairwise(accumulate((leaf.numel() for leaf in tree_leaves(seen.losses)), initial=0))
    return lengths, residuals, torch.stack([(index >= low) & (index < high) for low, high in bounds]).to(lengths)


_terms = View(_receive, "norms", losses=True)
_terms.__name__ = "norms_and_losses"
