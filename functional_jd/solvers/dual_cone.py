"""Projection on the dual cone of the rows of a Jacobian, computed from its Gramian."""

import torch
from torch import Tensor

from functional_jd.solvers.lcp import linear_complementarity
from functional_jd.solvers.search import Solver


def dual_cone_multipliers(cosines: Tensor, combinations: Tensor, solver: Solver = "host") -> Tensor:
    """The multipliers of the unit rows in the projection of a vector on their dual cone.

    The projection of x on `{y: <y, n_j> >= 0 for all j}` is `x + sum_j s_j n_j` with
    `s >= 0, C s + q >= 0, s'(C s + q) = 0` and `q_j = <n_j, x>`, for unit rows n_j with cosines C.

    Args:
        cosines: float64 `[*, m, m]`, as `cosines` returns them; a row of zeros gets multiplier 0.
        combinations: float64 `[*, m, k]`, one q per column, each of order one, in the range of C.
        solver: as of `linear_complementarity`.

    Returns:
        `[*, m, k]`, one s per column, as of `linear_complementarity`.

    Source:
        Quinton & Rey, arXiv 2406.16232, proposition 1, in terms of unit rows.
    """
    return linear_complementarity(cosines, combinations.mT, solver=solver).mT


def row_multipliers(cosines: Tensor, solver: Solver = "host") -> Tensor:
    """The multipliers `[*, m, m]` for the projections of the unit rows themselves: column i is for row i.

    The multiplier of row i in its own projection is 0; fixing it at 0 keeps the problem regular.
    """
    if cosines.shape[-1] == 2:  # one constraint per row: in closed form
        return (-cosines).clamp(min=0)
    own = torch.eye(cosines.shape[-1], dtype=torch.bool, device=cosines.device)
    return linear_complementarity(cosines, cosines, (~own).expand_as(cosines), solver).mT
