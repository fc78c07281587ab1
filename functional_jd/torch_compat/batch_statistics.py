"""Batch normalization of a single example, which has no statistics of a batch."""

from typing import Any

import torch
from torch import Tensor, nn

BATCH_NORMS: frozenset[Any] = frozenset([nn.functional.batch_norm, torch.batch_norm, torch.native_batch_norm])
"""The ops that normalize by the statistics of a batch. `training` is their sixth argument, `momentum` the next."""


def refuse_statistics_of_one(args: Any, kwargs: Any, where: str) -> None:
    """Raise ValueError if one of `BATCH_NORMS` is called for the statistics of a batch of one.

    With momentum 0, and without averages to move, it is no layer: convolutions standardize their weights so, as a batch
    of one.

    Args:
        args: what it is called with.
        kwargs: what it is called with, by name.
        where: the function that the user called.
    """
    training = args[5] if len(args) > 5 else kwargs.get("training", False)
    momentum = args[6] if len(args) > 6 else kwargs.get("momentum")
    average = args[1] if len(args) > 1 else kwargs.get("running_mean")
    x = args[0] if args else kwargs.get("input")
    standardizes = momentum == 0 and average is None
    if training and not standardizes and isinstance(x, Tensor) and x.ndim and x.shape[0] == 1:
        raise ValueError(
            f"{where}: expected a loss of one example without BatchNorm in training mode, found batch_norm of a batch "
            "of one, which has no statistics. Use eval mode, GroupNorm, or plain losses without per_example."
        )
