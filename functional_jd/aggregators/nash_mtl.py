"""Nash-MTL: the Nash bargaining solution among the objectives."""

from typing import NamedTuple

import torch
from torch import Tensor

from functional_jd.aggregation import Aggregator, Gramian, Solver, gramian, runs_on_host
from functional_jd.core.arguments import NOT_NEGATIVE, Number, check_integer, number
from functional_jd.core.safe import cosines, with_nan_of
from functional_jd.solvers.fairness import fair_shares


class NashState(NamedTuple):
    """The state of Nash-MTL."""

    weights: Tensor  # float64 `[m]`: the last bargaining solution, before clipping
    calls: Tensor  # int64 `[]`: the number of calls


def nash_mtl(max_norm: Number = 1.0, every: int = 1, *, solver: Solver = "host") -> Aggregator:
    """Maximise the product of the gains `<g_i, direction>` within a ball: the Nash bargaining solution.

    `G w = 1 / w`, w > 0, elementwise: in terms of cosines `w = y / norms`, `C y = 1 / y`. Then, if `|J'w| > max_norm`,
    `weights = w max_norm / |J'w|`.

    Args:
        max_norm: largest norm of the direction; 0 for no limit.
        every: number of calls per bargaining solution; in between, the last weights are used again.
        solver: `"host"` or `"device"`.

    Returns:
        A rule that needs the Gramian. Weights are positive, 0 for rows of zeros; twice differentiable.

    Guarantees:
        Never conflicts. Invariant to scaling a row. Before clipping it is `fairgrad(1)`, and the direction has norm
        `sqrt(m)`. A row of zeros gets weight 0. A stationary Jacobian (a convex combination of the unit rows is zero,
        within 1e-6) has no solution: weights 0.

    Source:
        Navon et al., ICML 2022, arXiv 2202.01017, claim 3.1 and algorithm 1. Exact, where the paper's convex-concave
        procedure stops at a residual of 1e-3; so the solution does not depend on previous weights, and `every` saves no
        time, but affects training.
    """
    max_norm = number("max_norm", max_norm, NOT_NEGATIVE, "Use 0 for no limit.")
    check_integer("every", every, 1, "Use 1 for every call.")

    def init(G: Gramian) -> NashState:
        return NashState(torch.ones_like(G[0]), torch.zeros((), dtype=torch.int64, device=G.device))

    def update(G: Gramian, state: NashState) -> tuple[Tensor, NashState]:
        C, norms = cosines(G)
        y = _two_rows(C) if len(C) == 2 else fair_shares(C, torch.ones_like(norms), 1.0, solver)
        w = y / norms
        # Read for `every=1`, too, so that the state of another rule, or of other losses, is refused.
        kept = state.weights if every == 1 else with_nan_of(state.weights, w.sum())
        w = torch.where(state.calls % every == 0, w, kept)
        square = w @ G @ w
        long = ~(square <= max_norm * max_norm) & (max_norm != 0)  # NaN is not smaller
        return w * torch.where(long, max_norm / torch.where(long, square, 1).sqrt(), 1), NashState(w, state.calls + 1)

    return Aggregator(gramian, init, update, runs_on_host(solver, max_norm))


def _two_rows(C: Tensor) -> Tensor:
    """The solution for two rows with cosine c: `y = (1 + c)^(-1/2)`, and 0 if they are opposite, so stationary."""
    one_plus_c = 1 + C[0, 1]
    stationary = one_plus_c <= 2e-14  # half of `1 + c` is the squared norm of their mean
    y = torch.where(stationary, 0, torch.where(stationary, 1, one_plus_c).rsqrt())
    return with_nan_of(torch.where(C.diagonal() == 0, 0, y), C.sum())
