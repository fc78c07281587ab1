"""Inner products of the rows of a leaf on two batches."""

from collections.abc import Sequence
from functools import reduce

import torch
from torch import Tensor

from functional_jd.core.rows import as_matrix, cross_inner_products
from functional_jd.engines.choose import crossed_factors_are_cheaper
from functional_jd.engines.gramian.factors import (
    Factors,
    column_groups,
    products_of_sides,
    rows_of_factors,
    side_by_side,
)
from functional_jd.engines.gramian.products import crossed


def crossed_leaf(
    parts: Sequence[Factors | Tensor], others: Sequence[Factors | Tensor], leaf: Tensor, m: int, k: int
) -> Tensor:
    """The inner products of the rows of a leaf, which are the sums of these parts: float64 `[m, k]`."""
    if not parts or not others:
        return leaf.new_zeros(m, k, dtype=torch.float64)
    f, other = _one_use(parts), _one_use(others)
    if f is None or other is None or f.left.ndim != other.left.ndim or f.right.shape[2:] != other.right.shape[2:]:
        return cross_inner_products(_rows(parts, leaf, m), _rows(others, leaf, k))
    own = {len(f.left), len(f.right)} == {m} and {len(other.left), len(other.right)} == {k}
    if own and crossed_factors_are_cheaper(f, other, leaf):
        return crossed(_in_float64(f), _in_float64(other))
    if f.left.ndim == 2:
        return cross_inner_products(_rows(parts, leaf, m), _rows(others, leaf, k))
    pieces = zip(column_groups(f, max(m, k)), column_groups(other, max(m, k)), strict=True)
    return reduce(torch.add, [cross_inner_products(*(_products(piece) for piece in pair)) for pair in pieces])


def _one_use(parts: Sequence[Factors | Tensor]) -> Factors | None:
    """The factors of all parts side by side, if they have one form."""
    factors = [part for part in parts if isinstance(part, Factors)]
    alike = len({(f.left.ndim, f.left.shape[2:], f.right.shape[2:]) for f in factors}) == 1
    if not alike or len(factors) < len(parts):
        return None
    return factors[0] if len(factors) == 1 else side_by_side(factors)


def _rows(parts: Sequence[Factors | Tensor], leaf: Tensor, m: int) -> Tensor:
    rows = [rows_of_factors(part, leaf, m) if isinstance(part, Factors) else part for part in parts]
    return as_matrix(sum(rows[1:], start=rows[0]))


def _products(f: Factors) -> Tensor:
    return as_matrix(products_of_sides(f))


def _in_float64(f: Factors) -> Factors:
    return Factors(f.left if f.left.ndim == 2 else f.left.double(), f.right.double())
