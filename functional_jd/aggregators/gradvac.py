"""GradVac: move rows towards each other until their cosines reach a moving average of past cosines."""

from typing import NamedTuple

import torch
from torch import Tensor

from functional_jd.aggregation import Aggregator, Gramian, Solver, Weights, gramian, random_visit_orders, runs_on_host
from functional_jd.core.arguments import FROM_0_TO_1, Number, number
from functional_jd.core.safe import cosines, nonzero, sqrt_or_zero, with_nan_of
from functional_jd.random import split
from functional_jd.random.keys import check_key

# Smallest distance of targets from +-1: G does not resolve rows that are closer to parallel or opposite.
_MARGIN = 2.0**-40


class GradVacState(NamedTuple):
    """The state of GradVac."""

    key: Tensor  # int64 `[2]`, the key of the next call, on the Jacobian's device
    targets: Tensor  # float64 `[m, m]`: moving averages of the cosines of row i with row j; the diagonal is 0


def gradvac(key: Tensor, beta: Number = 0.5, *, solver: Solver = "host") -> Aggregator:
    """Move every row towards each row whose cosine with it is below a target, then sum the rows.

    `direction = sum_i p_i`: p_i starts as row g_i; for every other row g_j, in a random order drawn for i, with cosine
    c of p_i and g_j: where c is less than the target t_ij, `p_i <- p_i + |p_i| / |g_j| (t_ij sqrt(1 - c^2) / sqrt(1 -
    t_ij^2) - c) g_j`, which makes their cosine t_ij; everywhere `t_ij <- (1 - beta) t_ij + beta c`, for the next call.

    Args:
        key: int64 `[2]`, from `functional_jd.random.key`; do not use it again.
        beta: weight of new cosines in the targets, which start at 0; from 0 to 1.
        solver: `"host"` or `"device"`.

    Returns:
        A rule that needs the Gramian. Weights are at least 1; differentiable where no cosine equals its target or +-1.

    Guarantees:
        The same state gives the same random orders on every device and under every transform. The first call, and every
        call with `beta=0`, is `pcgrad` with the same key. Scaling rows does not change the targets. A row of zeros, or
        one that was cancelled (within 1e-6 of opposite), has cosine 0 with all rows.

    Source:
        Wang, Tsvetkov, Firat & Cao, ICLR 2021, arXiv 2010.05874, equations 2 and 3, algorithm 1. Targets are clamped to
        a distance of 2^-40 from +-1; the authors' code adds 1e-8 to the denominators, and so depends on the scale. One
        group of parameters; for more, see `grouped`.
    """
    check_key(key)
    beta = number("beta", beta, FROM_0_TO_1, "0 never learns, 1 uses the last call.")

    def update(G: Gramian, state: GradVacState) -> tuple[Weights, GradVacState]:
        subkey, next_key = split(state.key)
        orders = random_visit_orders(subkey, len(G))
        targets = state.targets.gather(1, orders).clamp(_MARGIN - 1, 1 - _MARGIN)
        eye = torch.eye(len(G), dtype=G.dtype, device=G.device)
        C, norms = cosines(G)
        coefficients, products, lengths = eye, C, C.diagonal()  # of each p_i, in terms of unit rows
        observed = torch.zeros_like(C)
        for j, target, sine in zip(orders.unbind(1), targets.unbind(1), _sine(targets).unbind(1), strict=True):
            one_hot = eye[j]
            cosine = (one_hot * products).sum(1) / nonzero(lengths)
            below = (cosine < target) & (C[j, j] > 0)  # a row of zeros moves nothing
            # The component orthogonal to g_j is unchanged and gives the new length, without a difference of squares.
            growth = torch.where(below, _sine(cosine) / sine, 1)
            steps = torch.where(below, lengths * (target * growth - cosine), 0).unsqueeze(1)
            coefficients = coefficients + steps * one_hot
            products = products + steps * C[j]
            lengths = lengths * growth
            observed = observed + one_hot * cosine.unsqueeze(1)
        weights = with_nan_of(norms @ coefficients / norms, G.sum() + targets.sum())
        return weights, GradVacState(next_key, state.targets.lerp(observed, beta))

    start = lambda G: GradVacState(key.to(G.device), torch.zeros_like(G))
    return Aggregator(gramian, start, update, runs_on_host(solver, beta))


def _sine(cosine: Tensor) -> Tensor:
    square = 1 - cosine * cosine
    return sqrt_or_zero(square, square < _MARGIN)
