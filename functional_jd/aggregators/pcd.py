"""PCD: the direction closest to the first row that gives the others a share of their progress."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from functional_jd.aggregation import Aggregator, Gramian, Numbers, Solver, gramian, per_objective, runs_on_host
from functional_jd.aggregation.lifts import remembering
from functional_jd.core.arguments import BELOW_1, FROM_0_TO_1, Number, number
from functional_jd.core.safe import cosines, nonzero, order_of
from functional_jd.solvers.lcp import linear_complementarity

# Relative thresholds for incompatible shares and cancelled directions, well above the rounding of a float64 Gramian.
_COMPATIBLE, _VANISHING = 1e-9, 1e-12


def pcd(tau: Number | Numbers = 0.02, beta: Number = 0.999, *, solver: Solver = "host") -> Aggregator:
    """Stay near the first objective's gradient, with at least a share tau of its own progress for every other one.

    `d = argmin { |d - h_0| : <h_j, d> >= tau_j |h_j|^2 for j > 0 }`, where `h_i` is row i divided by its running norm,
    the root of a running mean of squares from 0; `direction = |g_0| d / |d|`. In unit rows n_j with cosines C, `d =
    |h_0| n_0 + s'n` with multipliers `s = LCP(C, |h_0| C_0 - tau |h|)`, s_0 = 0.

    Args:
        tau: the share, in [0, 1]: one number for all, or `[m - 1]`, one per objective except the first.
        beta: decay of the running mean, in [0, 1); 0 normalises each row by its own norm.
        solver: `"host"` or `"device"`.

    Returns:
        A rule that needs the Gramian; row 0 is the primary objective. Weights are non-negative, not normalised; twice
        differentiable where the active constraints do not change. Its state is the means of squared norms, `[m]`.

    Guarantees:
        The direction has the norm of the first row; it is that row if that satisfies all constraints. Scaling another
        row, in all calls, has no effect. Incompatible shares (opposite rows, `tau > 0`) are all dropped, which gives
        the first row: if the shortest direction with them is 3e4 times as long as the largest. A first row of zeros, or
        one that the others cancel to 1e-6 of the sum of all weighted norms, gives zero.

    Source:
        Varam & AlHajri, arXiv 2606.29521: definitions 4.1 and 4.5, theorem 4.2, algorithm 1. No 1e-8 under the root.
        One complementarity problem replaces the enumeration of working sets; another decides whether shares fit.
    """
    shares_of, given = _shares(tau)
    beta = number("beta", beta, BELOW_1, "The default is 0.999.")

    def update(G: Gramian, squares: Tensor) -> tuple[Tensor, Tensor]:
        m = len(G)
        if given is not None and given != m - 1:
            raise ValueError(f"pcd: tau must be one per row but the first, found {given} and {m} rows. Pass a number.")
        C, norms = cosines(G)
        norms_or_zero = torch.where(G.diagonal() == 0, 0, norms)
        squares = beta * squares + (1 - beta) * G.diagonal()
        sizes = norms_or_zero / nonzero(squares).sqrt()
        required = torch.cat([sizes[:1] * 0, shares_of(sizes[1:]) * sizes[1:]])
        target = sizes * (torch.arange(m, device=G.device) == 0)
        unit = order_of(torch.stack((target, required)))
        w = _projection(C, target / unit, required / unit, solver)
        square = w @ C @ w
        vanishing = square <= _VANISHING * w.sum() ** 2
        scale = torch.where(vanishing, 0, norms_or_zero[0] / torch.where(vanishing, 1, square).sqrt())
        return w / norms * scale, squares

    return remembering("squares", gramian, lambda G: torch.zeros_like(G[0]), update, runs_on_host(solver, tau, beta))


def _shares(tau: Number | Numbers) -> tuple[Callable[[Tensor], Number], int | None]:
    """The shares as a function of the secondary rows; the number of shares, `None` where one stands for all."""
    if isinstance(tau, Sequence) or (isinstance(tau, Tensor) and tau.ndim):
        return per_objective("tau", tau, FROM_0_TO_1), len(tau)
    share = number("tau", tau, FROM_0_TO_1, "The default is 0.02.")
    return lambda _: share, None


def _projection(C: Tensor, target: Tensor, required: Tensor, solver: Solver) -> Tensor:
    """Weights of the unit rows: the point nearest to `target'n` that satisfies all constraints, else the target."""
    secondary = (torch.arange(len(C), device=C.device) > 0).unsqueeze(0)
    unit = required / order_of(required)
    room = 1 - unit @ linear_complementarity(C + torch.outer(unit, unit), -unit.unsqueeze(0), secondary, solver)[0]
    shortfall = torch.where(room > _COMPATIBLE, target @ C - required, 0)
    return target + linear_complementarity(C, shortfall.unsqueeze(0), secondary, solver)[0]
