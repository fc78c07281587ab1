"""Division and refusal without exceptions: what formulas do where a denominator is zero or a number is out of range."""

import torch
from torch import Tensor


def nonzero(x: Tensor, otherwise: Tensor | float = 1) -> Tensor:
    """`x`, with another number where it is zero: a denominator whose quotient, and its derivative, are finite."""
    return torch.where(x == 0, otherwise, x)


def divide(numerator: Tensor | float, denominator: Tensor, otherwise: Tensor | float = 0.0) -> Tensor:
    """`numerator / denominator`, and `otherwise`, with derivative zero, where the denominator is zero."""
    return torch.where(denominator == 0, otherwise, numerator / nonzero(denominator))


def sqrt_or_zero(x: Tensor, zero: Tensor) -> Tensor:
    """The square root of `x`, and 0, with derivative zero, where `zero` holds."""
    return torch.where(zero, 0, torch.where(zero, 1, x).sqrt())


def nan_unless(holds: Tensor, x: Tensor) -> Tensor:
    """`x` where `holds`, else NaN: what is out of range shows in the direction instead of raising."""
    return torch.where(holds, x, torch.nan)


def with_nan_of(x: Tensor, source: Tensor) -> Tensor:
    """`x`, but NaN where `source`, which must broadcast with it, is not finite."""
    return x + 0 * source


def order_of(x: Tensor) -> Tensor:
    """The largest magnitude in `x`, constant to derivatives, 1 where all is zero: a divisor before squares."""
    return nonzero(x.detach().abs().amax())


def cosines(gramian: Tensor) -> tuple[Tensor, Tensor]:
    """The cosines of the angles between the rows, and the norms of the rows.

    `C_ij = G_ij / sqrt(d_i d_j)`, `norms = sqrt(d)` with d the diagonal of the float64 G `[*, m, m]`. A row of zeros
    has norm 1 and cosine 0 with every row, itself included: so no denominator is zero, and no row conflicts with it.
    C is invariant, bit for bit, to scaling rows by powers of two.
    """
    squares = gramian.diagonal(dim1=-2, dim2=-1)
    norms = squares.masked_fill(squares == 0, 1).sqrt()
    return gramian / norms.unsqueeze(-1) / norms.unsqueeze(-2), norms
