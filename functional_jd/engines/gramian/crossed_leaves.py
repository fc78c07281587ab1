"""Inner products of the rows of a leaf on two batches."""

from collections.abc import Sequence
from functools import reduce

import torch
from torch import Tensor

from functional_jd.core.rows import as_matrix, cross_inner_products
from functional_jd.engines.choose import crossed_factors_are_cheaper
from functional_jd.engines.gramian.factors import Factors, column_groups, one_use, products_of_sides, rows_of_parts
from functional_jd.engines.gramian.products import crossed


def crossed_leaf(
    parts: Sequence[Factors | Tensor], others: Sequence[Factors | Tensor], leaf: Tensor, m: int, k: int
) -> Tensor:
    """The inner products of the rows of a leaf, which are the sums of these parts: float64 `[m, k]`."""
    if not parts or not others:
        return leaf.new_zeros(m, k, dtype=torch.float64)
    f, other = one_use(parts), one_use(others)
    alike = f and other and (f.left.ndim, f.right.shape[2:]) == (other.left.ndim, other.right.shape[2:])
    if f and other and alike:
        own = {len(f.left), len(f.right)} == {m} and {len(other.left), len(other.right)} == {k}
        if own and crossed_factors_are_cheaper(f, other, leaf):
            return crossed(_in_float64(f), _in_float64(other))
        if f.left.ndim > 2:
            pieces = zip(column_groups(f, max(m, k)), column_groups(other, max(m, k)), strict=True)
            return reduce(torch.add, [cross_inner_products(*map(_products, pair)) for pair in pieces])
    rows = [as_matrix(rows_of_parts(own, leaf, n)) for own, n in ((parts, m), (others, k))]
    return cross_inner_products(*rows)


def _products(f: Factors) -> Tensor:
    return as_matrix(products_of_sides(f))


def _in_float64(f: Factors) -> Factors:
    return Factors(f.left if f.left.ndim == 2 else f.left.double(), f.right.double())
