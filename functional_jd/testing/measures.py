"""What the laws measure with: trees as vectors and matrices, their reach, and Jacobians changed in known ways."""

from typing import Any

import torch
from torch import Tensor

from functional_jd.aggregation.aggregate import Aggregation, combine
from functional_jd.core.tree import tree_flatten, tree_leaves, tree_map
from functional_jd.core.types import Jacobian, Tree

TOLERANCE = 2.0**-26


def flat(tree: Tree) -> Tensor:
    return torch.cat([leaf.reshape(-1).double() for leaf in tree_leaves(tree)])


def matrix(jacobian: Jacobian) -> Tensor:
    return torch.cat(
        [leaf.reshape(len(leaf), leaf.shape[1:].numel()).double() for leaf in tree_leaves(jacobian)], dim=1
    )


def reach_of(jacobian: Jacobian, weights: Tree) -> Tensor:
    """`sum_i |weights_i J_i|`, entry by entry."""
    return flat(combine(tree_map(lambda leaf: leaf.double().abs(), jacobian), tree_map(torch.abs, weights)))


def check_close(
    found: Aggregation,
    expected: Aggregation,
    jacobian: Jacobian,
    message: str,
    share: float = TOLERANCE,
    smallest: float = 0.0,
) -> None:
    error = (flat(found.direction) - flat(expected.direction)).abs().max()
    reach = reach_of(jacobian, expected.weights).max()
    allowed = share * reach + 2.0**-40 * matrix(jacobian).abs().max() + smallest
    assert error <= allowed, f"{message}: off by {error:.3g}, with a reach of {reach:.3g}"


def check_same(found: Tree, expected: Tree, message: str) -> None:
    assert form(found) == form(expected), message
    for x, y in zip(tree_leaves(found), tree_leaves(expected), strict=True):
        assert ((x == y) | (x.isnan() & y.isnan())).all(), message


def form(tree: Tree) -> Any:
    leaves, structure = tree_flatten(tree)
    strange = {type(leaf).__name__ for leaf in leaves if not isinstance(leaf, Tensor)}
    assert not strange, f"expected tensors only, found {strange}"
    return structure, [(leaf.shape, leaf.dtype) for leaf in leaves]


def element(batch: Tree, i: int) -> Tree:
    return tree_map(lambda leaf: leaf[i], batch)


def reordered(order: Tensor, jacobian: Jacobian) -> Jacobian:
    return tree_map(lambda leaf: leaf[order], jacobian)


def rescaled(jacobian: Jacobian, c: float | Tensor) -> Jacobian:
    factors = torch.as_tensor(c, dtype=torch.float64).reshape(-1)
    return tree_map(lambda leaf: leaf * factors.reshape(-1, *[1] * (leaf.ndim - 1)).to(leaf.dtype), jacobian)


def narrowed(jacobian: Jacobian) -> Jacobian:
    """Rows multiplied by powers of two, such that the largest entry of each lies within 2^-8 and 2^8, or is zero."""
    exponents = torch.frexp(matrix(jacobian).abs().amax(1)).exponent
    return rescaled(jacobian, 2.0 ** (exponents.clamp(-7, 8) - exponents).double())


def cut(leaf: Tensor) -> Tree:
    x = leaf.reshape(len(leaf), leaf.shape[1:].numel())
    half = x.shape[1] // 2
    return {"b": [x[:, half:-1], x[:, -1]], "a": x[:, :half].unsqueeze(1)}  # out of order, as dicts may be


def turned(leaf: Tensor) -> Tensor:
    n = leaf.shape[1:].numel()
    x = torch.nn.functional.pad(leaf.reshape(len(leaf), n), (0, -n % 4))
    signs = torch.tensor([[1, 1, 1, 1], [1, -1, 1, -1], [1, 1, -1, -1], [1, -1, -1, 1]], dtype=leaf.dtype)
    return (x.reshape(len(leaf), -1, 4) @ (signs / 2)).reshape(len(leaf), -1)


def poisoned(leaf: Tensor, poison: float, row: int) -> Tensor:
    bad = leaf.clone()
    bad[row].view(-1)[0] = poison
    return bad
