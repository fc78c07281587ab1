"""MoCo: rows averaged over the steps, and weights that walk towards their min-norm point."""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from functional_jd.aggregation.aggregate import Aggregator
from functional_jd.aggregation.moving_average import average_as_weights, next_average, row_norms, zero_rows
from functional_jd.aggregation.views import gramian, jacobian_and_losses
from functional_jd.core.safe import nan_unless, nonzero
from functional_jd.core.types import Jacobian, Tree

_Seen = tuple[Jacobian, Tensor]


class MocoState(NamedTuple):
    """What MoCo remembers: as much memory as the Jacobian takes.

    Attributes:
        rows: pytree like the Jacobian, at least float32: moving average of the rows, each as long as its loss.
        weights: float64 `[m]`, of the averaged rows.
        calls: int64 `[]`.
    """

    rows: Tree
    weights: Tensor
    calls: Tensor


def moco(
    beta: float = 0.5, gamma: float = 0.1, rho: float = 0.0, *, beta_sigma: float = 0.5, gamma_sigma: float = 0.5
) -> Aggregator:
    """Track the mean of every row, so that noise does not bias the weights, and weigh the means.

    `Y_i <- Y_i - b_t (Y_i - loss_i g_i / |g_i|)`, `w <- softmax(w - c_t (Y Y' + rho I) w)`, `direction = w'Y`, with
    `b_t = beta / t^beta_sigma` and `c_t = gamma / t^gamma_sigma` in call t = 1, 2, ..., from Y = 0 and w uniform.

    Args:
        beta: how much of the new rows comes in, in (0, 1].
        gamma: length of the weights' step, in units of one over a squared loss; not negative.
        rho: how strongly the weights are held together, in units of a squared loss; not negative.
        beta_sigma: how fast `beta` fades, not negative.
        gamma_sigma: how fast `gamma` fades, not negative.

    Returns:
        A rule that looks at the whole Jacobian and the losses: `aggregate(rule, jacobian, state, losses=losses)`. Its
        weights are a pytree like the Jacobian whose leaves are `Carried`: what the current rows count, and what is
        added from earlier ones, since no weights on the current rows could say that. The w of the formula is in the
        state. Differentiable with respect to Jacobian, losses and state (a row of zeros is a kink).

    Raises:
        ValueError: a hyper-parameter out of range; at the call, no losses.

    Laws:
        Scaling a row changes nothing: how long it counts as says its loss. With `gamma` 0 the weights stay uniform. A
        row of zeros comes in as zeros. Losses must not be negative: otherwise the direction is NaN. What is not finite
        gives a state that is not: carry on with the old one, as `step` does.

    Source:
        Fernando et al., Mitigating gradient bias in multi-objective learning, ICLR 2023, arXiv 2210.12624: the tracking
        variable and the weights of algorithm 1, as in the authors' code that LibMTL publishes.

    Differs:
        As in that code, and not in the paper, rows come in at the length of their loss, and softmax stands for the
        projection on the simplex: so the weights stay near uniform, each within a factor of e where gradients are
        short. No 1e-8 beside the norms.
    """
    if not 0 < beta <= 1:
        raise ValueError(f"moco: beta must be in (0, 1], found {beta}. The default is 0.5.")
    for name, value in {"gamma": gamma, "rho": rho, "beta_sigma": beta_sigma, "gamma_sigma": gamma_sigma}.items():
        if not 0 <= value < math.inf:
            raise ValueError(f"moco: {name} must be finite and not negative, found {value}. Take 0 for none.")

    def init(seen: _Seen) -> MocoState:
        jacobian, losses = seen
        uniform = torch.full_like(losses, 1 / len(losses))
        return MocoState(zero_rows(jacobian), uniform, torch.zeros((), dtype=torch.int64, device=losses.device))

    def update(seen: _Seen, state: MocoState) -> tuple[Tree, MocoState]:
        jacobian, losses = seen
        calls = state.calls + 1
        share, rate = beta / calls.double() ** beta_sigma, gamma / calls.double() ** gamma_sigma
        norms = row_norms(jacobian)
        factors = share * nan_unless(losses >= 0, losses) / nonzero(norms)
        rows = next_average(state.rows, 1 - share, jacobian, factors)
        w = state.weights
        w = torch.softmax(w - rate * (gramian(rows) @ w + rho * w), dim=0)
        return average_as_weights(state.rows, 1 - share, factors, w), MocoState(rows, w, calls)

    return Aggregator(jacobian_and_losses, init, update)
