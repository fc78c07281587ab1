"""Rules from functions of a matrix, to test aggregators of other libraries."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from functional_jd.aggregation.aggregate import Aggregator
from functional_jd.aggregation.views import full_jacobian
from functional_jd.core.arguments import check_function, described
from functional_jd.core.rows import as_matrix, at_least_float32, per_row
from functional_jd.core.tree import tree_flatten, tree_unflatten
from functional_jd.core.types import AffineWeights, Jacobian, Weights


def black_box(f: Callable[[Tensor], Tensor]) -> Aggregator:
    """A rule from a function `f(matrix) -> direction`, for `laws_of` and `obeys`.

    `direction = f(J)`, for the rows of the Jacobian joined to one matrix

    Args:
        f: receives the matrix `[m, n]` in the dtype of the Jacobian, and returns the direction `[n]`: an aggregator of
            TorchJD, LibMTL or conflictfree, or your own. A function whose state changes from call to call breaks
            `pure`: create it in every call, `lambda J: NashMTL(len(J))(J)`.

    Returns:
        A stateless rule. Its weights are not known: they are `AffineWeights` of zero, whose `rest` is the direction.

    Raises:
        TypeError: `f` is not callable, or does not return a tensor.
        ValueError: `f` does not return one number per column.

    Laws:
        `aggregate(black_box(f), J).direction = f(J)` for a finite matrix J. The laws allow rounding relative to
        the mean length of the rows, since weights are not known. `on_the_simplex` becomes: the direction lies in the
        convex hull of the rows. `non_finite` finds exceptions only, because zero times a non-finite row is NaN.

    Example:
        >>> print(laws_of(black_box(lambda J: J.mean(0)), homogeneous, on_the_simplex))
        homogeneous               holds
        on_the_simplex            holds
    """
    check_function("black_box", "f", f, "Pass a function of the matrix [m, n] that returns the direction [n].")

    def update(jacobian: Jacobian, _: Any) -> tuple[Weights, tuple[()]]:
        leaves, structure = tree_flatten(jacobian)
        rows = [as_matrix(leaf) for leaf in leaves]
        direction = f(torch.cat(rows, dim=1))
        _check_direction(direction, sum(row.shape[1] for row in rows))
        parts = direction.split([row.shape[1] for row in rows])
        weights = [
            AffineWeights(per_row(leaf.new_zeros(len(leaf), dtype=torch.float64), leaf), _rest(part, leaf))
            for part, leaf in zip(parts, leaves, strict=True)
        ]
        return tree_unflatten(structure, weights), ()

    return Aggregator(full_jacobian, lambda _: (), update)


def _rest(part: Tensor, leaf: Tensor) -> Tensor:
    return at_least_float32(part).reshape(leaf.shape[1:])


def _check_direction(direction: Any, n: int) -> None:
    if not isinstance(direction, Tensor):
        raise TypeError(
            f"black_box: f must return a tensor, the direction [{n}], found {described(direction)}. "
            "Convert it with torch.as_tensor."
        )
    if direction.shape != (n,):
        raise ValueError(
            f"black_box: f must return one number per column, [{n}], found {list(direction.shape)}. "
            "Return the direction, not the weights."
        )
