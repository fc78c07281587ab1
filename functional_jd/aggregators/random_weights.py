"""Random weights: drawn independently in every call."""

import torch
from torch import Tensor

from functional_jd.aggregation import Aggregator, no_gradients
from functional_jd.random import normal, split
from functional_jd.random.keys import check_key


def random_weights(key: Tensor) -> Aggregator:
    """The sum of the rows with random weights that sum to one.

    `weights = softmax(z)`, with z standard normal, drawn in every call.

    Args:
        key: int64 `[2]`, from `functional_jd.random.key`; do not use it again.

    Returns:
        A rule that needs no gradients. Its state is the next key.

    Guarantees:
        The same state gives the same numbers on every device. The expected direction is that of `mean()`.

    Source:
        Lin, Ye, Zhang & Tsang, TMLR 2022, arXiv 2111.10603, algorithm 2.
    """
    check_key(key)

    def update(zeros: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        subkey, next_key = split(state)
        return torch.softmax(normal(subkey, zeros.shape, dtype=zeros.dtype), dim=0), next_key

    return Aggregator(no_gradients, lambda zeros: key.to(zeros.device), update)
