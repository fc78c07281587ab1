"""Squared norms of the rows of a leaf: position by position from its factors, or from the rows themselves."""

import torch
from torch import Tensor

from functional_jd.core.rows import block_size, squared_norms
from functional_jd.engines.choose import position_norms_are_cheaper
from functional_jd.engines.gramian.factors import (
    Factors,
)
from functional_jd.torch_compat.torch_internals import under_transform


def norms_need_no_rows(factors: list[Factors], leaf: Tensor, m: int) -> bool:
    """Whether norms by inner products of positions are possible and cost less than those of the rows."""
    return _are_alike(factors, leaf) and position_norms_are_cheaper(factors, leaf, m)


def _are_alike(factors: list[Factors], leaf: Tensor) -> bool:
    """Whether both sides of all factors have the same lengths: that of indices is the number of rows of the leaf."""
    lengths = [(1, leaf.shape[0]) if f.left.ndim == 2 else tuple(f.left.shape[2:]) for f in factors]
    return len({(length, f.right.shape[2:]) for length, f in zip(lengths, factors, strict=True)}) == 1


def norms_by_positions(factors: list[Factors], m: int) -> Tensor:
    """`|g_s|^2 = sum_pq <left_sp, left_sq> <right_sp, right_sq>`, over the positions of all factors, in float64."""
    if len(factors) == 1 and _has_one_position(factors[0]):
        return (squared_norms(factors[0].left.flatten(1)) * squared_norms(factors[0].right.flatten(1))).expand(m)
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


def _has_one_position(f: Factors) -> bool:
    """Whether a row is the product of two vectors."""
    return f.left.ndim > 2 and f.right.shape[1] * f.right.shape[2] == 1
