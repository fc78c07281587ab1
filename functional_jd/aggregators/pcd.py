"""PCD: follow the first row as closely as the others' share of progress allows."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from functional_jd.aggregation.aggregate import Aggregator
from functional_jd.aggregation.views import gramian
from functional_jd.core.safe import nonzero
from functional_jd.core.types import Gramian
from functional_jd.solvers.dual_cone import cosines
from functional_jd.solvers.lcp import linear_complementarity

# Directions that nearly oppose each other: relative, well above what a float64 Gramian rounds off.
_COMPATIBLE, _VANISHING = 1e-9, 1e-12


class PcdState(NamedTuple):
    """What PCD remembers.

    Attributes:
        squares: float64 `[m]`: running mean of the squared norms of the rows, up to a factor common to all.
    """

    squares: Tensor


def pcd(tau: float | Sequence[float] = 0.02, beta: float = 0.999) -> Aggregator:
    """Stay near the first objective's gradient while every other makes at least a share tau of its own progress.

    `d = argmin { |d - h_0| : <h_j, d> >= tau_j |h_j|^2 for j > 0 }`, where `h_i` is row i divided by its usual norm,
    the root of a running mean of squares; `direction = |g_0| d / |d|`. In unit rows n_j with cosines C,
    `d = |h_0| n_0 + s'n` with multipliers `s = LCP(C, |h_0| C_0 - tau |h|)`, s_0 = 0.

    Args:
        tau: the share, in [0, 1]; one for all or one per objective but the first.
        beta: decay of the running mean, in [0, 1); 0 normalises each row by its own norm.

    Returns:
        A rule that looks at the Gramian; row 0 is the primary objective. Weights float64 `[m]`, not negative, not
        normalised; differentiable twice with respect to Gramian and state where the active constraints do not change.

    Raises:
        ValueError: `tau` or `beta` out of range; at the call, not one tau per secondary objective.

    Laws:
        The direction is as long as the first row. Scaling the first row (in all calls) scales the direction, scaling
        another changes nothing, to rounding. With one row, or when nobody asks for more than the first row gives
        anyway, the direction is the first row. Shares that exclude each other (opposite rows, `tau > 0`) are dropped,
        all of them, and it is the first row again. A first row of zeros, or one that the others cancel, gives zero;
        other rows of zeros count for nothing. A Gramian that is not finite gives weights and a state that are NaN:
        carry on with the old state, as `step` does.

    Source:
        Varam & AlHajri, Not all objectives are born equal, arXiv 2606.29521: definitions 4.1 and 4.5, theorem 4.2,
        algorithm 1.

    Differs:
        No 1e-8 beneath the root. The bias of the running mean is a factor common to all rows, which cancels: no count
        of calls is kept. One complementarity problem stands for the enumeration of working sets, and another decides
        whether the shares exclude each other: whether the cone `{(d, r): <n_j, d> >= tau_j |h_j| r}` leaves r no room.
    """
    if not all(0 <= share <= 1 for share in ([tau] if isinstance(tau, int | float) else tau)):
        raise ValueError(f"pcd: tau must be one or several numbers in [0, 1], found {tau}. The default is 0.02.")
    if not 0 <= beta < 1:
        raise ValueError(f"pcd: beta must be in [0, 1), found {beta}. The default is 0.999.")
    shares = torch.tensor(tau, dtype=torch.float64)

    def init(G: Gramian) -> PcdState:
        return PcdState(torch.zeros_like(G[0]))

    def update(G: Gramian, state: PcdState) -> tuple[Tensor, PcdState]:
        m = len(G)
        if shares.ndim and len(shares) != m - 1:
            raise ValueError(
                f"pcd: expected one tau per secondary objective, found {len(shares)} and {m - 1} such objectives. "
                "Leave out the first objective, or give one number for all."
            )
        C, norms = cosines(G)
        norms_or_zero = torch.where(G.diagonal() == 0, 0, norms)
        squares = beta * state.squares + (1 - beta) * G.diagonal()
        sizes = norms_or_zero / nonzero(squares).sqrt()
        asked = torch.cat([sizes[:1] * 0, shares.to(G.device) * sizes[1:]])
        pull = sizes * (torch.arange(m, device=G.device) == 0)
        unit = _largest(pull, asked)
        w = _nearest(C, pull / unit, asked / unit)
        square = w @ C @ w
        vanishing = square <= _VANISHING * w.sum() ** 2
        scale = torch.where(vanishing, 0, norms_or_zero[0] / torch.where(vanishing, 1, square).sqrt())
        return w / norms * scale, PcdState(squares)

    return Aggregator(gramian, init, update)


def _nearest(C: Tensor, pull: Tensor, asked: Tensor) -> Tensor:
    """Weights of the unit rows: the point nearest to `pull'n` that gives each row what it asks for, if there is one."""
    secondary = (torch.arange(len(C), device=C.device) > 0).unsqueeze(0)
    unit = asked / _largest(asked)
    room = 1 - unit @ linear_complementarity(C + torch.outer(unit, unit), -unit.unsqueeze(0), secondary)[0]
    missing = torch.where(room > _COMPATIBLE, pull @ C - asked, 0)
    return pull + linear_complementarity(C, missing.unsqueeze(0), secondary)[0]


def _largest(*parts: Tensor) -> Tensor:
    return nonzero(torch.stack(parts).amax())
