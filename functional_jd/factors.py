"""Rows that are not multiplied out: their inner products and weighted sums, leaf by leaf."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from functional_jd.aggregation import combine
from functional_jd.taps import Factors

# What fits the cache; and the size from which two small products are faster than a large one.
_COLUMNS, _WORTH_HALVING = 1 << 14, 128


class Block(NamedTuple):
    """What one leaf adds.

    Attributes:
        gramian: float64 `[m, m]`, its part of the Gramian.
        pullback: `pullback(weights [m])`: the weighted sum of its rows, like the leaf.
    """

    gramian: Tensor
    pullback: Callable[[Tensor], Tensor]


def block_of(parts: Sequence[Factors | Tensor], leaf: Tensor, m: int) -> Block:
    """The block of a leaf whose rows are the sum of these parts, at the smaller of two prices: of inner products of
    factors, or of the rows themselves.
    """
    factors = [part for part in parts if isinstance(part, Factors)]
    same = len({(f.left.ndim, f.left.shape[2:], f.right.shape[2:]) for f in factors}) == 1
    if same and len(factors) == len(parts):
        merged = factors[0] if len(factors) == 1 else _side_by_side(factors)
        if _is_lean(merged, leaf, m):
            return Block(_inner_products(merged, m), lambda weights: _weighted_sum(merged, weights, leaf, m))
        factors = [merged]
    rows = [part for part in parts if isinstance(part, Tensor)] + [_rows(f, leaf, m) for f in factors]
    if not rows:
        return Block(leaf.new_zeros(m, m, dtype=torch.float64), lambda _: torch.zeros_like(leaf))
    total = sum(rows[1:], start=rows[0])
    return Block(_squared(total), lambda weights: combine(total, weights).to(leaf.dtype))


def _is_lean(f: Factors, leaf: Tensor, m: int) -> bool:
    """Whether inner products of factors take fewer multiplications than rows."""
    positions, groups, i = f.right.shape[1:]
    lookup = f.left.ndim == 2
    o = leaf.shape[0] if lookup else f.left.shape[-1]
    rows = positions * m * i * (1 if lookup else groups * o) + m * m * i * groups * o
    if len(f.left) == len(f.right):
        return (positions * m) ** 2 * groups * (i + (1 if lookup else o)) < rows
    common, own = (o, i) if len(f.left) < m else (i, o)
    return groups * positions * (positions * (1 if lookup else common) + (positions + m) * m * own) < rows


def _inner_products(f: Factors, m: int) -> Tensor:
    """`G_st = sum_pq <left_sp, left_tq> <right_sp, right_tq>`, in float64, whose range fourth powers do not leave."""
    positions = f.right.shape[1]
    if len(f.left) == len(f.right):
        left, right = _alike(f.left), _alike(f.right)
        return (left * right).sum(0).reshape(m, positions, m, positions).sum((1, 3))
    common, own = (f.left, f.right) if len(f.left) < m else (f.right, f.left)
    own = own.double()
    across = torch.einsum("gpq,mqgo->mpgo", _alike(common), own)
    return own.flatten(1) @ across.flatten(1).mT


def _alike(side: Tensor) -> Tensor:
    """Inner products of all rows and positions: `[groups, m * positions, m * positions]`."""
    if side.ndim == 2:
        flat = side.flatten()
        return (flat[:, None] == flat).double()[None]
    return _products(side.double().flatten(0, 1).movedim(1, 0))


def _squared(rows: Tensor) -> Tensor:
    """Inner products of rows `[m, *p]`, lifted to float64 some columns at a time."""
    blocks = rows.reshape(len(rows), rows.shape[1:].numel()).split(_COLUMNS, dim=1)
    return torch.stack([_products(block.double()) for block in blocks]).sum(0)


def _products(rows: Tensor) -> Tensor:
    """`rows @ rows.mT`, where what lies beside the diagonal is computed once."""
    if rows.shape[-2] < _WORTH_HALVING:
        return rows @ rows.mT
    upper, lower = rows.tensor_split(2, dim=-2)
    beside = upper @ lower.mT
    above, below = torch.cat([_products(upper), beside], -1), torch.cat([beside.mT, _products(lower)], -1)
    return torch.cat([above, below], -2)


def _weighted_sum(f: Factors, weights: Tensor, leaf: Tensor, m: int) -> Tensor:
    left, right = f.left, _wide(f.right)
    if left.ndim == 2:
        scaled = _weighted(right, weights, alone=len(left) < m).flatten(0, 2)
        return scaled.new_zeros(leaf.shape).index_add(0, left.flatten(), scaled).to(leaf.dtype)
    left = _wide(left)
    if len(left) < m:
        right = _weighted(right, weights, alone=True)
    else:
        left = _weighted(left, weights, alone=len(right) < m)
    dtype = torch.promote_types(left.dtype, right.dtype)
    return torch.einsum("mpgo,mpgi->goi", left.to(dtype), right.to(dtype)).reshape(leaf.shape).to(leaf.dtype)


def _weighted(side: Tensor, weights: Tensor, *, alone: bool) -> Tensor:
    """One side, row by row times its weight; where the other side is common to all rows, they can be added up first."""
    weights = weights.to(side.dtype)
    if alone:
        return (weights @ side.flatten(1)).reshape(1, *side.shape[1:])
    return side * weights[:, None, None, None]


def _rows(f: Factors, leaf: Tensor, m: int) -> Tensor:
    """`[m, *p]`"""
    left, right = f.left, _wide(f.right)
    if left.ndim == 2:
        length = leaf.shape[0]
        offsets = length * torch.arange(m, device=leaf.device)[:, None]
        flat = right.expand(m, -1, -1, -1).flatten(0, 2)
        return (
            flat.new_zeros(m * length, leaf.shape[1])
            .index_add(0, (left + offsets).flatten(), flat)
            .unflatten(0, (m, length))
        )
    left = _wide(left)
    dtype = torch.promote_types(left.dtype, right.dtype)
    left, right = left.to(dtype), right.to(dtype)
    if len(left) == len(right):
        rows = torch.einsum("mpgo,mpgi->mgoi", left, right)
    elif len(left) < m:
        rows = torch.einsum("pgo,mpgi->mgoi", left[0], right)
    else:
        rows = torch.einsum("mpgo,pgi->mgoi", left, right[0])
    return rows.reshape(m, *leaf.shape)


def _side_by_side(factors: list[Factors]) -> Factors:
    """Several uses are more positions of one; a side stays common to all rows where it is so in all uses."""
    return Factors(_joined([f.left for f in factors]), _joined([f.right for f in factors]))


def _joined(sides: list[Tensor]) -> Tensor:
    m = max(len(side) for side in sides)
    return torch.cat([side.expand(m, *side.shape[1:]) for side in sides], dim=1)


def _wide(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))
