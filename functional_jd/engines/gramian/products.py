"""Inner products and weighted sums of rows, leaf by leaf, from factors or from the rows themselves."""

from collections.abc import Callable, Sequence
from functools import reduce
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from functional_jd.core.rows import HALVE_FROM, as_matrix, inner_products, squared_norms
from functional_jd.engines.choose import factors_are_cheaper, leaves_are_joined, rows_are_smaller
from functional_jd.engines.gramian.factors import (
    Factors,
    column_groups,
    combined,
    one_use,
    products_of_sides,
    rows_of_parts,
    weighted_sum_of_factors,
)
from functional_jd.engines.gramian.squared_norms import norms_by_positions, norms_need_no_rows

Pullback: TypeAlias = Callable[[Tensor], list[Tensor]]


def products_of_leaves(
    parts: Sequence[Sequence[Factors | Tensor]], leaves: Sequence[Tensor], m: int, *, norms_only: bool = False
) -> tuple[Tensor, Pullback]:
    """The inner products of the rows of all leaves, `[m, m]` or only the squared norms `[m]`, and the pullback of
    weights. The rows of a leaf are the sum of its parts.

    The rows of small leaves are joined, as calls cost more than what they compute.
    """
    of_rows = squared_norms if norms_only else inner_products
    blocks: dict[int, Block] = {}
    small: dict[tuple[torch.dtype, torch.device], dict[int, Tensor]] = {}
    for index, (own, leaf, is_small) in enumerate(zip(parts, leaves, leaves_are_joined(leaves, m), strict=True)):
        rows = [part for part in own if isinstance(part, Tensor)]
        if is_small and rows and len(rows) == len(own):
            total = sum(rows[1:], start=rows[0])
            dtype = torch.promote_types(torch.promote_types(total.dtype, leaf.dtype), torch.float32)
            small.setdefault((dtype, leaf.device), {})[index] = total.reshape(m, leaf.numel()).to(dtype)
        else:
            blocks[index] = block_of(own, leaf, m, norms_only=norms_only)
    joined = [(list(rows), torch.cat(list(rows.values()), 1)) for rows in small.values()]
    products = [block.products for block in blocks.values()] + [of_rows(rows) for _, rows in joined]

    def pullback(weights: Tensor) -> list[Tensor]:
        found = {index: block.pullback(weights) for index, block in blocks.items()}
        for indices, rows in joined:
            dtype = torch.promote_types(rows.dtype, weights.dtype)
            pieces = (weights.to(dtype) @ rows.to(dtype)).split([leaves[index].numel() for index in indices])
            for index, piece in zip(indices, pieces, strict=True):
                found[index] = piece.reshape(leaves[index].shape).to(leaves[index].dtype)
        return [found[index] for index in range(len(leaves))]

    return reduce(torch.add, products), pullback


class Block(NamedTuple):
    """The contribution of one leaf.

    Attributes:
        products: float64 `[m, m]`, the Gramian of its rows; or `[m]`, their squared norms.
        pullback: `pullback(weights [m])`, the weighted sum of its rows.
    """

    products: Tensor
    pullback: Callable[[Tensor], Tensor]


def block_of(parts: Sequence[Factors | Tensor], leaf: Tensor, m: int, *, norms_only: bool = False) -> Block:
    """The block of a leaf whose rows are the sum of these parts: from inner products of factors or from the rows,
    whichever costs less. The pullback keeps the smaller of the two.
    """
    if not parts:
        shape = (m,) if norms_only else (m, m)
        return Block(leaf.new_zeros(shape, dtype=torch.float64), lambda _: torch.zeros_like(leaf))
    f, of_rows = one_use(parts), squared_norms if norms_only else inner_products
    factors = [part for part in parts if isinstance(part, Factors)]
    weighted = lambda weights: reduce(torch.add, [weighted_sum_of_factors(f, weights, leaf, m) for f in factors])
    if norms_only and len(factors) == len(parts) and norms_need_no_rows(factors, leaf, m):
        return Block(norms_by_positions(factors, m), weighted)
    if not norms_only and f and factors_are_cheaper(f, leaf, m):
        return Block(_inner_products(f, m), weighted)
    if f and f.left.ndim > 2 and not rows_are_smaller(f, leaf, m):
        groups = [of_rows(as_matrix(products_of_sides(piece))) for piece in column_groups(f, m)]
        return Block(reduce(torch.add, groups), weighted)
    rows = rows_of_parts(parts, leaf, m)
    if f and f.left.ndim == 2:
        return Block(of_rows(as_matrix(rows)), weighted)
    return Block(of_rows(as_matrix(rows)), lambda weights: combined(rows, weights, leaf))


def _inner_products(f: Factors, m: int) -> Tensor:
    """`G_st = sum_pq <left_sp, left_tq> <right_sp, right_tq>`, in float64, whose range fourth powers do not leave."""
    if len(f.left) == len(f.right):
        return _pairs(Factors(f.left if f.left.ndim == 2 else f.left.double(), f.right.double()))
    common, own = (f.left, f.right) if len(f.left) < m else (f.right, f.left)
    own, common = own.double(), common if common.ndim == 2 else common.double()
    alike = _products_of_positions(common, common)
    if len(alike) == 1:  # einsum would copy
        across = torch.bmm(alike.expand(len(own), *alike.shape[1:]), own.squeeze(2))
    else:
        across = torch.einsum("gpq,mqgo->mpgo", alike, own)
    return own.flatten(1) @ across.flatten(1).mT


def _pairs(f: Factors) -> Tensor:
    """Of all pairs of rows, those beside the diagonal once."""
    m, positions = f.right.shape[:2]
    if m == 1 or m * positions < HALVE_FROM:
        return crossed(f, f)
    (left, left_below), (right, right_below) = (side.tensor_split(2) for side in f)
    above, below = Factors(left, right), Factors(left_below, right_below)
    return _symmetric(_pairs(above), crossed(above, below), _pairs(below))


def crossed(f: Factors, other: Factors) -> Tensor:
    """Inner products of the rows of one leaf, `[m, k]`, of which no side is shared."""
    product = _products_of_positions(f.left, other.left) * _products_of_positions(f.right, other.right)
    total = product[0] if len(product) == 1 else product.sum(0)
    positions, others = f.right.shape[1], other.right.shape[1]
    if positions == others == 1:
        return total
    return total.unflatten(1, (-1, others)).sum(2).unflatten(0, (-1, positions)).sum(1)


def _products_of_positions(side: Tensor, other: Tensor) -> Tensor:
    """Inner products of all rows and positions: `[groups, m * positions, m * positions]`."""
    if side.ndim == 2:
        return (side.flatten()[:, None] == other.flatten()).double()[None]
    if side.shape[2] == 1:
        return (side.flatten(0, 2) @ other.flatten(0, 2).mT)[None]
    return side.flatten(0, 1).movedim(1, 0) @ other.flatten(0, 1).permute(1, 2, 0)


def _symmetric(above: Tensor, beside: Tensor, below: Tensor) -> Tensor:
    return torch.cat([torch.cat([above, beside], -1), torch.cat([beside.mT, below], -1)], -2)
