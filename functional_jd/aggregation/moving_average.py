"""Moving averages of the rows of a Jacobian, and their weighted sum as weights of the current rows."""

import torch
from torch import Tensor

from functional_jd.core.float64 import on_wide_device
from functional_jd.core.rows import as_matrix, at_least_float32, per_row
from functional_jd.core.tree import tree_leaves, tree_map
from functional_jd.core.types import AffineWeights, Jacobian, Tree


def zero_rows(jacobian: Jacobian) -> Tree:
    """Zeros like the Jacobian, at least float32: the average before the first call."""
    return tree_map(lambda leaf: torch.zeros_like(at_least_float32(leaf)), jacobian)


def next_average(rows: Tree, keep: Tensor, jacobian: Jacobian, factors: Tensor) -> Tree:
    """The next moving average, `keep rows_i + factors_i J_i`: `keep` is float64 `[]`, `factors` `[m]`."""

    def average(old: Tensor, leaf: Tensor) -> Tensor:
        return keep.to(old.dtype) * old + per_row(factors, leaf).to(old.dtype) * leaf

    return tree_map(average, rows, jacobian)


def average_as_weights(rows: Tree, keep: Tensor, factors: Tensor, weights: Tensor) -> Tree:
    """The sum `sum_i weights_i (keep rows_i + factors_i J_i)` of averages, as weights of the current rows J: a pytree
    like the `rows` before, with `AffineWeights` for every leaf.
    """

    def affine(leaf: Tensor) -> AffineWeights:
        rest = ((weights * keep).to(leaf.dtype) @ as_matrix(leaf)).reshape(leaf.shape[1:])
        return AffineWeights(per_row(weights * factors, leaf), rest)

    return tree_map(affine, rows)


def row_norms(jacobian: Jacobian) -> Tensor:
    """The norms of the rows: float64 `[m]`, summed in float64. A row of zeros has derivative zero."""
    matrices = [on_wide_device(as_matrix(leaf)) for leaf in tree_leaves(jacobian)]
    leaves = [torch.linalg.vector_norm(matrix, dim=1, dtype=torch.float64) for matrix in matrices]
    return torch.linalg.vector_norm(torch.stack(leaves), dim=0)
