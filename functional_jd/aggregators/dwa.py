"""DWA: objectives whose losses fall slowly from epoch to epoch count more."""

from typing import NamedTuple

import torch
from torch import Tensor

from functional_jd.aggregation.aggregate import Aggregator
from functional_jd.aggregation.views import losses
from functional_jd.core.safe import divide, nonzero


class DwaState(NamedTuple):
    """What DWA remembers.

    Attributes:
        total: float64 `[m]`: the sum of the losses of this epoch.
        calls: int64 `[]`: how many there were in this epoch.
        average: float64 `[m]`: the mean losses of the epoch before.
        ratio: float64 `[m]`: those in proportion to the epoch before that; ones as long as there are not two.
        epochs: int64 `[]`: how many have ended.
    """

    total: Tensor
    calls: Tensor
    average: Tensor
    ratio: Tensor
    epochs: Tensor


def dwa(temperature: float = 2.0) -> Aggregator:
    """Weigh each loss by what was left of it from one epoch to the next.

    `weights = m softmax(r / temperature)`, with `r_i = A_i(e - 1) / A_i(e - 2)` and A(e) the mean losses of epoch e;
    in the first two epochs `r = 1`. Every call adds its losses to the mean of its epoch; `end_epoch` ends it.

    Args:
        temperature: the larger, the more uniform the weights; positive. The paper takes 2.

    Returns:
        A rule that looks at the losses: one weighted backward pass is all it costs. Weights float64 `[m]`, positive,
        adding up to m; constant in the losses of the call itself, differentiable with respect to the state.

    Raises:
        ValueError: `temperature` out of range.

    Laws:
        In the first two epochs it is `total()`, and where all losses fall by the same share. The unit of a loss does
        not matter. Losses should keep a sign; a mean of zero counts as one that did not change. Losses that are not
        finite give a state that is not: carry on with the old one.

    Source:
        Liu, Johns & Davison, End-to-end multi-task learning with attention, CVPR 2019, equation 7.

    Example:
        >>> state = state._replace(aggregator=end_epoch(state.aggregator))
    """
    if not 0 < temperature < float("inf"):
        raise ValueError(f"dwa: temperature must be positive and finite, found {temperature}. The default is 2.")

    def init(losses: Tensor) -> DwaState:
        # One tensor each: a tensor that stands twice in a state makes torch.compile start again in the second step.
        total, average = torch.zeros_like(losses), torch.zeros_like(losses)
        calls, epochs = (losses.new_zeros((), dtype=torch.int64) for _ in range(2))
        return DwaState(total, calls, average, torch.ones_like(losses), epochs)

    def update(losses: Tensor, state: DwaState) -> tuple[Tensor, DwaState]:
        weights = len(losses) * torch.softmax(state.ratio / temperature, dim=0)
        return weights, state._replace(total=state.total + losses, calls=state.calls + 1)

    return Aggregator(losses, init, update)


def end_epoch(state: DwaState) -> DwaState:
    """End an epoch of `dwa`: its mean losses become those of the epoch before.

    `ratio <- average' / average`, `average' = total / calls`

    Args:
        state: what the rule remembers after the last call of the epoch.

    Returns:
        What it starts the next epoch with.

    Laws:
        Pure. An epoch without a call is none: the state stays, bit for bit.
    """
    empty = state.calls == 0
    average = state.total / nonzero(state.calls)
    ratio = torch.where(state.epochs == 0, 1, divide(average, state.average, otherwise=1))
    return DwaState(
        torch.zeros_like(state.total),
        torch.zeros_like(state.calls),
        torch.where(empty, state.average, average),
        torch.where(empty, state.ratio, ratio),
        state.epochs + ~empty,
    )
