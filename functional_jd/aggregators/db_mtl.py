"""DB-MTL: logarithms balance the losses, and averaged rows are all made as long as the longest."""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from functional_jd.aggregation.aggregate import Aggregator
from functional_jd.aggregation.moving_average import average_as_weights, next_average, row_norms, zero_rows
from functional_jd.aggregation.views import jacobian_and_losses
from functional_jd.core.safe import divide, nan_unless
from functional_jd.core.tree import tree_leaves
from functional_jd.core.types import Jacobian, Tree

_Seen = tuple[Jacobian, Tensor]


class DbMtlState(NamedTuple):
    """What DB-MTL remembers: as much memory as the Jacobian takes.

    Attributes:
        rows: pytree like the Jacobian, at least float32: moving average of the gradients of the log losses.
        calls: int64 `[]`.
    """

    rows: Tree
    calls: Tensor


def db_mtl(beta: float = 0.9, beta_sigma: float = 0.0) -> Aggregator:
    """Average the gradients of the log losses over the steps, and add them up at the length of the longest.

    `Y_i <- b_t Y_i + (1 - b_t) g_i / loss_i` with `b_t = beta / t^beta_sigma` in call t = 1, 2, ..., from Y = 0;
    `direction = sum_i (max_j |Y_j| / |Y_i|) Y_i`.

    Args:
        beta: how much of the past stays, in [0, 1).
        beta_sigma: how fast that fades, not negative; 0 is a constant average.

    Returns:
        A rule that looks at the whole Jacobian and the losses: `aggregate(rule, jacobian, state, losses=losses)`. Its
        weights are a pytree like the Jacobian whose leaves are `Carried`: what the current rows count, and what is
        added from earlier ones, since no weights on the current rows could say that. Differentiable with respect to
        Jacobian, losses and state, where one row only is the longest.

    Raises:
        ValueError: `beta` or `beta_sigma` out of range; at the call, no losses.

    Laws:
        The unit of a loss does not matter: loss and row times c, in all calls, change nothing. Scaling the Jacobian
        alone scales the direction. A row whose average is zero counts for nothing. With beta 0 nothing is remembered.
        Losses must be positive: otherwise the direction is NaN. What is not finite gives a state that is not: carry on
        with the old one, as `step` does.

    Source:
        Lin et al., Dual-balancing for multi-task learning, arXiv 2308.12029: algorithm 1.

    Differs:
        No 1e-8 beside the losses and the norms. The heads of `multitask` losses follow their own losses, not the
        logarithms of these.
    """
    if not 0 <= beta < 1:
        raise ValueError(f"db_mtl: beta must be in [0, 1), found {beta}. The default is 0.9.")
    if not 0 <= beta_sigma < math.inf:
        raise ValueError(f"db_mtl: beta_sigma must be finite and not negative, found {beta_sigma}. The default is 0.")

    def init(seen: _Seen) -> DbMtlState:
        jacobian, _ = seen
        calls = torch.zeros((), dtype=torch.int64, device=tree_leaves(jacobian)[0].device)
        return DbMtlState(zero_rows(jacobian), calls)

    def update(seen: _Seen, state: DbMtlState) -> tuple[Tree, DbMtlState]:
        jacobian, losses = seen
        calls = state.calls + 1
        keep = beta / calls.double() ** beta_sigma
        factors = (1 - keep) / nan_unless(losses > 0, losses)
        rows = next_average(state.rows, keep, jacobian, factors)
        norms = row_norms(rows)
        w = divide(norms.amax(), norms)
        return average_as_weights(state.rows, keep, factors, w), DbMtlState(rows, calls)

    return Aggregator(jacobian_and_losses, init, update)
