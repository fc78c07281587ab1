"""The weighted sum of rows: weights are one per row, or one per entry."""

from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import reduce
from typing import Any

import torch
from torch import Tensor

from functional_jd.core.arguments import described, here
from functional_jd.core.heads import direction_with_heads, split_heads
from functional_jd.core.rows import (
    as_matrix,
    at_least_float32,
    block_size,
    inner_products,
    joined,
    magnitudes,
    per_row,
    row_count,
    squared_norms,
    weighted_rows,
)
from functional_jd.core.safe import cosines
from functional_jd.core.sharding import shard_of, sharded_as
from functional_jd.core.tree import tree_flatten, tree_map, tree_names
from functional_jd.core.types import AffineWeights, Direction, Gramian, Jacobian, Tree, Weights
from functional_jd.precision.autocast import autocast_disabled
from functional_jd.torch_compat.torch_internals import dispatch_modes

# Weighted rows cancel if the square of their sum is below this fraction of the sum of their squares.
_CANCELLED = 2.0**-10


def combine(jacobian: Jacobian, weights: Weights) -> Direction:
    """Sum the weighted rows: `direction = sum_i weights_i J_i`.

    Args:
        jacobian: pytree with leaves `[m, *p]`, or a `MultitaskJacobian`.
        weights: `[m]`; or a pytree like the Jacobian. Its leaves are `[m]`, one weight for each row of a leaf, or of
            all below a key; or have all dimensions of the leaf, each of its size or 1: `[m, *p]` is one weight per
            entry. A leaf may be `AffineWeights(weights, rest)`, whose `rest` `[*p]`, from earlier rows, is added.

    Returns:
        A pytree with leaves `[*p]` in the Jacobian's dtypes, summed in at least float32. For a `MultitaskJacobian` the
        dict `{"shared": ..., "heads": ...}` that `multitask` losses take as params.

    Guarantees:
        Linear in the weights, and in the Jacobian except for `rest`. Non-finite values propagate, also with weight 0.
        Below float64, weights above 3e38 overflow, and those below 1e-38 vanish, as for rows of norms 1e-19 and 1e19
        that a rule balances.

    Example:
        >>> aggregation.combine({"w": torch.tensor([[1.0, 2.0], [3.0, 4.0]])}, torch.tensor([1.0, 0.5]))
        {'w': tensor([2.5000, 4.0000])}
    """
    return combined(jacobian, weights)


def combined(jacobian: Jacobian, weights: Weights, *, wide: bool = False) -> Direction:
    """`combine`, whose errors name the function that the user called; with `wide` in at least the dtype of weights."""
    rows, heads = split_heads(jacobian)
    dtype = weights.dtype if wide and isinstance(weights, Tensor) else torch.float32
    with autocast_disabled():
        return direction_with_heads(_combined(rows, weights, dtype), heads)


def weights_to_sum(
    weights: Weights, products: Any, leaves: list[Tensor], *, by_autograd: bool = False
) -> tuple[Weights, Weights]:
    """Weights `[m]` of rows with this Gramian or these norms, and the same in the dtype in which to sum: float64 where
    they cancel or cannot be looked at for nothing, and for rows in float64; else float32. Norms do not tell.

    If autograd is to sum, in the dtype of the rows, weights that cancel are replaced by smaller ones.
    """
    if isinstance(products, dict) and isinstance(weights, dict):
        pairs = {key: weights_to_sum(own, products[key], leaves) for key, own in weights.items()}
        return {key: pair[0] for key, pair in pairs.items()}, {key: pair[1] for key, pair in pairs.items()}
    by_row = isinstance(weights, Tensor) and weights.ndim == 1 and not weights.is_complex()
    dtypes = {leaf.dtype for leaf in leaves}
    if torch.float64 in dtypes or not (by_row and isinstance(products, Tensor) and weights.shape == products.shape[:1]):
        return weights, weights
    if products.ndim == 1:
        return weights, weights.float()
    wide = weights.to(products)
    if products.is_cpu and type(products) is Tensor and not torch.compiler.is_compiling() and not dispatch_modes():
        square, squares = wide @ (products @ wide), wide.square() @ products.diagonal()
        with suppress(RuntimeError):  # under vmap no value can be looked at
            if not square.item() <= _CANCELLED * squares.item():
                return weights, weights.float()
            if by_autograd:
                weights = _smaller(wide, products, max((torch.finfo(dtype).eps for dtype in dtypes), default=0.0))
    return weights, weights.to(products)


def _smaller(weights: Tensor, gramian: Gramian, eps: float) -> Tensor:
    """The smallest weights with the same direction, as far as a sum of rows with this precision can tell.

    For multiples v of unit rows with cosines C, the parts along the first eigenvectors of C change the direction
    least, and cost most digits in the sum. So many of them are left out that the loss of gains, plus the rounding of
    the sum, is least; all, if more than `2 eps^1/2` of it would be rounding.
    """
    C, norms = cosines(gramian.detach())
    eigenvalues, vectors = torch.linalg.eigh(C)
    along = vectors.mT @ (norms * weights)
    kept = (vectors * along).flip(1).cumsum(1).flip(1)  # column k: without the first k parts
    lengths = (eigenvalues.clamp(min=0) * along.square()).flip(0).cumsum(0).flip(0).sqrt()
    error = ((C @ (kept[:, :1] - kept)).abs().amax(0) + eps * kept.abs().sum(0)) / lengths
    best = error.nan_to_num(torch.inf).argmin()
    return torch.where(error[best] < 2 * eps**0.5, kept[:, best] / norms, 0)


def products_of_rows(
    leaves: list[Tensor], structure: Any, needed: str
) -> tuple[Tensor, Callable[[Weights], Direction]]:
    """The Gramian of rows, their squared norms, or the largest of their `"magnitudes"`, and `combine` of them as at
    least float32, from one set of matrices. The caller of either switches autocast off.
    """
    shapes = [leaf.shape for leaf in leaves]
    matrices, widths = zip(*joined([x if x.dtype.itemsize >= 4 else x.float() for x in leaves]), strict=True)
    found = {"gramian": inner_products, "magnitudes": magnitudes}.get(needed, squared_norms)
    add = torch.maximum if needed == "magnitudes" else torch.add

    def split(parts: Sequence[Tensor], start: int) -> Tree:
        own: list[Tensor] = []
        for part, sizes in zip(parts, widths, strict=True):
            own.extend([part] if len(sizes) == 1 else part.split(sizes, -1))
        for index, shape in enumerate(shapes):
            if len(shape) != 2:
                own[index] = own[index].reshape(shape[start:])
        return structure.unflatten(own)

    def pullback(weights: Weights) -> Direction:
        if not isinstance(weights, Tensor) or weights.ndim > 1:
            return combined(split(matrices, 0), weights)
        if weights.shape != shapes[0][:1] or weights.is_complex():
            refuse_row_weights(weights, shapes[0][0])
        cast: dict[torch.dtype, Tensor] = {}  # once for all leaves
        summed: list[Tensor] = []
        for matrix in matrices:
            if matrix.dtype not in cast:
                wide = weights.dtype if needed == "gramian" else matrix.dtype
                cast[matrix.dtype] = weights.to(matrix.device, torch.promote_types(wide, matrix.dtype))
            own = cast[matrix.dtype]
            if own.dtype != matrix.dtype:
                summed.append(_summed(own, matrix))
            else:
                summed.append(own @ matrix if matrix.is_cpu else weighted_rows(own, matrix))
        return split(summed, 1)

    return reduce(add, map(found, matrices)), pullback


def refuse_row_weights(weights: Tensor, m: int) -> None:
    """Raise ValueError for what is not one real number per row."""
    found = described(weights) if weights.is_complex() else list(weights.shape)
    raise ValueError(
        f"{here()}: expected one weight per row, [{m}], found {found}. "
        "Check the number of objectives of the rule and of its preference. A rule returns weights, no direction."
    )


def _combined(jacobian: Tree, weights: Weights, dtype: torch.dtype) -> Tree:
    leaves, structure = tree_flatten(jacobian)
    m = row_count(jacobian, leaves)
    if isinstance(weights, Tensor) and weights.ndim < 2:
        if weights.shape != (m,) or weights.is_complex():
            refuse_row_weights(weights, m)
        if all(leaf.dtype.itemsize <= 4 for leaf in leaves):
            weights = weights.to(leaves[0].device, dtype)  # once, and not for every leaf
        sums = [sharded_as(weighted_sum(shard_of(leaf), weights, dtype), leaf, -1) for leaf in leaves]
        return structure.unflatten(sums)
    by_leaf = _checked(weights_by_leaf(weights, jacobian), jacobian, leaves, m)
    return structure.unflatten([_entrywise(leaf, own) for leaf, own in zip(leaves, by_leaf, strict=True)])


def weights_by_leaf(weights: Weights, rows: Tree) -> Weights:
    """Weights by leaf, of those that may be `[m]` for all rows below a key."""
    if isinstance(rows, Tensor):
        return weights
    if isinstance(weights, Tensor) and weights.ndim == 1:
        return tree_map(lambda _: weights, rows)
    if isinstance(weights, dict) and isinstance(rows, dict) and weights.keys() == rows.keys():
        return {key: weights_by_leaf(own, rows[key]) for key, own in weights.items()}
    return weights


def _entrywise(leaf: Tensor, weights: Tensor | AffineWeights) -> Tensor:
    if isinstance(weights, AffineWeights):
        return _entrywise_sum(leaf, weights)
    return sharded_as(_entrywise_sum(shard_of(leaf), shard_of(weights)), leaf, -1)


def _checked(weights: Weights, jacobian: Tree, leaves: list[Tensor], m: int) -> list[Tensor | AffineWeights]:
    """Weights by leaf. Raise for a leaf without, and for weights that are not one per row and do not broadcast."""
    found: list[Any] = []
    with suppress(ValueError):
        found = tree_flatten(jacobian)[1].flatten_up_to(weights)
    if not found or not all(isinstance(x, Tensor | AffineWeights) for x in found):
        raise ValueError(
            f"{here()}: weights must be one tensor [{m}], one number per row, or a pytree of tensors like the "
            f"Jacobian, found {described(weights)}. Check what the rule returns."
        )
    for index, (leaf, own) in enumerate(zip(leaves, found, strict=True)):
        shape, given = list(leaf.shape), own.weights if isinstance(own, AffineWeights) else own
        sizes = zip(given.shape, shape, strict=False)
        if given.shape != (m,) and (given.ndim != len(shape) or any(size not in (1, full) for size, full in sizes)):
            raise ValueError(
                f"{here()}: weights{_of_leaf(jacobian, index)} must have shape [{m}], one per row, or {len(shape)} "
                f"dimensions that broadcast to {shape}, found {list(given.shape)}. A rule returns weights, and no "
                "direction."
            )
        if isinstance(own, AffineWeights) and list(own.rest.shape) != shape[1:]:
            raise ValueError(
                f"{here()}: expected the rest{_of_leaf(jacobian, index)} of shape {shape[1:]}, that of the direction, "
                f"found {list(own.rest.shape)}. It is added to the weighted sum of the rows."
            )
    return found


def _of_leaf(jacobian: Tree, index: int) -> str:
    name = tree_names(jacobian)[index]
    return f" of leaf {name!r}" if name else ""


def _entrywise_sum(leaf: Tensor, weights: Tensor | AffineWeights) -> Tensor:
    if isinstance(weights, AffineWeights):
        wide = leaf.to(torch.promote_types(leaf.dtype, weights.rest.dtype))
        return (_entrywise_sum(wide, weights.weights) + weights.rest).to(leaf.dtype)
    if weights.shape[:1] == leaf.shape[:1] and weights.shape[1:].numel() == 1:
        return weighted_sum(leaf, weights.reshape(len(weights)))
    return (at_least_float32(leaf) * weights).sum(0).to(leaf.dtype)


def weighted_sum(leaf: Tensor, weights: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """The weighted sum of the rows of a leaf `[m, *p]`, `[*p]`, computed in at least this dtype."""
    matrix = as_matrix(leaf if leaf.dtype.itemsize >= 4 else leaf.float())
    own = weights.to(torch.promote_types(matrix.dtype, dtype))
    summed = weighted_rows(own, matrix) if own.dtype == matrix.dtype else _summed(own, matrix)
    return summed.reshape(leaf.shape[1:]).to(leaf.dtype)


def _summed(weights: Tensor, matrix: Tensor) -> Tensor:
    """The weighted sum of rows `[m, n]`, in the dtype of the weights, without a copy of all rows."""
    blocks = matrix.split(max(1, block_size(matrix) // len(matrix)), dim=1)
    return torch.cat([weighted_rows(weights, block.to(weights.dtype)) for block in blocks]).to(matrix.dtype)


def zero_rows(jacobian: Jacobian) -> Tree:
    """Zeros like the Jacobian, at least float32: the average before the first call."""
    return tree_map(lambda leaf: torch.zeros_like(at_least_float32(leaf)), jacobian)


def averaged(rows: Tree, keep: Tensor, jacobian: Jacobian, factors: Tensor) -> tuple[Tree, Callable[[Tensor], Weights]]:
    """The next moving average, `Y_i = keep rows_i + factors_i J_i`: `keep` is float64 `[]`, `factors` `[m]`; and a
    function of w that returns `w'Y` as weights of the rows J: `AffineWeights` for every leaf.
    """

    def average(old: Tensor, leaf: Tensor) -> Tensor:
        return keep.to(old.dtype) * old + per_row(factors, leaf).to(old.dtype) * leaf

    def affine(weights: Tensor) -> Weights:
        rest = lambda x: ((weights * keep).to(x.dtype) @ as_matrix(x)).reshape(x.shape[1:])
        return tree_map(lambda x: AffineWeights(per_row(weights * factors, x), rest(x)), rows)

    return tree_map(average, rows, jacobian), affine
