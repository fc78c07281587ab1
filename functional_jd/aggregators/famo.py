"""FAMO: an equal relative decrease of all losses, measured after each step."""

from typing import NamedTuple

import torch
from torch import Tensor

from functional_jd.aggregation import Aggregator, Losses, loss_count
from functional_jd.aggregation.views import losses as losses_view
from functional_jd.core.arguments import NOT_NEGATIVE, POSITIVE, Number, check_type, number
from functional_jd.core.safe import sqrt_or_zero

_BETAS, _EPSILON = (0.9, 0.999), 1e-8  # of Adam


class FamoState(NamedTuple):
    """The state of FAMO."""

    logits: Tensor  # float64 `[m]`
    first: Tensor  # float64 `[m]`: Adam's running mean of the gradients of the logits
    second: Tensor  # float64 `[m]`: Adam's running mean of their squares
    calls: Tensor  # int64 `[]`: the number of calls
    before: Tensor  # float64 `[m]`: the losses of the last call
    after: Tensor  # float64 `[m]`: the losses after its step, if measured
    measured: Tensor  # bool `[]`: whether `after` was measured


def famo(rate: Number = 0.025, decay: Number = 1e-3) -> Aggregator:
    """Weight the log losses, and lower the logits of those that decreased more than the others.

    `s = c sum_i z_i log L_i`, with `z = softmax(logits)` and c, a constant, such that the weights sum to one: `weights
    = softmax(logits - log L)`. The logits start at 0 and take an Adam step along `(dz/dlogits)' (log L_before - log
    L_after) + decay logits`.

    Args:
        rate: learning rate of the logits, not negative. The paper uses 0.025.
        decay: weight decay of the logits; not negative.

    Returns:
        A rule that needs the losses only. Weights lie in the simplex.

    Guarantees:
        The logits are updated at the beginning of the next call. Pass the losses after the step, on the same batch, to
        `famo_after_step`, as the paper does. Without it the losses of the next call are used, which are noisier.
        Invariant to the unit of the losses. Losses must be positive.

    Source:
        Liu, Feng, Stone & Liu, NeurIPS 2023, arXiv 2306.03792, algorithm 1; the authors' code for Adam, with a decay of
        1e-5. No 1e-8 is added to the losses.
    """
    rate = number("rate", rate, NOT_NEGATIVE, "The default is 0.025.")
    decay = number("decay", decay, NOT_NEGATIVE, "The default is 0.001.")

    def init(losses: Tensor) -> FamoState:
        # One tensor per field: torch.compile recompiles in the second step if a tensor occurs twice in a state.
        logits, first, second = (torch.zeros_like(losses) for _ in range(3))
        calls = losses.new_zeros((), dtype=torch.int64)
        measured = losses.new_zeros((), dtype=torch.bool)
        return FamoState(logits, first, second, calls, losses.clone(), losses.clone(), measured)

    def update(losses: Tensor, state: FamoState) -> tuple[Tensor, FamoState]:
        after = torch.where(state.measured, state.after, losses)
        decrease = torch.where(state.calls == 0, 0, state.before.log() - after.log())
        z = torch.softmax(state.logits, dim=0)
        logits, first, second = _adam(state, z * (decrease - z @ decrease) + decay * state.logits, rate)
        new = FamoState(logits, first, second, state.calls + 1, losses, after, torch.zeros_like(state.measured))
        return torch.softmax(logits - losses.log(), dim=0), new

    return Aggregator(losses_view, init, update, takes=("famo", POSITIVE))


def famo_after_step(state: FamoState, losses: Losses) -> FamoState:
    """Pass `famo` the losses after the step, on the batch of the step.

    Args:
        state: the rule's state after the step.
        losses: those after the step, without a graph: a tensor or pytree with m elements in leaf order.

    Returns:
        The state for the next call. Only the first measurement after a call counts: after a skipped step, whose losses
        belong to another batch, the state does not change.
    """
    check_type("state", state, FamoState, "Pass the state.aggregator of a rule famo().")
    m = loss_count(losses)
    values = losses_view((), losses=losses)
    if m != len(state.logits):
        raise ValueError(
            f"famo_after_step: expected {len(state.logits)} losses, as in the step, found {m}. "
            "Pass what the loss function returns, unreduced."
        )
    after = torch.where(state.measured, state.after, values)
    return state._replace(after=after, measured=torch.ones_like(state.measured))


def _adam(state: FamoState, gradient: Tensor, rate: Number) -> tuple[Tensor, Tensor, Tensor]:
    """An Adam step, counted from the second call on, as the first one has gradient zero."""
    step = state.calls.clamp(min=1).to(state.logits.dtype)  # of integers a float32 power would lose half of the digits
    first = _BETAS[0] * state.first + (1 - _BETAS[0]) * gradient
    second = _BETAS[1] * state.second + (1 - _BETAS[1]) * (gradient * gradient)
    mean, square = first / (1 - _BETAS[0] ** step), second / (1 - _BETAS[1] ** step)
    return state.logits - rate * mean / (sqrt_or_zero(square, square == 0) + _EPSILON), first, second
