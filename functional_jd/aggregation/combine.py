"""The weighted sum of rows: weights are one per row, or one per entry."""

from collections.abc import Callable
from contextlib import suppress
from functools import reduce
from typing import Any

import torch
from torch import Tensor

from functional_jd.core.arguments import described
from functional_jd.core.heads import direction_with_heads, split_heads
from functional_jd.core.rows import (
    as_matrix,
    at_least_float32,
    inner_products,
    joined,
    magnitudes,
    row_count,
    squared_norms,
    weighted_rows,
)
from functional_jd.core.sharding import shard_of, sharded_as
from functional_jd.core.tree import leaves_like, tree_flatten, tree_leaves, tree_map, tree_names, tree_unflatten
from functional_jd.core.types import AffineWeights, Direction, Jacobian, Tree, Weights
from functional_jd.precision.autocast import autocast_disabled


def combine(jacobian: Jacobian, weights: Weights) -> Direction:
    """Sum the weighted rows: `direction = sum_i weights_i J_i`.

    Args:
        jacobian: pytree with leaves `[m, *p]`, or a `MultitaskJacobian`.
        weights: `[m]`; or a pytree like the Jacobian. Its leaves are `[m]`, where the rows of a leaf, or all rows below
            a key, have one weight each; or have as many dimensions as the leaf, each of its size or 1: `[m, *p]` is one
            weight per entry. A leaf may be `AffineWeights(weights, rest)`, where `rest` `[*p]`, from earlier rows, is
            added.

    Returns:
        A pytree with leaves `[*p]` in the Jacobian's dtypes, summed in at least float32. For a `MultitaskJacobian` the
        dict `{"shared": ..., "heads": ...}` that `multitask` losses take as params.

    Raises:
        ValueError: weights of another structure or shape.

    Laws:
        Linear in the weights, and in the Jacobian except for `rest`. Non-finite values propagate, also with weight 0.
        Weights are rounded to the dtype of the sum: below float64, weights above 3e38 overflow, and those below 1e-38
        vanish. Rules that balance rows of norms 1e-19 and 1e19 give such weights.

    Example:
        >>> aggregation.combine({"w": torch.tensor([[1.0, 2.0], [3.0, 4.0]])}, torch.tensor([1.0, 0.5]))
        {'w': tensor([2.5000, 4.0000])}
    """
    return combined("combine", jacobian, weights)


def combined(where: str, jacobian: Jacobian, weights: Weights) -> Direction:
    """`combine`, whose errors name the function that the user called."""
    rows, heads = split_heads(jacobian)
    return direction_with_heads(_combined(where, rows, weights), heads)


def products_of_rows(
    where: str, leaves: list[Tensor], structure: Any, needed: str
) -> tuple[Tensor, Callable[[Weights], Direction]]:
    """The Gramian of rows with these leaves, their squared norms, or the largest of their `"magnitudes"`, and `combine`
    of them as at least float32, from one set of matrices. The caller of either switches autocast off.
    """
    shapes = [leaf.shape for leaf in leaves]
    matrices = joined([leaf if leaf.dtype.itemsize >= 4 else leaf.float() for leaf in leaves])
    found = {"gramian": inner_products, "magnitudes": magnitudes}.get(needed, squared_norms)
    add = torch.maximum if needed == "magnitudes" else torch.add

    def split(parts: list[Tensor], start: int) -> Tree:
        pairs = zip(parts, matrices, strict=True)
        own = [x for part, (_, widths) in pairs for x in ([part] if len(widths) == 1 else part.split(widths, -1))]
        whole = zip(own, shapes, strict=True)
        return tree_unflatten(structure, [x.reshape(shape[start:]) if len(shape) != 2 else x for x, shape in whole])

    def pullback(weights: Weights) -> Direction:
        if not isinstance(weights, Tensor) or weights.ndim > 1:
            return combined(where, split([matrix for matrix, _ in matrices], 0), weights)
        check_row_weights(where, weights, shapes[0][0])
        cast: dict[torch.dtype, Tensor] = {}  # once for all leaves
        summed: list[Tensor] = []
        for matrix, _ in matrices:
            if matrix.dtype not in cast:
                cast[matrix.dtype] = weights.to(matrix.device, matrix.dtype)
            own = cast[matrix.dtype]
            summed.append(own @ matrix if matrix.is_cpu else weighted_rows(own, matrix))
        return split(summed, 1)

    return reduce(add, [found(matrix) for matrix, _ in matrices]), pullback


def check_row_weights(where: str, weights: Tensor, m: int) -> None:
    """Refuse what is not one number per row."""
    if weights.shape != (m,) or weights.is_complex():
        found = described(weights) if weights.is_complex() else list(weights.shape)
        raise ValueError(
            f"{where}: expected one weight per row, [{m}], found {found}. "
            "Check the number of objectives of the rule and of its preference. A rule returns weights, no direction."
        )


def _combined(where: str, jacobian: Tree, weights: Weights) -> Tree:
    leaves, structure = tree_flatten(jacobian)
    m = row_count(jacobian, where, leaves)
    with autocast_disabled():
        if isinstance(weights, Tensor) and weights.ndim < 2:
            check_row_weights(where, weights, m)
            if all(leaf.dtype.itemsize <= 4 for leaf in leaves):
                weights = weights.to(leaves[0].device, torch.float32)  # once, and not for every leaf
            sums = [sharded_as(_weighted_sum(shard_of(leaf), weights), leaf, -1) for leaf in leaves]
            return tree_unflatten(structure, sums)
        weights = weights_by_leaf(weights, jacobian)
        if torch.compiler.is_compiling():  # torch.compile cannot trace names of leaves
            for leaf, own in zip(leaves, leaves_like(structure, weights), strict=True):
                _check_shape(where, leaf, own, m)
        else:
            _check_entrywise(where, weights, jacobian, m)
        return tree_map(_entrywise, jacobian, weights)


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


def _check_entrywise(where: str, weights: Weights, jacobian: Tree, m: int) -> None:
    """Refuse weights by leaf, of which one has none, or some of another shape."""
    by_leaf: list[Any] = []
    if isinstance(weights, Tensor | AffineWeights) == isinstance(jacobian, Tensor):
        with suppress(ValueError):
            by_leaf = leaves_like(tree_flatten(jacobian)[1], weights)
    if not by_leaf or not all(isinstance(x, Tensor | AffineWeights) for x in by_leaf):
        raise ValueError(
            f"{where}: weights must be one tensor [{m}], one number per row, or a pytree of tensors like the "
            f"Jacobian, found {_found(weights)}. Check what the rule returns."
        )
    for name, leaf, own in zip(tree_names(jacobian), tree_leaves(jacobian), by_leaf, strict=True):
        _check_shape(where, leaf, own, m, f" of leaf {name!r}" if name else "")


def _check_shape(where: str, leaf: Tensor, own: Tensor | AffineWeights, m: int, of_leaf: str = "") -> None:
    """Refuse weights of a leaf that are neither one for each row nor broadcast to it with all its dimensions."""
    shape, given = list(leaf.shape), own.weights if isinstance(own, AffineWeights) else own
    sizes = zip(given.shape, shape, strict=False)
    if given.shape != (m,) and (given.ndim != len(shape) or any(size not in (1, full) for size, full in sizes)):
        raise ValueError(
            f"{where}: expected weights{of_leaf} of shape [{m}], one per row, or that broadcast to {shape} with as "
            f"many dimensions, found {list(given.shape)}. A rule returns weights, and no direction."
        )
    if isinstance(own, AffineWeights) and list(own.rest.shape) != shape[1:]:
        raise ValueError(
            f"{where}: expected the rest{of_leaf} of shape {shape[1:]}, that of the direction, found "
            f"{list(own.rest.shape)}. It is added to the weighted sum of the rows."
        )


def _found(weights: Weights) -> str:
    return f"a tensor {list(weights.shape)}" if isinstance(weights, Tensor) else described(weights)


def _entrywise_sum(leaf: Tensor, weights: Tensor | AffineWeights) -> Tensor:
    if isinstance(weights, AffineWeights):
        return (_entrywise_sum(at_least_float32(leaf), weights.weights) + weights.rest).to(leaf.dtype)
    if weights.shape[:1] == leaf.shape[:1] and weights.shape[1:].numel() == 1:
        return _weighted_sum(leaf, weights.reshape(len(weights)))
    return (at_least_float32(leaf) * weights).sum(0).to(leaf.dtype)


def _weighted_sum(leaf: Tensor, weights: Tensor) -> Tensor:
    matrix = as_matrix(at_least_float32(leaf))
    return weighted_rows(weights.to(matrix.dtype), matrix).reshape(leaf.shape[1:]).to(leaf.dtype)
