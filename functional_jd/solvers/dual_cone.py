"""Projection on the dual cone of the rows of a Jacobian, seen through its Gramian."""

import torch
from torch import Tensor

from functional_jd.core.safe import nonzero
from functional_jd.core.types import Gramian
from functional_jd.solvers.lcp import linear_complementarity


def cosines(gramian: Gramian) -> tuple[Tensor, Tensor]:
    """The cosines of the angles between the rows, and the norms of the rows.

    `C_ij = G_ij / sqrt(d_i d_j)`, `norms = sqrt(d)` with d the diagonal of G. A row of zeros has norm 1 and cosine 0
    with every row, itself included: so nothing is divided by zero, and nobody conflicts with it.

    Args:
        gramian: float64 `[*, m, m]`.

    Returns:
        `[*, m, m]` and `[*, m]`.

    Laws:
        C is invariant, bit by bit, when rows are scaled by powers of two.
    """
    squares = gramian.diagonal(dim1=-2, dim2=-1)
    norms = nonzero(squares).sqrt()
    return gramian / norms.unsqueeze(-1) / norms.unsqueeze(-2), norms


def dual_cone_multipliers(cosines: Tensor, combinations: Tensor) -> Tensor:
    """How much of each unit row to add to a vector so that it conflicts with no row: its projection on the dual cone.

    The projection of x on `{y: <y, n_j> >= 0 for all j}` is `x + sum_j s_j n_j` with
    `s >= 0, C s + q >= 0, s'(C s + q) = 0` and `q_j = <n_j, x>`, for unit rows n_j with cosines C.

    Args:
        cosines: float64 `[*, m, m]`, as `cosines` returns them: a row of zeros is left alone.
        combinations: float64 `[*, m, k]`, one q per column, each of order one, in the range of C.

    Returns:
        `[*, m, k]`, one s per column, NaN where something is not finite.

    Laws:
        Composes with vmap, grad, jvp, compile; first and second derivatives are right wherever they exist.

    Source:
        Quinton & Rey, arXiv 2406.16232, proposition 1, in terms of unit rows.
    """
    return linear_complementarity(cosines, combinations.mT).mT


def row_multipliers(cosines: Tensor) -> Tensor:
    """The multipliers of every unit row's own projection: column i is for row i.

    A row is never short of itself: its own multiplier is 0, and forbidding it keeps the problem regular.

    Args:
        cosines: float64 `[*, m, m]`, as `cosines` returns them.

    Returns:
        `[*, m, m]`.
    """
    if cosines.shape[-1] == 2:  # each row has one neighbour only, and adds what they oppose each other by
        return (-cosines).clamp(min=0)
    own = torch.eye(cosines.shape[-1], dtype=torch.bool, device=cosines.device)
    return linear_complementarity(cosines, cosines, (~own).expand_as(cosines)).mT
