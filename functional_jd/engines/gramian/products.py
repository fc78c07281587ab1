"""Rows as factors that are not multiplied out; their inner products, norms and weighted sums, from factors or rows."""

from collections.abc import Callable, Iterator, Sequence
from functools import reduce
from typing import cast

import torch
from torch import Tensor

from functional_jd.aggregation.combine import products_of_rows, weighted_sum
from functional_jd.core.rows import (
    HALVE_FROM,
    as_matrix,
    block_size,
    cross_inner_products,
    inner_products,
    squared_norms,
)
from functional_jd.core.tree import tree_flatten
from functional_jd.engines.gramian.layers import Factors
from functional_jd.torch_compat.torch_internals import dispatch_modes, under_transform

# Price of writing an element and reading it again, in multiplications of float64 (float32 does two at a time).
_MOVED = 12


def _in_float32(f: Factors) -> Factors:
    """Both sides in at least float32; indices stay."""
    return Factors(*[side.float() if side.dtype.itemsize < 4 else side for side in f])


def weighted_sum_of_factors(f: Factors, weights: Tensor, leaf: Tensor, m: int) -> Tensor:
    """The weighted sum of the rows, in the shape and dtype of the leaf."""
    left, right = _in_float32(f)
    if under_transform() or dispatch_modes():  # which do not tell whether weights cancel: float64 would be the rule
        weights = weights.to(right.dtype)
    if left.ndim == 2:
        scaled = _weighted(right, weights, alone=len(left) < m).flatten(0, 2)
        return scaled.new_zeros(leaf.shape).index_add(0, left.flatten(), scaled).to(leaf.dtype)
    dtype = torch.promote_types(weights.dtype, torch.promote_types(left.dtype, right.dtype))
    if len(left) < m or (len(right) == m and right.shape[-1] < left.shape[-1]):  # the smaller side is multiplied
        right = _weighted(right, weights, alone=len(left) < m)
    else:
        left = _weighted(left, weights, alone=len(right) < m)
    # The positions last, as they are in memory: pixels next to one another are copied in runs.
    left, right = [side.to(dtype).permute(2, 3, 0, 1).flatten(2) for side in (left, right)]
    total = left[0] @ right[0].mT if len(left) == 1 else left @ right.mT
    return total.reshape(leaf.shape).to(leaf.dtype)


def _weighted(side: Tensor, weights: Tensor, *, alone: bool) -> Tensor:
    """One side times the weights, row by row; summed at once where the other side is the same for all rows."""
    side = side.to(torch.promote_types(side.dtype, weights.dtype))  # float64 where they cancel
    weights = weights.to(side.dtype)
    if alone:
        return (weights @ side.flatten(1)).reshape(1, *side.shape[1:])
    return side * weights[:, None, None, None]


def rows_of_factors(f: Factors, leaf: Tensor, m: int) -> Tensor:
    """The rows `[m, *p]`, multiplied out."""
    left, right = _in_float32(f)
    if left.ndim == 2:
        length = leaf.shape[0]
        offsets = length * torch.arange(m, device=leaf.device)[:, None]
        flat = right.expand(m, -1, -1, -1).flatten(0, 2)
        return (
            flat.new_zeros(m * length, leaf.shape[1])
            .index_add(0, (left + offsets).flatten(), flat)
            .unflatten(0, (m, length))
        )
    return products_of_sides(f).expand(m, -1, -1, -1).reshape(m, *leaf.shape)


def rows_of_parts(parts: Sequence[Factors | Tensor], leaf: Tensor, m: int) -> Tensor:
    """The rows `[m, *p]`, which are the sum of these parts."""
    return reduce(torch.add, [rows_of_factors(p, leaf, m) if isinstance(p, Factors) else p for p in parts])


def products_of_sides(f: Factors) -> Tensor:
    """The products of both sides, summed over positions: `[m, groups, o, i]`, or 1 instead of m."""
    left, right = _in_float32(f)
    dtype = torch.promote_types(left.dtype, right.dtype)
    return left.to(dtype).permute(0, 2, 3, 1) @ right.to(dtype).permute(0, 2, 1, 3)


def one_use(parts: Sequence[Factors | Tensor]) -> Factors | None:
    """All uses as one use with more positions; None if some are rows, or their factors have several forms."""
    factors = [part for part in parts if isinstance(part, Factors)]
    alike = len({(f.left.ndim, f.left.shape[2:], f.right.shape[2:]) for f in factors}) == 1
    if not alike or len(factors) < len(parts):
        return None
    return factors[0] if len(factors) == 1 else Factors(*[_joined(list(sides)) for sides in zip(*factors, strict=True)])


def _joined(sides: list[Tensor]) -> Tensor:
    """A side stays the same for all rows where it is so in every use."""
    m = max(len(side) for side in sides)
    return torch.cat([side.expand(m, *side.shape[1:]) for side in sides], dim=1)


def column_groups(f: Factors, m: int) -> Iterator[Factors]:
    """Factors of groups of columns that fit the cache: fresh memory in large blocks costs more than the products."""
    left, right = _in_float32(f)
    longer, other = (left, right) if left.shape[-1] > right.shape[-1] else (right, left)
    pieces = -(-m * other.shape[2:].numel() * longer.shape[-1] // block_size(longer))
    for piece in longer.tensor_split(max(1, min(pieces, longer.shape[-1])), dim=-1):
        yield Factors(piece, right) if longer is left else Factors(left, piece)


def products_of_leaves(
    parts: Sequence[Sequence[Factors | Tensor]], leaves: Sequence[Tensor], m: int, needed: str = "gramian"
) -> tuple[Tensor, Callable[[Tensor], list[Tensor]]]:
    """The inner products of the rows of all leaves, `[m, m]`, or, unless a `"gramian"` is needed, the squared norms
    `[m]`; and the pullback of weights. The rows of a leaf are the sum of its parts.
    """
    norms_only = needed != "gramian"
    blocks: dict[int, tuple[Tensor, Callable[[Tensor], Tensor]]] = {}
    rows: dict[int, Tensor] = {}  # of leaves without factors
    for index, (own, leaf) in enumerate(zip(parts, leaves, strict=True)):
        if own and Factors not in map(type, own):
            total = reduce(torch.add, cast("list[Tensor]", own))
            rows[index] = total.to(torch.promote_types(total.dtype, leaf.dtype))
        else:
            blocks[index] = block_of(own, leaf, m, norms_only=norms_only)
    products = [own for own, _ in blocks.values()]
    of_rows, pull_rows = products_of_rows(*tree_flatten([*rows.values()]), needed) if rows else (None, None)

    def pullback(weights: Tensor) -> list[Tensor]:
        found = {index: pull(weights) for index, (_, pull) in blocks.items()}
        if pull_rows is not None:
            found |= dict(zip(rows, pull_rows(weights), strict=True))
        return [found[index].to(leaf.dtype) for index, leaf in enumerate(leaves)]

    total = reduce(torch.add, products if of_rows is None else [*products, of_rows])
    # Products of factors round differently on either side.
    return total if norms_only else (total + total.mT) / 2, pullback


def block_of(
    parts: Sequence[Factors | Tensor], leaf: Tensor, m: int, *, norms_only: bool = False
) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
    """The contribution of a leaf whose rows are the sum of these parts: the Gramian of its rows, float64 `[m, m]`, or
    their squared norms `[m]`; and the pullback of weights `[m]` to the weighted sum of its rows.

    From inner products of factors or from the rows, whichever costs less. The pullback keeps the smaller of the two.
    """
    if not parts:
        return leaf.new_zeros((m,) if norms_only else (m, m), dtype=torch.float64), lambda _: torch.zeros_like(leaf)
    f, of_rows = one_use(parts), squared_norms if norms_only else inner_products
    factors = [part for part in parts if isinstance(part, Factors)]
    weighted = lambda weights: reduce(torch.add, [weighted_sum_of_factors(f, weights, leaf, m) for f in factors])
    # Both sides of all factors must have the same lengths: that of indices is the number of rows of the leaf.
    lengths = {(tuple(f.left.shape[2:]) or (1, leaf.shape[0]), f.right.shape[2:]) for f in factors if norms_only}
    if len(lengths) == 1 and len(factors) == len(parts) and position_norms_are_cheaper(factors, leaf, m):
        return _norms_by_positions(factors, m), weighted
    if not norms_only and f and factors_are_cheaper(f, leaf, m):
        return _inner_products(f, m), weighted
    if f and f.left.ndim > 2 and m * leaf.numel() >= f.left.numel() + f.right.numel():
        groups = [of_rows(as_matrix(products_of_sides(piece))) for piece in column_groups(f, m)]
        return reduce(torch.add, groups), weighted
    rows = rows_of_parts(parts, leaf, m)
    looked_up = f and f.left.ndim == 2
    summed = lambda weights: weighted_sum(rows, weights, weights.dtype).to(leaf.dtype)
    return of_rows(as_matrix(rows)), weighted if looked_up else summed


def _inner_products(f: Factors, m: int) -> Tensor:
    """`G_st = sum_pq <left_sp, left_tq> <right_sp, right_tq>`, in float64, whose range fourth powers do not leave."""
    if len(f.left) == len(f.right):
        return _pairs(_in_float64(f))
    common, own = (f.left, f.right) if len(f.left) < m else (f.right, f.left)
    own, common = own.double().movedim(2, 1), common if common.ndim == 2 else common.double()
    return own.flatten(1) @ (_products_of_positions(common, common) @ own).flatten(1).mT


def _pairs(f: Factors) -> Tensor:
    """Inner products of all rows. Those next to the diagonal are computed once."""
    m, positions = f.right.shape[:2]
    if m == 1 or m * positions < HALVE_FROM:
        return _crossed(f, f)
    (left, left_below), (right, right_below) = (side.tensor_split(2) for side in f)
    above, below = Factors(left, right), Factors(left_below, right_below)
    beside = _crossed(above, below)
    return torch.cat([torch.cat([_pairs(above), beside], -1), torch.cat([beside.mT, _pairs(below)], -1)], -2)


def _crossed(f: Factors, other: Factors) -> Tensor:
    """Inner products of the rows of one leaf, `[m, k]`; no side is shared."""
    product = _products_of_positions(f.left, other.left) * _products_of_positions(f.right, other.right)
    total = product[0] if len(product) == 1 else product.sum(0)
    positions, others = f.right.shape[1], other.right.shape[1]
    if positions == others == 1:
        return total
    return total.unflatten(1, (len(other.right), others)).sum(2).unflatten(0, (len(f.right), positions)).sum(1)


def _products_of_positions(side: Tensor, other: Tensor) -> Tensor:
    """Inner products of all rows and positions: `[groups, m * positions, m * positions]`."""
    if side.ndim == 2:
        return (side.flatten()[:, None] == other.flatten()).double()[None]
    if side.shape[2] == 1:
        return (side.flatten(0, 2) @ other.flatten(0, 2).mT)[None]
    return side.flatten(0, 1).movedim(1, 0) @ other.flatten(0, 1).permute(1, 2, 0)


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
            return _crossed(_in_float64(f), _in_float64(other))
        if f.left.ndim > 2:
            pieces = [map(as_matrix, map(products_of_sides, column_groups(use, max(m, k)))) for use in (f, other)]
            return reduce(torch.add, [cross_inner_products(*pair) for pair in zip(*pieces, strict=True)])
    rows, other_rows = rows_of_parts(parts, leaf, m), rows_of_parts(others, leaf, k)
    return cross_inner_products(as_matrix(rows), as_matrix(other_rows))


def _in_float64(f: Factors) -> Factors:
    return Factors(f.left if f.left.ndim == 2 else f.left.double(), f.right.double())


def _norms_by_positions(factors: list[Factors], m: int) -> Tensor:
    """`|g_s|^2 = sum_pq <left_sp, left_sq> <right_sp, right_sq>`, over the positions of all factors, in float64."""
    left, right = factors[0]
    if len(factors) == 1 and left.ndim > 2 and right.shape[1] * right.shape[2] == 1:  # a row is two vectors' product
        return (squared_norms(left.flatten(1)) * squared_norms(right.flatten(1))).expand(m)
    total = right.new_zeros(m, dtype=torch.float64)
    for k, f in enumerate(factors):
        total = total + _crossed_within_rows(f, f)
        for other in factors[k + 1 :]:
            total = total + 2 * _crossed_within_rows(f, other)
    return total.clamp(min=0)  # what cancels may leave rounding below zero


def _crossed_within_rows(f: Factors, other: Factors) -> Tensor:
    """The inner product of two parts of each row: `[m]`, or `[1]` where all rows share both."""
    sides = (*f, *other)
    m, elements = max(map(len, sides)), sum(side[0].numel() for side in sides)
    # Fresh memory in large blocks costs more than the products.
    at_once = m if under_transform() else max(1, block_size(f.left) // max(1, elements))
    count = -(-m // at_once)
    pieces = zip(*[side.split(at_once) if len(side) == m else [side] * count for side in sides], strict=True)
    sums = [(_products_within_rows(a, c) * _products_within_rows(b, d)).sum((1, 2, 3)) for a, b, c, d in pieces]
    return sums[0] if count == 1 else torch.cat(sums)


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


def factors_are_cheaper(f: Factors, leaf: Tensor, m: int) -> bool:
    """Whether inner products of rows take less time from factors than from rows."""
    positions = f.right.shape[1]
    n = positions * m
    left = right = _halved(n)
    if len(f.left) != len(f.right):
        shared, own = positions * positions, n * (positions + m)
        left, right = (shared, own) if len(f.left) < m else (own, shared)
    return _pairs_are_cheaper(f, leaf, left, right, n, _halved(m) + m * _MOVED)


def position_norms_are_cheaper(factors: Sequence[Factors], leaf: Tensor, m: int) -> bool:
    """Whether norms take less time from inner products of positions ("ghost norms") than from the rows."""
    looked_up = [f.left.ndim == 2 for f in factors]
    pairs = sum(f.right.shape[1] for f in factors) ** 2
    # A side that all rows share is multiplied once.
    left, right = (pairs * max(len(f[side]) for f in factors) for side in (0, 1))
    summed = m * sum(1 if lookup else f.right.shape[1] for f, lookup in zip(factors, looked_up, strict=True))
    return _pairs_are_cheaper(factors[looked_up.index(min(looked_up))], leaf, left, right, summed, 3 * m * _MOVED)


def crossed_factors_are_cheaper(f: Factors, other: Factors, leaf: Tensor) -> bool:
    """Whether inner products of the rows of two batches take less time from factors than from rows."""
    (m, positions), (k, others) = f.right.shape[:2], other.right.shape[:2]
    n, n_others = m * positions, k * others
    pairs = n * n_others
    return _pairs_are_cheaper(f, leaf, pairs, pairs, n + n_others, m * k + (m + k) * _MOVED)


def _pairs_are_cheaper(f: Factors, leaf: Tensor, left: int, right: int, summed: int, products: int) -> bool:
    """Whether inner products of so many pairs of positions, on the left and on the right, take less time than rows.

    To form rows takes one outer product for each of the `summed` positions, and then multiplications by element.
    """
    groups, i = f.right.shape[2:]
    lookup = f.left.ndim == 2
    o = 1 if lookup else f.left.shape[-1]
    apart = groups * (left * (o + _MOVED) + right * (i + _MOVED))
    return apart < summed * (i if lookup else leaf.numel()) // 2 + products * leaf.numel()


def _halved(n: int) -> int:
    """How many inner products of n rows are computed: those off the diagonal once."""
    return n * (n + min(n, HALVE_FROM // 2)) // 2
