"""PCGrad: remove from every row its conflicts with the other rows, in random order."""

import torch
from torch import Tensor

from functional_jd.aggregation.aggregate import Aggregator
from functional_jd.aggregation.views import gramian
from functional_jd.aggregation.visit_orders import random_visit_orders
from functional_jd.core.safe import nonzero, with_nan_of
from functional_jd.core.types import Gramian, Weights
from functional_jd.random import split
from functional_jd.random.keys import check_key


def pcgrad(key: Tensor) -> Aggregator:
    """Project every row on the normal plane of each row that it conflicts with, then sum the projections.

    `direction = sum_i p_i`: p_i starts as row g_i; for every other row g_j, in a random order drawn for i,
    `p_i <- p_i + max(0, -<p_i, g_j>) / |g_j|^2 g_j`.

    Args:
        key: int64 `[2]`, from `functional_jd.random.key`; do not use it again.

    Returns:
        A rule that needs the Gramian. Weights `[m]`, float64, at least 1; differentiable with respect to the Gramian
        where no projected row is orthogonal to the next. Its state is the key of the next call, int64 `[2]`, on the
        Jacobian's device.

    Raises:
        TypeError, ValueError: `key` is not a key.

    Laws:
        The same state gives the same random orders on every device and under every transform; the key advances at every
        call. Equal to `total()` where no two rows conflict. Scale-equivariant. With two rows it never conflicts and
        does not depend on the key; with more it may conflict, as a projection may undo an earlier one. Rows of zeros
        have no effect; a single row gets weight 1; two opposite rows give zero. A non-finite Gramian gives NaN weights.

    Source:
        Yu et al., Gradient surgery for multi-task learning, NeurIPS 2020, arXiv 2001.06782, algorithm 1.
    """
    check_key(key, "pcgrad")

    def update(G: Gramian, state: Tensor) -> tuple[Weights, Tensor]:
        subkey, next_key = split(state)
        eye = torch.eye(len(G), dtype=G.dtype, device=G.device)
        squares = nonzero(G.diagonal())
        coefficients, products = eye, G  # of each p_i in terms of the rows, and with the rows
        for j in random_visit_orders(subkey, len(G)).unbind(1):
            one_hot = eye[j]
            conflict = (one_hot * products).sum(1).clamp(max=0)
            steps = (-conflict / squares[j]).unsqueeze(1)
            coefficients = coefficients + steps * one_hot
            products = products + steps * G[j]
        return with_nan_of(coefficients.sum(0), G.sum()), next_key

    return Aggregator(gramian, lambda G: key.to(G.device), update)
