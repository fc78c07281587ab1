"""Rows that are not multiplied out: their inner products and weighted sums, leaf by leaf."""

from collections.abc import Callable, Iterator, Sequence
from functools import reduce
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from functional_jd.aggregation import combine
from functional_jd.rows import as_matrix, squared, wide
from functional_jd.taps import Factors

# Numbers that fit the cache in float64; the size from which two small products are faster than a large one; and rows
# of so many numbers that one product of many leaves is faster than one for each.
_CACHED, _WORTH_HALVING, _SMALL = 1 << 17, 128, 1 << 15
# In multiplications of float64, of which float32 does two at a time: what it takes to write a number and read it again.
_MOVED = 12

Pullback: TypeAlias = Callable[[Tensor], list[Tensor]]


class Block(NamedTuple):
    """What one leaf adds.

    Attributes:
        gramian: float64 `[m, m]`, its part of the Gramian.
        pullback: `pullback(weights [m])`: the weighted sum of its rows, like the leaf.
    """

    gramian: Tensor
    pullback: Callable[[Tensor], Tensor]


def gramian_of_parts(
    parts: Sequence[Sequence[Factors | Tensor]], leaves: Sequence[Tensor], m: int
) -> tuple[Tensor, Pullback]:
    """The Gramian of all leaves, each of whose rows are the sum of its parts, and the weighted sums of the rows.

    Small rows are joined: what calls cost is more than what is computed in them. Large ones never are.
    """
    blocks: dict[int, Block] = {}
    small: dict[tuple[torch.dtype, torch.device], dict[int, Tensor]] = {}
    for index, (own, leaf) in enumerate(zip(parts, leaves, strict=True)):
        rows = [part for part in own if isinstance(part, Tensor)]
        if rows and len(rows) == len(own) and m * leaf.numel() <= _SMALL:
            total = wide(sum(rows[1:], start=rows[0]))
            dtype = torch.promote_types(total.dtype, leaf.dtype)
            small.setdefault((dtype, leaf.device), {})[index] = total.reshape(m, leaf.numel()).to(dtype)
        else:
            blocks[index] = block_of(own, leaf, m)
    joined = [(list(rows), torch.cat(list(rows.values()), 1)) for rows in small.values()]
    gramians = [*(block.gramian for block in blocks.values()), *(squared(as_matrix(rows)) for _, rows in joined)]

    def pullback(weights: Tensor) -> list[Tensor]:
        found = {index: block.pullback(weights) for index, block in blocks.items()}
        for indices, rows in joined:
            pieces = (weights.to(rows.dtype) @ rows).split([leaves[index].numel() for index in indices])
            for index, piece in zip(indices, pieces, strict=True):
                found[index] = piece.reshape(leaves[index].shape).to(leaves[index].dtype)
        return [found[index] for index in range(len(leaves))]

    return reduce(torch.add, gramians), pullback


def block_of(parts: Sequence[Factors | Tensor], leaf: Tensor, m: int) -> Block:
    """The block of a leaf whose rows are the sum of these parts, at the smaller of two prices: of inner products of
    factors, or of the rows themselves. What is kept for the pullback is the smaller of the two as well.
    """
    factors = [part for part in parts if isinstance(part, Factors)]
    same = len({(f.left.ndim, f.left.shape[2:], f.right.shape[2:]) for f in factors}) == 1
    if same and len(factors) == len(parts):
        return _block_of_factors(factors[0] if len(factors) == 1 else _side_by_side(factors), leaf, m)
    rows = [part for part in parts if isinstance(part, Tensor)] + [_rows(f, leaf, m) for f in factors]
    if not rows:
        return Block(leaf.new_zeros(m, m, dtype=torch.float64), lambda _: torch.zeros_like(leaf))
    total = sum(rows[1:], start=rows[0])
    return Block(squared(as_matrix(total)), lambda weights: _combined(total, weights, leaf))


def _block_of_factors(f: Factors, leaf: Tensor, m: int) -> Block:
    if _is_lean(f, leaf, m):
        gramian = _inner_products(f, m)
    elif f.left.ndim == 2:
        gramian = squared(as_matrix(_rows(f, leaf, m)))
    elif m * leaf.numel() < f.left.numel() + f.right.numel():
        rows = _rows(f, leaf, m)
        return Block(squared(as_matrix(rows)), lambda weights: _combined(rows, weights, leaf))
    else:
        gramian = reduce(torch.add, [squared(as_matrix(_products_of_sides(part))) for part in _parts(f, m)])
    return Block(gramian, lambda weights: _weighted_sum(f, weights, leaf, m))


def _combined(rows: Tensor, weights: Tensor, leaf: Tensor) -> Tensor:
    """The weighted sum, where rows may be narrower than the leaf, or wider."""
    return combine(rows.to(torch.promote_types(rows.dtype, leaf.dtype)), weights).to(leaf.dtype)


def _parts(f: Factors, m: int) -> Iterator[Factors]:
    """Factors of some columns of the rows at a time, which fit the cache: large blocks of fresh memory cost more than
    what is computed in them.
    """
    left, right = wide(f.left), wide(f.right)
    longer, other = (left, right) if left.shape[-1] > right.shape[-1] else (right, left)
    pieces = -(-m * other.shape[2:].numel() * longer.shape[-1] // _CACHED)
    for piece in longer.tensor_split(max(1, min(pieces, longer.shape[-1])), dim=-1):
        yield Factors(piece, right) if longer is left else Factors(left, piece)


def _is_lean(f: Factors, leaf: Tensor, m: int) -> bool:
    """Whether inner products of factors take less time than rows, by multiplications and by numbers moved."""
    positions, groups, i = f.right.shape[1:]
    lookup = f.left.ndim == 2
    o = leaf.shape[0] if lookup else f.left.shape[-1]
    rows = positions * m * i * (1 if lookup else groups * o) // 2 + _price(m) * i * groups * o
    if len(f.left) == len(f.right):
        n = positions * m
        return groups * (_price(n) * (i + (1 if lookup else o)) + 2 * _MOVED * n * n) < rows
    common, own = (o, i) if len(f.left) < m else (i, o)
    alike = positions * positions * ((1 if lookup else common) + _MOVED)
    return groups * (alike + positions * (positions + m + _MOVED) * m * own) < rows


def _price(n: int) -> int:
    """Of inner products of so many rows, for each column: what lies beside the diagonal is computed once."""
    return n * ((n + min(n, _WORTH_HALVING // 2)) // 2 + _MOVED)


def _inner_products(f: Factors, m: int) -> Tensor:
    """`G_st = sum_pq <left_sp, left_tq> <right_sp, right_tq>`, in float64, whose range fourth powers do not leave."""
    if len(f.left) == len(f.right):
        return _pairs(Factors(f.left if f.left.ndim == 2 else f.left.double(), f.right.double()))
    common, own = (f.left, f.right) if len(f.left) < m else (f.right, f.left)
    own, common = own.double(), common if common.ndim == 2 else common.double()
    across = torch.einsum("gpq,mqgo->mpgo", _alike(common, common), own)
    return own.flatten(1) @ across.flatten(1).mT


def _pairs(f: Factors) -> Tensor:
    """Of all pairs of rows, those beside the diagonal once."""
    m, positions = f.right.shape[:2]
    if m == 1 or m * positions < _WORTH_HALVING:
        return _crossed(f, f)
    (left, left_below), (right, right_below) = (side.tensor_split(2) for side in f)
    above, below = Factors(left, right), Factors(left_below, right_below)
    return _symmetric(_pairs(above), _crossed(above, below), _pairs(below))


def _crossed(f: Factors, other: Factors) -> Tensor:
    product = _alike(f.left, other.left) * _alike(f.right, other.right)
    total = product[0] if len(product) == 1 else product.sum(0)
    positions = f.right.shape[1]
    return total if positions == 1 else total.unflatten(1, (-1, positions)).sum(2).unflatten(0, (-1, positions)).sum(1)


def _alike(side: Tensor, other: Tensor) -> Tensor:
    """Inner products of all rows and positions: `[groups, m * positions, m * positions]`."""
    if side.ndim == 2:
        return (side.flatten()[:, None] == other.flatten()).double()[None]
    if side.shape[2] == 1:
        return (side.flatten(0, 2) @ other.flatten(0, 2).mT)[None]
    return side.flatten(0, 1).movedim(1, 0) @ other.flatten(0, 1).permute(1, 2, 0)


def _symmetric(above: Tensor, beside: Tensor, below: Tensor) -> Tensor:
    return torch.cat([torch.cat([above, beside], -1), torch.cat([beside.mT, below], -1)], -2)


def _weighted_sum(f: Factors, weights: Tensor, leaf: Tensor, m: int) -> Tensor:
    left, right = f.left, wide(f.right)
    if left.ndim == 2:
        scaled = _weighted(right, weights, alone=len(left) < m).flatten(0, 2)
        return scaled.new_zeros(leaf.shape).index_add(0, left.flatten(), scaled).to(leaf.dtype)
    left = wide(left)
    if len(left) < m:
        right = _weighted(right, weights, alone=True)
    else:
        left = _weighted(left, weights, alone=len(right) < m)
    dtype = torch.promote_types(left.dtype, right.dtype)
    # As they lie in memory: pixels next to one another stay so.
    left, right = (side.to(dtype).permute(2, 3, 0, 1).flatten(2) for side in (left, right))
    total = left[0] @ right[0].mT if len(left) == 1 else left @ right.mT
    return total.reshape(leaf.shape).to(leaf.dtype)


def _weighted(side: Tensor, weights: Tensor, *, alone: bool) -> Tensor:
    """One side, row by row times its weight; where the other side is common to all rows, they can be added up first."""
    weights = weights.to(side.dtype)
    if alone:
        return (weights @ side.flatten(1)).reshape(1, *side.shape[1:])
    return side * weights[:, None, None, None]


def _rows(f: Factors, leaf: Tensor, m: int) -> Tensor:
    """`[m, *p]`"""
    left, right = f.left, wide(f.right)
    if left.ndim == 2:
        length = leaf.shape[0]
        offsets = length * torch.arange(m, device=leaf.device)[:, None]
        flat = right.expand(m, -1, -1, -1).flatten(0, 2)
        return (
            flat.new_zeros(m * length, leaf.shape[1])
            .index_add(0, (left + offsets).flatten(), flat)
            .unflatten(0, (m, length))
        )
    return _products_of_sides(f).expand(m, -1, -1, -1).reshape(m, *leaf.shape)


def _products_of_sides(f: Factors) -> Tensor:
    """`[m, groups, o, i]`"""
    left, right = wide(f.left), wide(f.right)
    dtype = torch.promote_types(left.dtype, right.dtype)
    return left.to(dtype).permute(0, 2, 3, 1) @ right.to(dtype).permute(0, 2, 1, 3)


def _side_by_side(factors: list[Factors]) -> Factors:
    """Several uses are more positions of one; a side stays common to all rows where it is so in all uses."""
    return Factors(_joined([f.left for f in factors]), _joined([f.right for f in factors]))


def _joined(sides: list[Tensor]) -> Tensor:
    m = max(len(side) for side in sides)
    return torch.cat([side.expand(m, *side.shape[1:]) for side in sides], dim=1)
