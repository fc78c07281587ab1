"""FAMO: all losses fall by the same share, as far as the losses after each step tell."""

from typing import NamedTuple

import torch
from torch import Tensor

from functional_jd.aggregation.aggregate import Aggregator
from functional_jd.aggregation.views import losses as look_at_losses
from functional_jd.core.safe import sqrt_or_zero
from functional_jd.core.types import Losses

_BETAS = (0.9, 0.999)
# Adam's, without unit here: a change of a loss by this share of itself is next to none.
_STILL = 1e-8


class FamoState(NamedTuple):
    """What FAMO remembers.

    Attributes:
        logits: float64 `[m]`.
        first: float64 `[m]`: Adam's running mean of the slopes of the logits.
        second: float64 `[m]`: and of their squares.
        calls: int64 `[]`: how many there were.
        before: float64 `[m]`: the losses of the last call.
        after: float64 `[m]`: those after its step, if measured.
        measured: bool `[]`: whether they were.
    """

    logits: Tensor
    first: Tensor
    second: Tensor
    calls: Tensor
    before: Tensor
    after: Tensor
    measured: Tensor


def famo(rate: float = 0.025, decay: float = 1e-3) -> Aggregator:
    """Weigh the logarithms of the losses, and lower the logits of those that fell more than the others.

    `s = c sum_i z_i log L_i`, with `z = softmax(logits)` and c, a constant, such that the weights add up to one:
    `weights = softmax(logits - log L)`. The logits start at 0 and take a step of Adam along
    `(dz/dlogits)' (log L_before - log L_after) + decay logits`.

    Args:
        rate: of the logits, not negative. The paper takes 0.025.
        decay: how strongly the logits are held near 0; not negative.

    Returns:
        A rule that looks at the losses: one weighted backward pass is all it costs. Its weights, float64 `[m]`, lie in
        the simplex; differentiable with respect to losses and state, c included.

    Raises:
        ValueError: `rate` or `decay` out of range.

    Laws:
        What the last step did to the losses is learned at the beginning of the next call. Hand over the losses after
        the step, on the same batch, with `after_step`, as the paper does; without it those of the next call stand for
        them: on another batch, hence noisier, and without a further forward pass. The unit of the losses does not
        matter, but for the rounding of their logarithms. Losses must be positive: at zero and below, weights and state
        are not finite; carry on with the old state.

    Source:
        Liu, Feng, Stone & Liu, FAMO: fast adaptive multitask optimization, NeurIPS 2023, arXiv 2306.03792, algorithm 1;
        the paper's code for Adam.

    Differs:
        No 1e-8 is added to the losses. The decay is 1e-3, as in TorchJD and LibMTL; the paper's code has 1e-5.

    Example:
        >>> state, info = step(state, batch, **method)
        >>> state = state._replace(aggregator=after_step(state.aggregator, losses(state.params, batch)))
    """
    if not 0 <= rate < float("inf"):
        raise ValueError(f"famo: rate must be finite and not negative, found {rate}. The default is 0.025.")
    if not 0 <= decay < float("inf"):
        raise ValueError(f"famo: decay must be finite and not negative, found {decay}. The default is 0.001.")

    def init(losses: Tensor) -> FamoState:
        # One tensor each: a tensor that stands twice in a state makes torch.compile start again in the second step.
        logits, first, second = (torch.zeros_like(losses) for _ in range(3))
        calls = losses.new_zeros((), dtype=torch.int64)
        measured = losses.new_zeros((), dtype=torch.bool)
        return FamoState(logits, first, second, calls, losses.clone(), losses.clone(), measured)

    def update(losses: Tensor, state: FamoState) -> tuple[Tensor, FamoState]:
        after = torch.where(state.measured, state.after, losses)
        fall = torch.where(state.calls == 0, 0, state.before.log() - after.log())
        z = torch.softmax(state.logits, dim=0)
        slope = z * (fall - z @ fall) + decay * state.logits
        logits, first, second = _adam(state, slope, rate)
        new = FamoState(logits, first, second, state.calls + 1, losses, after, torch.zeros_like(state.measured))
        return torch.softmax(logits - losses.log(), dim=0), new

    return Aggregator(look_at_losses, init, update)


def after_step(state: FamoState, losses: Losses) -> FamoState:
    """Tell `famo` the losses after the step, on the batch of the step.

    Args:
        state: what the rule remembers after the step.
        losses: the losses there: a tensor or pytree with m elements in leaf order.

    Returns:
        The state for the next call.

    Raises:
        ValueError: not m losses.

    Laws:
        Pure. Only the first measurement after a call counts: after a step that was skipped, whose losses belong to
        another batch, the state stays as it is.
    """
    values = look_at_losses((), losses=losses)
    if len(values) != len(state.logits):
        raise ValueError(
            f"after_step: expected {len(state.logits)} losses, as in the step, found {len(values)}. "
            "Hand over what the losses return, unreduced."
        )
    after = torch.where(state.measured, state.after, values)
    return state._replace(after=after, measured=torch.ones_like(state.measured))


def _adam(state: FamoState, slope: Tensor, rate: float) -> tuple[Tensor, Tensor, Tensor]:
    """A step of Adam, from the second call on: in the first one there is nothing to learn from."""
    number = state.calls.clamp(min=1).double()  # a float32 power would cost half of the digits
    first, second = (
        beta * old + (1 - beta) * new
        for beta, old, new in zip(_BETAS, (state.first, state.second), (slope, slope * slope), strict=True)
    )
    mean, square = first / (1 - _BETAS[0] ** number), second / (1 - _BETAS[1] ** number)
    return state.logits - rate * mean / (sqrt_or_zero(square, square == 0) + _STILL), first, second
