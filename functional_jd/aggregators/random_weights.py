"""Random weights: the rows count what chance says, anew at every call."""

import torch
from torch import Tensor

from functional_jd.aggregation.aggregate import Aggregator
from functional_jd.aggregation.views import no_gradients
from functional_jd.random import normal, split


def random_weights(key: Tensor) -> Aggregator:
    """The sum of the rows with random weights that add up to one.

    `weights = softmax(z)`, with z standard normal, drawn anew at every call.

    Args:
        key: int64 `[2]`, as `functional_jd.random.key` makes it; do not use it again.

    Returns:
        A rule that looks at nothing: one weighted backward pass is all it costs. Its state is the key of the next call,
        int64 `[2]`, on the Jacobian's device.

    Raises:
        TypeError, ValueError: `key` is none.

    Laws:
        The same state, the same random numbers, on every device and under every transform; the key advances at every
        call. Weights are positive and add up to one; on average `mean()`.

    Source:
        Lin, Ye, Zhang & Tsang, Reasonable effectiveness of random weighting, TMLR 2022, arXiv 2111.10603, algorithm 2.
    """
    split(key, 1)  # what is no key is refused here, not at the first call

    def update(seen: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        drawn, carried = split(state)
        return torch.softmax(normal(drawn, seen.shape, dtype=seen.dtype), dim=0), carried

    return Aggregator(no_gradients, lambda seen: key.to(seen.device), update)
