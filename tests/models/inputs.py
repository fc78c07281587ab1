"""Random batches, and libraries that may be missing."""

from functools import cache

import pytest
import torch


def tokens(*shape):
    """Numbers of tokens, of 32."""
    return torch.randint(3, 32, shape, generator=torch.Generator().manual_seed(0))


def numbers(*shape):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


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
