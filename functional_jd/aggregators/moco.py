"""MoCo: moving averages of the rows, and weights that approach their min-norm point."""

from typing import NamedTuple

import torch
from torch import Tensor

from functional_jd.aggregation import Aggregator, Jacobian, Tree, gramian, jacobian_and_losses
from functional_jd.aggregation.combine import averaged, zero_rows
from functional_jd.aggregation.views import row_norms
from functional_jd.core.arguments import ABOVE_0_TO_1, NOT_NEGATIVE, Number, number
from functional_jd.core.safe import nan_unless, nonzero


class MocoState(NamedTuple):
    """The state of MoCo, which takes as much memory as the Jacobian."""

    rows: Tree  # pytree like the Jacobian, at least float32: averages of the rows, as long as their losses
    weights: Tensor  # float64 `[m]`, of the averaged rows
    calls: Tensor  # int64 `[]`


def moco(
    beta: Number = 0.5, gamma: Number = 0.1, rho: Number = 0.0, *, beta_sigma: Number = 0.5, gamma_sigma: Number = 0.5
) -> Aggregator:
    """Weight moving averages of the rows, so that noise does not bias the weights.

    `Y_i <- Y_i - b_t (Y_i - loss_i g_i / |g_i|)`, `w <- softmax(w - c_t (Y Y' + rho I) w)`, `direction = w'Y`, with
    `b_t = beta / t^beta_sigma` and `c_t = gamma / t^gamma_sigma` in call t = 1, 2, ..., from Y = 0 and w uniform.

    Args:
        beta: weight of new rows in the average, in (0, 1].
        gamma: step size of the weights, in units of one over a squared loss; not negative.
        rho: regularisation towards uniform weights, in units of a squared loss; not negative.
        beta_sigma, gamma_sigma: exponents of the decay of `beta` and `gamma` over the calls, not negative.

    Returns:
        A rule that needs the full Jacobian and the losses. Its weights are a pytree like the Jacobian with leaves
        `AffineWeights`: weights of the current rows, and the term from earlier rows; w is in the state. A row of zeros
        is a kink.

    Guarantees:
        Invariant to scaling a row; below float64 as long as `loss_i / |g_i|` is between 1e-38 and 3e38. With `gamma` 0
        the weights stay uniform. Losses must not be negative: else the direction is NaN.

    Source:
        Fernando et al., ICLR 2023, arXiv 2210.12624: algorithm 1, as in the authors' code that LibMTL publishes, and
        unlike the paper: rows are rescaled to the length of their loss, and softmax replaces the projection on the
        simplex, so that each weight stays within a factor of e where gradients are short.
    """
    beta = number("beta", beta, ABOVE_0_TO_1, "The default is 0.5.")
    gamma, rho, beta_sigma, gamma_sigma = (
        number(name, value, NOT_NEGATIVE, "Use 0 for none.")
        for name, value in (("gamma", gamma), ("rho", rho), ("beta_sigma", beta_sigma), ("gamma_sigma", gamma_sigma))
    )

    def init(view: tuple[Jacobian, Tensor]) -> MocoState:
        jacobian, losses = view
        uniform = torch.full_like(losses, 1 / len(losses))
        return MocoState(zero_rows(jacobian), uniform, torch.zeros((), dtype=torch.int64, device=losses.device))

    def update(view: tuple[Jacobian, Tensor], state: MocoState) -> tuple[Tree, MocoState]:
        jacobian, losses = view
        calls = state.calls + 1
        b, c = beta / calls.double() ** beta_sigma, gamma / calls.double() ** gamma_sigma
        factors = b * nan_unless(losses >= 0, losses) / nonzero(row_norms(jacobian))
        rows, as_weights = averaged(state.rows, 1 - b, jacobian, factors)
        w = state.weights
        w = torch.softmax(w - c * (gramian(rows) @ w + rho * w), dim=0)
        return as_weights(w), MocoState(rows, w, calls)

    return Aggregator(jacobian_and_losses, init, update, takes=("moco", NOT_NEGATIVE))
