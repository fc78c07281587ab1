"""Random batches, and libraries that may be missing."""

from functools import cache

import pytest
import torch


def tokens(n, *shape, vocabulary=32, seed=0):
    """n tensors of token numbers."""
    draw = torch.Generator().manual_seed(seed)
    return [torch.randint(3, vocabulary, shape, generator=draw) for _ in range(n)]


def numbers(n, *shape, seed=1):
    draw = torch.Generator().manual_seed(seed)
    return [torch.randn(*shape, dtype=torch.float64, generator=draw) for _ in range(n)]


def classes(n, size, of, seed=2):
    draw = torch.Generator().manual_seed(seed)
    return [torch.randint(of, (size,), generator=draw) for _ in range(n)]


def library(name):
    """The library, or a skip where it is not installed."""
    _complete_torchvision()
    return pytest.importorskip(name)


@cache
def _complete_torchvision():
    """Make torchvision, which the others import, importable where its build is for CUDA and torch's for the CPU.

    Its operators are missing there, and it describes two of them while it is imported. No model here calls them, so it
    is enough that they are declared.
    """
    try:
        import torchvision  # noqa: F401
    except ImportError:
        return
    except RuntimeError:
        for name in ("nms", "qnms"):
            torch.library.define(f"torchvision::{name}", "(Tensor dets, Tensor scores, float threshold) -> Tensor")
