"""Squared norms of the rows of a leaf: position by position from its factors, or from the rows themselves."""

from collections.abc import Sequence
from functools import reduce

import torch
from torch import Tensor

from functional_jd.core.rows import as_matrix, block_size, squared_norms
from functional_jd.engines.choose import position_norms_are_cheaper, rows_are_smaller
from functional_jd.engines.gramian.factors import (
    Block,
    Factors,
    column_groups,
    combined,
    products_of_sides,
    rows_of_factors,
    weighted_sum_of_factors,
)
from functional_jd.torch_compat.torch_internals import under_transform


def norm_block_of(parts: Sequence[Factors | Tensor], leaf: Tensor, m: int) -> Block:
    """The squared norms of the rows of a leaf, which are the sum of these parts, and the pullback of weights.

    Factors need no rows, those of different layers with the same weight neither: where the rows cost more, the norms
    come from inner products of positions.
    """
    factors = [part for part in parts if isinstance(part, Factors)]
    if not parts:
        return Block(leaf.new_zeros(m, dtype=torch.float64), lambda _: torch.zeros_like(leaf))
    if len(parts) == 1 and factors and _has_one_position(factors[0]):
        f = factors[0]
        products = squared_norms(f.left.flatten(1)) * squared_norms(f.right.flatten(1))
        return Block(products.expand(m), lambda weights: weighted_sum_of_factors(f, weights, leaf, m))
    if len(factors) == len(parts) and _are_alike(factors, leaf) and position_norms_are_cheaper(factors, leaf, m):
        return Block(_norms_by_positions(factors, m), lambda weights: _weighted_sum(factors, weights, leaf, m))
    if len(parts) == len(factors) == 1 and factors[0].left.ndim > 2 and not rows_are_smaller(factors[0], leaf, m):
        f = factors[0]
        products = reduce(torch.add, [squared_norms(as_matrix(products_of_sides(p))) for p in column_groups(f, m)])
        return Block(products, lambda weights: weighted_sum_of_factors(f, weights, leaf, m))
    rows = [part for part in parts if isinstance(part, Tensor)] + [rows_of_factors(f, leaf, m) for f in factors]
    total = sum(rows[1:], start=rows[0])
    return Block(squared_norms(as_matrix(total)), lambda weights: combined(total, weights, leaf))


def _has_one_position(f: Factors) -> bool:
    """Whether a row is the product of two vectors."""
    return f.left.ndim > 2 and f.right.shape[1] * f.right.shape[2] == 1


def _are_alike(factors: list[Factors], leaf: Tensor) -> bool:
    """Whether both sides of all factors have the same lengths: that of indices is the number of rows of the leaf."""
    lengths = [(1, leaf.shape[0]) if f.left.ndim == 2 else tuple(f.left.shape[2:]) for f in factors]
    return len({(length, f.right.shape[2:]) for length, f in zip(lengths, factors, strict=True)}) == 1


def _norms_by_positions(factors: list[Factors], m: int) -> Tensor:
    """`|g_s|^2 = sum_pq <left_sp, left_sq> <right_sp, right_sq>`, over the positions of all factors, in float64."""
    total = factors[0].right.new_zeros(m, dtype=torch.float64)
    for k, f in enumerate(factors):
        total = total + _crossed(f, f)
        for other in factors[k + 1 :]:
            total = total + 2 * _crossed(f, other)
    return total.clamp(min=0)  # what cancels may leave rounding below zero


def _crossed(f: Factors, other: Factors) -> Tensor:
    """The inner product of two parts of each row: `[m]`, or `[1]` where all rows share both."""
    if under_transform():
        return _crossed_at_once(f, other)
    sides = (*f, *other)
    m, elements = max(map(len, sides)), sum(side[0].numel() for side in sides)
    at_once = max(1, block_size(f.left) // max(1, elements))
    if at_once >= m:
        return _crossed_at_once(f, other)
    # Fresh memory in large blocks costs more than the products.
    count = -(-m // at_once)
    pieces = zip(*[side.split(at_once) if len(side) == m else [side] * count for side in sides], strict=True)
    return torch.cat([_crossed_at_once(Factors(a, b), Factors(c, d)) for a, b, c, d in pieces])


def _crossed_at_once(f: Factors, other: Factors) -> Tensor:
    return (_products_within_rows(f.left, other.left) * _products_within_rows(f.right, other.right)).sum((1, 2, 3))


def _products_within_rows(side: Tensor, other: Tensor) -> Tensor:
    """Inner products of the positions of each row: `[m or 1, groups, positions, positions of the other]`."""
    if side.ndim == 2 and other.ndim == 2:
        return (side[:, :, None] == other[:, None, :]).double()[:, None]
    if side.ndim == 2:
        return _looked_up(side, other)
    if other.ndim == 2:
        return _looked_up(other, side).mT
    if side.shape[1] == other.shape[1] == 1:
        return (side.double() * other.double()).sum(-1).permute(0, 2, 1)[..., None]
    return side.double().permute(0, 2, 1, 3) @ other.double().permute(0, 2, 3, 1)


def _looked_up(indices: Tensor, side: Tensor) -> Tensor:
    """The entries of a side `[m, positions, 1, o]` at indices `[m, q]`: `[m, 1, q, positions]`."""
    m, positions = max(len(indices), len(side)), side.shape[1]
    at = indices[:, None].expand(m, positions, indices.shape[1])
    return side.squeeze(2).expand(m, positions, side.shape[-1]).gather(2, at).double().mT[:, None]


def _weighted_sum(factors: list[Factors], weights: Tensor, leaf: Tensor, m: int) -> Tensor:
    return reduce(torch.add, [weighted_sum_of_factors(f, weights, leaf, m) for f in factors])
