"""Operations on the rows of a leaf `[m, *p]`: reshaping, casting, broadcasting, inner products, sums in range."""

from collections.abc import Callable, Sequence
from functools import reduce
from typing import Any

import torch
from torch import Tensor

from functional_jd.core.arguments import described, here
from functional_jd.core.float64 import on_wide_device
from functional_jd.core.tree import check_layouts, tree_leaves, tree_names
from functional_jd.core.types import Tree
from functional_jd.torch_compat.torch_internals import under_transform

# Elements that are cast to float64 at once: those of a cache; on an accelerator, where launches cost more, 256 MB.
_CACHED, _CACHED_ELSEWHERE = 1 << 17, 1 << 25
# From so many rows on, computing one off-diagonal block instead of both is faster on a CPU than the full product.
HALVE_FROM = 128
# On an accelerator, rows of so many elements are joined, so that one launch serves several leaves: 64 MB.
_JOINED_ELSEWHERE = 1 << 24
# Of many rows, a block has at least so many columns, and twice as many as rows: where the m^2 results leave the cache,
# adding up those of narrow blocks costs more than the products.
LEAST_WIDTH = 1 << 10


def row_count(jacobian: Tree, leaves: list[Tensor] | None = None) -> int:
    """Return m, the number of rows of all leaves `[m, *p]`; `leaves` are those of the Jacobian, if they are known."""
    leaves = tree_leaves(jacobian) if leaves is None else leaves
    for index, leaf in enumerate(leaves):
        dense = isinstance(leaf, Tensor) and leaf.layout == torch.strided
        if not (dense and leaf.is_floating_point() and leaf.ndim):
            raise TypeError(
                f"{here()}: every leaf must be a dense floating-point tensor of rows [m, *p], found {described(leaf)} "
                f"in {tree_names(jacobian)[index]!r}. Stack one gradient per objective along the first dimension, and "
                "register other containers with torch.export.register_dataclass."
            )
        if leaf.shape[0] != leaves[0].shape[0]:
            names = tree_names(jacobian)
            raise ValueError(
                f"{here()}: every leaf must have the same number of rows, found {len(leaves[0])} in {names[0]!r} and "
                f"{len(leaf)} in {names[index]!r}. Did you mix Jacobians of different losses?"
            )
    check_layouts(leaves, jacobian)
    if not leaves or leaves[0].shape[0] == 0:
        raise ValueError(
            f"{here()}: needs at least one row (one objective), found none. Is a pytree of losses or parameters empty?"
        )
    return leaves[0].shape[0]


def at_least_float32(x: Tensor) -> Tensor:
    """Cast float16 and bfloat16 to float32."""
    return x.float() if x.dtype.itemsize < 4 else x


def as_matrix(leaf: Tensor) -> Tensor:
    """Reshape to `[m, n]`; a matrix is returned as is, since torch 2.13 cannot compile forward mode through reshape."""
    return leaf if leaf.ndim == 2 else leaf.reshape(leaf.shape[0], leaf.shape[1:].numel())


def per_row(numbers: Tensor, leaf: Tensor) -> Tensor:
    """Reshape `[m]`, one number per row, to `[m, 1, ..., 1]`, which broadcasts over the rows; `[]` serves all rows."""
    return numbers.reshape(-1, *[1] * (leaf.ndim - 1)) if numbers.ndim else numbers


def of_distinct(f: Callable[[Any], Any], weights: Any) -> Any:
    """`f` of weights, or of those of each group, once for groups that have one tensor, and then have one again."""
    if isinstance(weights, Tensor):
        return f(weights)
    found = {id(own): f(own) for own in {id(own): own for own in weights.values()}.values()}
    return {key: found[id(own)] for key, own in weights.items()}


def inner_products(matrix: Tensor) -> Tensor:
    """Inner products of rows `[m, n]`: float64 `[m, m]`, computed block by block over the columns.
    Float32 would be twice as fast, but with its rounding error of 1e-8 dependent rows look independent to the rules,
    which truncate eigenvalues at the precision of float64.
    """
    matrix = matrix if matrix.is_cpu else on_wide_device(matrix)
    width = _width(len(matrix), matrix)
    if matrix.shape[1] <= width:
        return symmetric_product(matrix.double())
    return reduce(torch.add, [symmetric_product(block.double()) for block in matrix.split(width, dim=1)])


def joined(leaves: Sequence[Tensor]) -> list[tuple[Tensor, list[int]]]:
    """Matrices with the columns of these leaves `[m, *p]`. Narrow neighbours are joined: adding up m^2 results of each
    would cost more than the products. With each matrix, how many columns it has of each.
    """
    matrices = [leaf if leaf.ndim == 2 else as_matrix(leaf) for leaf in leaves]
    widths = [x.shape[1] for x in matrices]
    kinds = [((x.dtype, x.device), x.shape[1]) for x in matrices]
    found: list[tuple[Tensor, list[int]]] = []
    for places in neighbours(kinds, widest_join(len(matrices[0]), matrices[0].is_cpu) if matrices else 0):
        own = slice(places[0], places[-1] + 1)
        found.append((_side_by_side(matrices[own]), widths[own]))
    return found


def neighbours(kinds: Sequence[tuple[Any, int]], limit: int) -> list[list[int]]:
    """The places of neighbours of one kind, `(kind, width)`, whose widths are together at most the limit."""
    groups: list[list[int]] = []
    total, last = 0, None
    for place, (kind, width) in enumerate(kinds):
        total += width
        if place and kind == last and total <= limit:
            groups[-1].append(place)
        else:
            groups.append([place])
            total = width
        last = kind
    return groups


def widest_join(m: int, on_host: bool) -> int:
    """How many columns of m rows are joined at most."""
    return max(LEAST_WIDTH, 2 * m if on_host else _JOINED_ELSEWHERE // max(1, m))


def _side_by_side(matrices: list[Tensor]) -> Tensor:
    """Matrices as one: a view if they are the columns of one, as rows are that were joined and divided by a scale."""
    first, width = matrices[0], 0
    if len(matrices) == 1:
        return first
    if first.is_cpu or under_transform() or any(x.requires_grad or type(x) is not Tensor for x in matrices):
        return torch.cat(matrices, 1)
    start, memory, step = first.storage_offset(), first.untyped_storage().data_ptr(), first.stride(0)
    for x in matrices:
        dense = x.stride(0) == step and (x.shape[1] == 1 or x.stride(1) == 1)
        if x.untyped_storage().data_ptr() != memory or not dense or x.storage_offset() != start + width:
            return torch.cat(matrices, 1)
        width += x.shape[1]
    return first.as_strided((len(first), width), (step, 1))


def cross_inner_products(left: Tensor, right: Tensor) -> Tensor:
    """Inner products of the rows of two matrices `[m, n]` and `[k, n]`: float64 `[m, k]`, computed block by block."""
    left, right = (x if x.is_cpu else on_wide_device(x) for x in (left, right))
    width = _width(max(len(left), len(right)), left)
    pairs = zip(left.split(width, dim=1), right.split(width, dim=1), strict=True)
    return reduce(torch.add, [a.double() @ b.double().mT for a, b in pairs])


def squared_norms(matrix: Tensor) -> Tensor:
    """Squared norms of rows `[m, n]`: float64 `[m]`, with all derivatives at zero."""
    matrix = on_wide_device(matrix)
    if under_transform() or matrix.requires_grad:
        return matrix.double().square().sum(1)
    return torch.linalg.vector_norm(matrix, dim=1, dtype=torch.float64).square()


def weighted_rows(weights: Tensor, matrix: Tensor) -> Tensor:
    """The weighted sum of rows `[m, n]`: on an accelerator not a product of matrices, which TF32 would round."""
    return weights @ matrix if matrix.is_cpu or under_transform() else torch.mv(matrix.mT, weights)


def magnitudes(matrix: Tensor) -> Tensor:
    """The largest magnitude in each row `[m, n]`, NaN if a value is: `[m]`, constant to derivatives."""
    if not matrix.shape[1]:
        return matrix.new_zeros(len(matrix))
    return torch.linalg.vector_norm(matrix.detach(), torch.inf, dim=1)


def symmetric_product(rows: Tensor) -> Tensor:
    """`rows @ rows.mT` of rows `[*, m, n]`; each off-diagonal block is computed once."""
    if rows.shape[-2] < HALVE_FROM or not rows.is_cpu:
        return rows @ rows.mT
    upper, lower = rows.tensor_split(2, dim=-2)
    corner = upper @ lower.mT
    top = torch.cat([symmetric_product(upper), corner], -1)
    return torch.cat([top, torch.cat([corner.mT, symmetric_product(lower)], -1)], -2)


def block_size(x: Tensor) -> int:
    """The number of elements to work on at once, in float64, where this tensor is."""
    return _CACHED if x.is_cpu else _CACHED_ELSEWHERE


def _width(m: int, like: Tensor) -> int:
    return max(LEAST_WIDTH, 2 * m, block_size(like) // m)
