"""Unit sum: the weighted sum of the unit rows, or of the rows by moving averages of their norms."""

from typing import NamedTuple

import torch
from torch import Tensor

from functional_jd.aggregation import Aggregator, Numbers, norms, preferences, stateless
from functional_jd.core.arguments import BELOW_1, Number, number
from functional_jd.core.safe import divide, nonzero


class UnitSumState(NamedTuple):
    """The state of a unit sum with momentum, float64 `[m]`."""

    norms: Tensor  # moving averages of the norms, from 0
    shares: Tensor  # the part of an average that calls have filled, which divides it


def unit_sum(preference: Numbers | None = None, momentum: Number = 0.0) -> Aggregator:
    """Sum the rows, each divided by its norm: every objective moves the parameters equally far.

    For losses in units that cannot be compared. `direction = sum_i u_i g_i / n_i`, with n the norms, or with momentum
    their moving average: a row that vanishes then does so in the direction too.

    Args:
        preference: u `[m]`, not negative, one at least positive. Default: `1 / m` each.
        momentum: weight of the previous average, in [0, 1).

    Returns:
        A rule that needs the norms of the rows.

    Guarantees:
        Invariant to the unit of a loss. The direction is never longer than the sum of u with momentum 0, where rows of
        zeros get weight 0. It may conflict.

    Source:
        Défossez et al., TMLR 2023, arXiv 2210.13438: the balancer of EnCodec, whose code divides u by its sum and adds
        1e-12 to the norms; arXiv 2509.23915.
    """
    u = preferences("preference", preference)
    keep = number("momentum", momentum, BELOW_1, "Use 0 for none.")
    if not isinstance(keep, Tensor) and keep == 0:
        return stateless(norms, lambda n: divide(u(n), n))

    def update(n: Tensor, state: UnitSumState) -> tuple[Tensor, UnitSumState]:
        new = UnitSumState(keep * state.norms + (1 - keep) * n, keep * state.shares + (1 - keep))
        return divide(u(n), new.norms / nonzero(new.shares)), new

    return Aggregator(norms, lambda n: UnitSumState(torch.zeros_like(n), torch.zeros_like(n)), update)
