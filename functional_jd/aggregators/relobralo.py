"""ReLoBRaLo: weights by the progress of the losses since the last call, and since the first at random."""

from typing import NamedTuple

import torch
from torch import Tensor

from functional_jd.aggregation import Aggregator, losses
from functional_jd.core.arguments import FROM_0_TO_1, POSITIVE, Number, number
from functional_jd.core.safe import nan_unless
from functional_jd.random import split, uniform
from functional_jd.random.keys import check_key


class RelobraloState(NamedTuple):
    """The state of ReLoBRaLo: the next key, the last weights, and the losses of the first and of the last call."""

    key: Tensor
    weights: Tensor
    first: Tensor
    before: Tensor


def relobralo(key: Tensor, temperature: Number = 0.1, alpha: Number = 0.999, rho: Number = 0.999) -> Aggregator:
    """Give losses that fell least more weight, compared with the last call, and at random with the first.

    `b(t') = m softmax(L / (temperature L(t')))` compares with the losses of call t'. From ones, `w <- alpha v + (1 -
    alpha) b(last)`, where v is w with probability rho, and else `b(first)`.

    Args:
        key: int64 `[2]`, from `functional_jd.random.key`; do not use it again.
        temperature: larger values give more uniform weights; positive.
        alpha: weight of the past, in [0, 1].
        rho: probability of continuing from the last weights rather than from the first losses, in [0, 1].

    Returns:
        A rule that needs the losses only. Weights are positive with sum m.

    Guarantees:
        Invariant to the unit of a loss. The same state gives the same random numbers on every device. Losses must be
        positive: else weights are NaN.

    Source:
        Bischof & Kraus, 2021, arXiv 2110.09813, equations for random lookback.
    """
    check_key(key)
    temperature = number("temperature", temperature, POSITIVE, "The default is 0.1.")
    alpha = number("alpha", alpha, FROM_0_TO_1, "The default is 0.999.")
    rho = number("rho", rho, FROM_0_TO_1, "The default is 0.999.")

    def init(values: Tensor) -> RelobraloState:
        return RelobraloState(key.to(values.device), torch.ones_like(values), values.clone(), values.clone())

    def update(values: Tensor, state: RelobraloState) -> tuple[Tensor, RelobraloState]:
        L = nan_unless(values > 0, values)
        subkey, next_key = split(state.key)
        since_first, since_last = (
            len(L) * torch.softmax(L / (temperature * past), dim=0) for past in (state.first, state.before)
        )
        stays = (uniform(subkey, (), dtype=L.dtype) < rho).to(L) + 0 * rho
        past = stays * state.weights + (1 - stays) * since_first
        weights = alpha * past + (1 - alpha) * since_last
        return weights, RelobraloState(next_key, weights, state.first, values)

    return Aggregator(losses, init, update, takes=("relobralo", POSITIVE))
