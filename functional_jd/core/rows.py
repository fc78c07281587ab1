"""A leaf of rows, `[m, *p]`, as formulas need it: a matrix, wide, with numbers beside it; and products of rows."""

from functools import reduce

import torch
from torch import Tensor

# Numbers that are lifted to float64 at once: what fits the cache, so that no second Jacobian is made; and the number of
# rows from which two small products are faster than a large one, of which half is known.
CACHED, HALVE_FROM = 1 << 17, 128


def at_least_float32(x: Tensor) -> Tensor:
    """A floating-point tensor in at least float32."""
    return x.float() if x.dtype.itemsize < 4 else x


def as_matrix(leaf: Tensor) -> Tensor:
    """`[m, n]`; what is that already stays untouched: torch 2.13 cannot compile forward mode through a reshape."""
    return leaf if leaf.ndim == 2 else leaf.reshape(leaf.shape[0], leaf.shape[1:].numel())


def per_row(numbers: Tensor, leaf: Tensor) -> Tensor:
    """One number per row, `[m]`, as `[m, 1, ..., 1]`, so that it multiplies the rows of a leaf."""
    return numbers.reshape(-1, *[1] * (leaf.ndim - 1))


def inner_products(matrix: Tensor) -> Tensor:
    """Inner products of rows `[m, n]`: float64 `[m, m]`, lifted some columns at a time.

    Float32 would be twice as fast, but its rounding of 1e-8 makes dependent rows independent to rules, which cut
    eigenvalues at that of float64.
    """
    return reduce(torch.add, [symmetric_product(block.double()) for block in _blocks(matrix)])


def cross_inner_products(left: Tensor, right: Tensor) -> Tensor:
    """Inner products of the rows of two matrices `[m, n]`, likewise."""
    pairs = zip(_blocks(left), _blocks(right), strict=True)
    return reduce(torch.add, [a.double() @ b.double().mT for a, b in pairs])


def symmetric_product(rows: Tensor) -> Tensor:
    """`rows @ rows.mT` of rows `[*, m, n]`, where what lies beside the diagonal is computed once."""
    if rows.shape[-2] < HALVE_FROM:
        return rows @ rows.mT
    upper, lower = rows.tensor_split(2, dim=-2)
    off = upper @ lower.mT
    above, below = torch.cat([symmetric_product(upper), off], -1), torch.cat([off.mT, symmetric_product(lower)], -1)
    return torch.cat([above, below], -2)


def _blocks(matrix: Tensor) -> tuple[Tensor, ...]:
    return matrix.split(max(1, CACHED // len(matrix)), dim=1)
