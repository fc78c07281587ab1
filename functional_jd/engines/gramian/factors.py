"""Rows that are not multiplied out: left and right factors of a leaf's rows."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from functional_jd.aggregation.combine import weighted_sum
from functional_jd.core.rows import block_size
from functional_jd.torch_compat.torch_internals import dispatch_modes, under_transform


class Factors(NamedTuple):
    """Rows of a leaf, not multiplied out: `row_s = sum_p left_sp right_sp'`, group by group.

    Attributes:
        left: `[m, positions, groups, o]`; or int64 `[m, positions]`, the indices of unit vectors of length o.
        right: `[m, positions, groups, i]`. 1 in the place of m where all rows share it.
    """

    left: Tensor
    right: Tensor


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
    if left.dtype is right.dtype and left.shape[2] == 1 and left.is_contiguous() and right.is_contiguous():
        return (left.flatten(0, 2).mT @ right.flatten(0, 2)).reshape(leaf.shape).to(leaf.dtype)
    # The positions last, as they are in memory: pixels next to one another are copied in runs.
    left, right = (side.to(dtype).permute(2, 3, 0, 1).flatten(2) for side in (left, right))
    total = left[0] @ right[0].mT if len(left) == 1 else left @ right.mT
    return total.reshape(leaf.shape).to(leaf.dtype)


def _weighted(side: Tensor, weights: Tensor, *, alone: bool) -> Tensor:
    """One side times the weights, row by row; summed at once where the other side is the same for all rows."""
    side = side.to(torch.promote_types(side.dtype, weights.dtype))  # float64 where they cancel
    weights = weights.to(side.dtype)
    if alone:
        return (weights @ side.flatten(1)).reshape(1, *side.shape[1:])
    return side * weights[:, None, None, None]


def weighted_parts(
    parts: Sequence[Sequence[Factors | Tensor]], leaves: Sequence[Tensor], m: int, weights: Tensor
) -> list[Tensor]:
    """The weighted sums of the rows of all leaves, each of which are the sum of its parts."""

    def weighted(part: Factors | Tensor, leaf: Tensor) -> Tensor:
        if isinstance(part, Factors):
            return weighted_sum_of_factors(part, weights, leaf, m)
        return combined(part, weights, leaf)

    zip_leaves = zip(parts, leaves, strict=True)
    return [sum((weighted(part, leaf) for part in own), start=torch.zeros_like(leaf)) for own, leaf in zip_leaves]


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
    rows = [rows_of_factors(part, leaf, m) if isinstance(part, Factors) else part for part in parts]
    return sum(rows[1:], start=rows[0])


def products_of_sides(f: Factors) -> Tensor:
    """The products of both sides, summed over positions: `[m, groups, o, i]`, or 1 in the place of m."""
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


def combined(rows: Tensor, weights: Tensor, leaf: Tensor) -> Tensor:
    """The weighted sum of rows whose dtype may differ from that of the leaf."""
    rows = rows.to(torch.promote_types(rows.dtype, leaf.dtype))
    return weighted_sum(rows, weights, weights.dtype).to(leaf.dtype)


def column_groups(f: Factors, m: int) -> Iterator[Factors]:
    """Factors of groups of columns that fit the cache: fresh memory in large blocks costs more than the products."""
    left, right = _in_float32(f)
    longer, other = (left, right) if left.shape[-1] > right.shape[-1] else (right, left)
    pieces = -(-m * other.shape[2:].numel() * longer.shape[-1] // block_size(longer))
    for piece in longer.tensor_split(max(1, min(pieces, longer.shape[-1])), dim=-1):
        yield Factors(piece, right) if longer is left else Factors(left, piece)
