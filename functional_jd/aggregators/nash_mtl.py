"""Nash-MTL: what the objectives would agree on if they bargained."""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from functional_jd.aggregation.aggregate import Aggregator
from functional_jd.aggregation.views import gramian
from functional_jd.core.safe import with_nan_of
from functional_jd.core.types import Gramian
from functional_jd.solvers.dual_cone import cosines
from functional_jd.solvers.fairness import fair_shares


class NashState(NamedTuple):
    """What Nash-MTL remembers.

    Attributes:
        weights: float64 `[m]`: those last agreed on, before clipping.
        calls: int64 `[]`: how many there were.
    """

    weights: Tensor
    calls: Tensor


def nash_mtl(max_norm: float = 1.0, every: int = 1) -> Aggregator:
    """The Nash bargaining solution: the greatest product of gains `<g_i, direction>` within a ball.

    `G w = 1 / w`, w > 0, elementwise: in terms of cosines `w = y / norms`, `C y = 1 / y`. Then, if `|J'w| > max_norm`,
    `weights = w max_norm / |J'w|`.

    Args:
        max_norm: the longest direction; 0 for no limit.
        every: from how many calls to how many new weights are agreed on; in between the last ones are used again.

    Returns:
        A rule that looks at the Gramian. Weights `[m]`, float64, positive; differentiable twice with respect to the
        Gramian.

    Raises:
        ValueError: `max_norm` negative or not finite, or `every` not a positive integer.

    Laws:
        Never conflicts. Scaling a row changes nothing. Before clipping the direction has norm `sqrt(m)`; it is then
        `fairgrad(1)`. A row of zeros gets weight 0, the others what they would without it. A stationary Jacobian (a
        convex combination of the unit rows is zero, within 1e-7) leaves nothing to agree on: weights 0. A Gramian that
        is not finite gives weights and a state that are NaN: carry on with the old state, as `step` does.

    Source:
        Navon, Shamsian, Achituve, Maron, Kawaguchi, Chechik, Fetaya, Multi-task learning as a bargaining game, ICML
        2022, arXiv 2202.01017, claim 3.1 and algorithm 1.

    Differs:
        Exact, where the paper's convex-concave procedure stops at a residual of 1e-3; so the answer does not depend on
        the weights before, and `every` saves no time: it is there for what it does to training.
    """
    if not (math.isfinite(max_norm) and max_norm >= 0):
        raise ValueError(f"nash_mtl: max_norm must be finite and at least 0, found {max_norm}. Use 0 for no limit.")
    if not isinstance(every, int) or every < 1:
        raise ValueError(
            f"nash_mtl: every must be an integer of at least 1, found {every}. Use 1 to bargain each time."
        )

    def init(G: Gramian) -> NashState:
        return NashState(torch.ones_like(G[0]), torch.zeros((), dtype=torch.int64, device=G.device))

    def update(G: Gramian, state: NashState) -> tuple[Tensor, NashState]:
        C, norms = cosines(G)
        y = _of_two(C) if len(C) == 2 else fair_shares(C, torch.ones_like(norms), 1.0)
        agreed = y / norms
        w = torch.where(state.calls % every == 0, agreed, state.weights)
        return w * _clip(w @ G @ w, max_norm), NashState(w, state.calls + 1)

    return Aggregator(gramian, init, update)


def _of_two(C: Tensor) -> Tensor:
    """`y_1 + c y_2 = 1 / y_1` and the other way round: `y = (1 + c)^(-1/2)`; two opposite rows are stationary."""
    room = 1 + C[0, 1]
    stationary = room <= 2e-14  # half of it is the square of their mean
    y = torch.where(stationary, 0, torch.where(stationary, 1, room).rsqrt())
    return with_nan_of(torch.where(C.diagonal() == 0, 0, y), C.sum())


def _clip(square: Tensor, longest: float) -> Tensor:
    """What shortens a direction of this squared length to the longest one allowed."""
    if longest == 0:
        return torch.ones_like(square)
    long = square > longest**2
    return torch.where(long, longest / torch.where(long, square, 1).sqrt(), 1)
