"""DB-MTL: averaged gradients of the log losses, rescaled to the norm of the longest."""

from typing import NamedTuple

import torch
from torch import Tensor

from functional_jd.aggregation import Aggregator, Jacobian, Tree, jacobian_and_losses
from functional_jd.aggregation.combine import averaged, zero_rows
from functional_jd.aggregation.views import row_norms
from functional_jd.core.arguments import BELOW_1, NOT_NEGATIVE, Number, number
from functional_jd.core.safe import divide, nan_unless
from functional_jd.core.tree import tree_leaves


class DbMtlState(NamedTuple):
    """The state of DB-MTL, which takes as much memory as the Jacobian."""

    rows: Tree  # pytree like the Jacobian, at least float32: moving average of the gradients of the log losses
    calls: Tensor  # int64 `[]`


def db_mtl(beta: Number = 0.9, beta_sigma: Number = 0.0) -> Aggregator:
    """Average the gradients of the log losses over the steps, rescale them to the largest norm, and sum them.

    `Y_i <- b_t Y_i + (1 - b_t) g_i / loss_i` with `b_t = beta / t^beta_sigma` in call t = 1, 2, ..., from Y = 0;
    `direction = sum_i (max_j |Y_j| / |Y_i|) Y_i`.

    Args:
        beta: weight of the previous average, in [0, 1).
        beta_sigma: exponent of its decay over the calls, not negative; 0 keeps it constant.

    Returns:
        A rule that needs the full Jacobian and the losses. Its weights are a pytree like the Jacobian with leaves
        `AffineWeights`, for current rows and earlier ones. Differentiable where the longest row is unique.

    Guarantees:
        Invariant to the unit of a loss; below float64 as long as `1 / loss_i` and `|g_i| / loss_i` are between 1e-38
        and 3e38. A row whose average is zero gets weight 0. Losses must be positive: else the direction is NaN.

    Source:
        Lin et al., Dual-balancing for multi-task learning, arXiv 2308.12029: algorithm 1. No 1e-8 is added to losses
        and norms. The heads of `multitask` losses follow their losses, not the log losses.
    """
    beta = number("beta", beta, BELOW_1, "The default is 0.9.")
    beta_sigma = number("beta_sigma", beta_sigma, NOT_NEGATIVE, "The default is 0.")

    def init(view: tuple[Jacobian, Tensor]) -> DbMtlState:
        jacobian, _ = view
        calls = torch.zeros((), dtype=torch.int64, device=tree_leaves(jacobian)[0].device)
        return DbMtlState(zero_rows(jacobian), calls)

    def update(view: tuple[Jacobian, Tensor], state: DbMtlState) -> tuple[Tree, DbMtlState]:
        jacobian, losses = view
        calls = state.calls + 1
        b = beta / calls.double() ** beta_sigma
        absent = (losses == 0) & (row_norms(jacobian) == 0)
        factors = (1 - b) / nan_unless((losses > 0) | absent, torch.where(absent, 1, losses))
        rows, as_weights = averaged(state.rows, b, jacobian, factors)
        norms = row_norms(rows)
        return as_weights(divide(norms.amax(), norms)), DbMtlState(rows, calls)

    return Aggregator(jacobian_and_losses, init, update, takes=("db_mtl", NOT_NEGATIVE))
