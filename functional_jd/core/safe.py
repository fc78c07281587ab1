"""Division and refusal without exceptions: what formulas do where a denominator is zero or a number is out of range."""

import torch
from torch import Tensor


def nonzero(x: Tensor, otherwise: float = 1.0) -> Tensor:
    """`x`, with another number where it is zero: a denominator whose quotient, and its derivative, are finite."""
    return torch.where(x == 0, otherwise, x)


def divide(numerator: Tensor | float, denominator: Tensor, otherwise: float = 0.0) -> Tensor:
    """`numerator / denominator`, and `otherwise`, with derivative zero, where the denominator is zero."""
    return torch.where(denominator == 0, otherwise, numerator / nonzero(denominator))


def nan_unless(holds: Tensor, x: Tensor) -> Tensor:
    """`x` where `holds`, else NaN: what is out of range shows in the direction instead of raising."""
    return torch.where(holds, x, torch.nan)
