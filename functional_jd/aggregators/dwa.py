"""DWA: larger weights for losses that decrease slowly from epoch to epoch."""

from typing import NamedTuple

import torch
from torch import Tensor

from functional_jd.aggregation import Aggregator, losses
from functional_jd.core.arguments import POSITIVE, Number, check_type, number
from functional_jd.core.safe import divide, nonzero


class DwaState(NamedTuple):
    """The state of DWA."""

    total: Tensor  # float64 `[m]`: the sum of the losses of this epoch
    calls: Tensor  # int64 `[m]`: the number of calls in this epoch, without those of a loss of 0, which is absent
    average: Tensor  # float64 `[m]`: the mean losses of the previous epoch
    ratio: Tensor  # float64 `[m]`: these divided by those of the epoch before; 1 until two epochs have ended
    epochs: Tensor  # int64 `[]`: the number of epochs that have ended


def dwa(temperature: Number = 2.0) -> Aggregator:
    """Weight each loss by its ratio between the last two epochs.

    `weights = m softmax(r / temperature)`, with `r_i = A_i(e - 1) / A_i(e - 2)` and A(e) the mean losses of epoch e; in
    the first two epochs `r = 1`. Every call adds its losses to the mean of the epoch, which `dwa_end_epoch` ends.

    Args:
        temperature: larger values give more uniform weights; positive. The paper uses 2.

    Returns:
        A rule that needs the losses only. Weights are positive with sum m, and constant in the losses of the call
        itself.

    Guarantees:
        Equal to `total()` in the first two epochs, and if all losses decrease by the same factor. Losses should keep
        their sign; a mean of zero is treated as unchanged.

    Source:
        Liu, Johns & Davison, End-to-end multi-task learning with attention, CVPR 2019, equation 7.
    """
    temperature = number("temperature", temperature, POSITIVE, "The default is 2.")

    def init(losses: Tensor) -> DwaState:
        # One tensor per field: torch.compile recompiles in the second step if a tensor occurs twice in a state.
        total, average = torch.zeros_like(losses), torch.zeros_like(losses)
        calls, epochs = torch.zeros_like(losses, dtype=torch.int64), losses.new_zeros((), dtype=torch.int64)
        return DwaState(total, calls, average, torch.ones_like(losses), epochs)

    def update(losses: Tensor, state: DwaState) -> tuple[Tensor, DwaState]:
        weights = len(losses) * torch.softmax(state.ratio / temperature, dim=0)
        return weights, state._replace(total=state.total + losses, calls=state.calls + losses.ne(0))

    return Aggregator(losses, init, update)


def dwa_end_epoch(state: DwaState) -> DwaState:
    """End an epoch of `dwa`: its mean losses become those of the previous epoch.

    `ratio <- average' / average`, `average' = total / calls`. Without a call in the epoch, nothing changes.

    Args:
        state: the rule's state after the last call of the epoch.

    Returns:
        The state for the next epoch.
    """
    check_type("state", state, DwaState, "Pass the state.aggregator of a rule dwa().")
    empty = state.calls == 0
    average = state.total / nonzero(state.calls)
    ratio = torch.where(state.epochs == 0, 1, divide(average, state.average, otherwise=1))
    return DwaState(
        torch.zeros_like(state.total),
        torch.zeros_like(state.calls),
        torch.where(empty, state.average, average),
        torch.where(empty, state.ratio, ratio),
        state.epochs + ~empty.all(),
    )
