"""GradVac: rows are bent towards each other until they are as similar as they used to be."""

from typing import NamedTuple

import torch
from torch import Tensor

from functional_jd.aggregation.aggregate import Aggregator
from functional_jd.aggregation.views import gramian
from functional_jd.aggregation.visit_orders import random_visit_orders
from functional_jd.core.safe import nonzero, sqrt_or_zero, with_nan_of
from functional_jd.core.types import Gramian, Weights
from functional_jd.random import split
from functional_jd.solvers.dual_cone import cosines

# What a cosine may keep from one: G says no more about rows that are nearly parallel or nearly opposite.
_FLAT = 2.0**-40


class GradVacState(NamedTuple):
    """What GradVac remembers.

    Attributes:
        key: int64 `[2]`, of the next call, on the Jacobian's device.
        targets: float64 `[m, m]`: how similar row i has been to row j, in cosines; the diagonal is 0.
    """

    key: Tensor
    targets: Tensor


def gradvac(key: Tensor, beta: float = 0.5) -> Aggregator:
    """Bend every row towards each row that it resembles less than it used to, then add the bent rows up.

    `direction = sum_i p_i`: p_i starts as row g_i; for every other row g_j, in a random order of i's own, with
    cosine c of p_i and g_j: where c is less than the target t_ij,
    `p_i <- p_i + |p_i| / |g_j| (t_ij sqrt(1 - c^2) / sqrt(1 - t_ij^2) - c) g_j`, which makes their cosine t_ij;
    everywhere `t_ij <- (1 - beta) t_ij + beta c`, for the next call.

    Args:
        key: int64 `[2]`, as `functional_jd.random.key` makes it; do not use it again.
        beta: how fast targets, which start at 0, follow the cosines, from 0 to 1.

    Returns:
        A rule that looks at the Gramian. Weights `[m]`, float64, at least 1; differentiable with respect to the
        Gramian and the targets wherever no cosine equals its target or +-1. Its state is `GradVacState(key, targets)`.

    Raises:
        TypeError, ValueError: `key` is none, or `beta` is not between 0 and 1.

    Laws:
        The same state, the same random orders, on every device and under every transform; the key advances at every
        call. The first call, and every call with `beta=0`, is `pcgrad` with the same key. Scale-equivariant; scaling
        rows does not change the targets. A row of zeros, or one that has been cancelled, has cosine 0 with all rows and
        changes nothing but its targets. One row gets weight 1. A Gramian that is not finite gives weights NaN.

    Source:
        Wang, Tsvetkov, Firat & Cao, Gradient vaccine, ICLR 2021, arXiv 2010.05874, equations 2 and 3, algorithm 1.

    Differs:
        No correction reaches a cosine of one: a target within 2^-40 of +-1 counts as that far from it. The reference
        code adds 1e-8 to the denominators instead, and so depends on the scale. One group of parameters; for more, see
        `grouped`.
    """
    split(key, 1)  # what is no key is refused here, not at the first call
    if not 0 <= beta <= 1:
        raise ValueError(f"gradvac: expected beta between 0 and 1, found {beta}. 0 never learns, 1 remembers one call.")

    def init(G: Gramian) -> GradVacState:
        return GradVacState(key.to(G.device), torch.zeros_like(G))

    def update(G: Gramian, state: GradVacState) -> tuple[Weights, GradVacState]:
        drawn, carried = split(state.key)
        orders = random_visit_orders(drawn, len(G))
        targets = state.targets.gather(1, orders).clamp(_FLAT - 1, 1 - _FLAT)
        eye = torch.eye(len(G), dtype=G.dtype, device=G.device)
        C, norms = cosines(G)
        coefficients, products, lengths = eye, C, C.diagonal()  # of each p_i, in terms of unit rows
        found = torch.zeros_like(C)
        for j, target, sine in zip(orders.unbind(1), targets.unbind(1), _sine(targets).unbind(1), strict=True):
            visited = eye[j]
            cosine = (visited * products).sum(1) / nonzero(lengths)
            bent = cosine < target
            # What is orthogonal to g_j stays, hence gives the new length: no difference of squares.
            stretch = torch.where(bent, _sine(cosine) / sine, 1)
            steps = torch.where(bent, lengths * (target * stretch - cosine), 0).unsqueeze(1)
            coefficients = coefficients + steps * visited
            products = products + steps * C[j]
            lengths = lengths * stretch
            found = found + visited * cosine.unsqueeze(1)
        weights = with_nan_of(norms @ coefficients / norms, G.sum())
        return weights, GradVacState(carried, state.targets.lerp(found, beta))

    return Aggregator(gramian, init, update)


def _sine(cosine: Tensor) -> Tensor:
    square = 1 - cosine * cosine
    return sqrt_or_zero(square, square < _FLAT)
