"""PCGrad: remove from every row its conflicts with the other rows, in random order."""

import torch
from torch import Tensor

from functional_jd.aggregation import Aggregator, Gramian, Solver, Weights, gramian, random_visit_orders, runs_on_host
from functional_jd.core.safe import nonzero, with_nan_of
from functional_jd.random import split
from functional_jd.random.keys import check_key

# So many projections first change products with one another only: else each would change `m^2` of them.
_BLOCK = 64


def pcgrad(key: Tensor, *, solver: Solver = "host") -> Aggregator:
    """Project every row on the normal plane of each row that it conflicts with, then sum the projections.

    `direction = sum_i p_i`: p_i starts as row g_i; for every other row g_j, in a random order drawn for i, `p_i <- p_i
    + max(0, -<p_i, g_j>) / |g_j|^2 g_j`.

    Args:
        key: int64 `[2]`, from `functional_jd.random.key`; do not use it again.
        solver: `"host"` or `"device"`.

    Returns:
        A rule that needs the Gramian. Weights are at least 1. Its state is the next key.

    Guarantees:
        The same state gives the same random orders on every device and under every transform. Equal to `total()` if no
        two rows conflict. With two rows it never conflicts and does not depend on the key; with more it may conflict,
        as a projection may undo an earlier one. Two opposite rows give zero.

    Source:
        Yu et al., Gradient surgery for multi-task learning, NeurIPS 2020, arXiv 2001.06782, algorithm 1.
    """
    check_key(key)

    def update(G: Gramian, state: Tensor) -> tuple[Weights, Tensor]:
        subkey, next_key = split(state)
        return with_nan_of(1 + _coefficients(G, random_visit_orders(subkey, len(G))).sum(0), G.sum()), next_key

    return Aggregator(gramian, lambda G: key.to(G.device), update, runs_on_host(solver))


def _coefficients(G: Gramian, orders: Tensor) -> Tensor:
    """The multiples of all rows that are added to each p_i, `[m, m]`, by orders `[m, m - 1]`.

    A projection changes the products of p_i with the rows that follow in the same block of its order. Then all
    projections of the block, at once, change its products with all rows.
    """
    if len(G) == 1:
        return torch.zeros_like(G)
    squares = nonzero(G.diagonal())
    scaled = G / squares.unsqueeze(1)
    products, removed = G, torch.zeros_like(G)
    for block in orders.split(_BLOCK, dim=1):
        change = torch.zeros_like(G).scatter(1, block, _conflicts(scaled, products.gather(1, block).mT, block.mT))
        products = products - change @ scaled
        removed = removed + change
    return -removed / squares


def _conflicts(scaled: Tensor, products: Tensor, block: Tensor) -> Tensor:
    """The products, if negative, of each p_i with the rows of its block, when their turn comes."""
    first, second = torch.triu_indices(len(block), len(block), 1, device=block.device)
    steps = scaled[block[first], block[second]].split(list(range(len(block) - 1, -1, -1)))
    conflicts: list[Tensor] = []
    for step in steps:  # by a row, on those that follow
        conflicts.append(products[:1].clamp(max=0))
        products = torch.addcmul(products[1:], conflicts[-1], step, value=-1)
    return torch.cat(conflicts).mT
