"""Pytrees: the one module that flattens, and the only one that imports optree.

Dict keys come in sorted order, whatever order they were inserted in: two dicts with the same keys are the same tree.
A class is a container when it is registered with `torch.utils._pytree` or with optree's namespace `"functional_jd"`.
"""

from collections.abc import Callable
from typing import Any

import optree
import torch
from torch import Tensor

from functional_jd.core.torch_internals import pytree_nodes
from functional_jd.core.types import Tree

NAMESPACE = "functional_jd"


_TENSORS = {Tensor}


Structure = Any
"""What `tree_flatten` took off, and `tree_unflatten` puts on again."""


def tree_flatten(tree: Tree) -> tuple[list[Tensor], Structure]:
    """The leaves of a pytree, and its structure."""
    if torch.compiler.is_compiling():
        return _traced_flatten(tree)
    leaves, structure = optree.tree_flatten(tree, namespace=NAMESPACE)
    kinds = set(map(type, leaves))
    if kinds == _TENSORS or not (strangers := kinds & pytree_nodes.keys()):
        return leaves, (structure, None)  # pyright: ignore[reportReturnType]
    for container in strangers:
        _adopt(container)
    return tree_flatten(tree)


def tree_unflatten(structure: Structure, leaves: list[Any]) -> Tree:
    """The pytree of this structure with these leaves."""
    spec, empty = structure
    if empty is not None:
        rest = iter(leaves)
        leaves = [{} if hole else next(rest) for hole in empty]
    return optree.tree_unflatten(spec, leaves)


def leaves_like(structure: Structure, tree: Tree) -> list[Any]:
    """The leaves of a pytree that must have this structure (dicts match by key)."""
    spec, empty = structure
    leaves = spec.flatten_up_to(tree)
    return leaves if empty is None else [leaf for leaf, hole in zip(leaves, empty, strict=True) if not hole]


def tree_leaves(tree: Tree) -> list[Tensor]:
    """The leaves of a pytree."""
    return tree_flatten(tree)[0]


def tree_map(f: Callable[..., Any], tree: Tree, *rest: Tree) -> Tree:
    """Apply `f` leaf by leaf; `rest` must have the structure of `tree` (dicts match by key)."""
    if torch.compiler.is_compiling():

        def or_empty(leaf: Any, *others: Any) -> Any:
            return {} if _is_empty_dict(leaf) else f(leaf, *others)

        return optree.tree_map(or_empty, tree, *rest, is_leaf=_is_empty_dict, namespace=NAMESPACE)
    leaves, structure = tree_flatten(tree)
    others = [leaves_like(structure, other) for other in rest]
    return optree.tree_unflatten(structure[0], map(f, leaves, *others))


def tree_names(tree: Tree) -> list[str]:
    """The leaves' names, such as `"layers.0.weight"`; one bare leaf is called `"value"`."""
    tree_flatten(tree)
    paths = optree.tree_paths(tree, namespace=NAMESPACE)
    return [".".join(str(part) for part in path) or "value" for path in paths]


def all_finite(tree: Tree) -> Tensor:
    """Whether every value of a pytree of floating-point tensors is finite: bool `[]`.

    By the largest and the smallest value, which keep NaN: ten times faster on a CPU than `isfinite(leaf).all()`.
    """
    ends = [end for leaf in tree_leaves(tree) if leaf.numel() for end in torch.aminmax(leaf.detach())]
    return (torch.stack(ends).abs() < torch.inf).all() if ends else torch.ones((), dtype=torch.bool)


def row_count(jacobian: Tree, where: str) -> int:
    """The number m of rows that all leaves `[m, *p]` share.

    Raises:
        TypeError: a leaf is no floating-point tensor.
        ValueError: no leaves, no rows, or leaves that disagree.
    """
    rows: dict[int, int] = {}
    leaves = tree_leaves(jacobian)
    for index, leaf in enumerate(leaves):
        if not isinstance(leaf, Tensor):
            raise TypeError(
                f"{where}: every leaf must be a tensor of rows [m, *p], found {type(leaf).__name__} in "
                f"{tree_names(jacobian)[index]!r}. Register the container with torch.utils._pytree, or hand over its "
                "tensors."
            )
        if not leaf.is_floating_point() or leaf.ndim == 0:
            raise TypeError(
                f"{where}: every leaf must be a floating-point tensor of rows [m, *p], found {leaf.dtype} of shape "
                f"{list(leaf.shape)} in {tree_names(jacobian)[index]!r}. "
                "Stack one gradient per objective along the first dimension."
            )
        rows.setdefault(leaf.shape[0], index)
    if len(rows) > 1:
        names = tree_names(jacobian)
        found = " and ".join(f"{m} in {names[index]!r}" for m, index in rows.items())
        raise ValueError(
            f"{where}: every leaf needs the same number of rows, found {found}. "
            "Did you mix Jacobians of different losses?"
        )
    if not rows or 0 in rows:
        raise ValueError(
            f"{where}: needs at least one row (one objective), found none. Is the tree of losses or parameters empty?"
        )
    return next(iter(rows))


def floating_leaves(params: Tree, where: str) -> tuple[list[Tensor], Structure]:
    """The leaves and structure of a pytree that must hold floating-point tensors only.

    Raises:
        TypeError: a leaf is something else.
        ValueError: there are no leaves.
    """
    leaves, structure = tree_flatten(params)
    for index, leaf in enumerate(leaves):
        if not isinstance(leaf, Tensor) or not leaf.is_floating_point():
            found = str(leaf.dtype) if isinstance(leaf, Tensor) else type(leaf).__name__
            raise TypeError(
                f"{where}: all leaves must be floating-point tensors, found {found} in {tree_names(params)[index]!r}. "
                "Buffers and settings do not belong here: they are further arguments of the losses."
            )
    if not leaves:
        raise ValueError(f"{where}: expected at least one parameter tensor, found an empty tree.")
    return leaves, structure


def _traced_flatten(tree: Tree) -> tuple[list[Tensor], Structure]:
    """While torch.compile traces, which trips over empty dicts: there they are leaves, left out and put back."""
    leaves, spec = optree.tree_flatten(tree, is_leaf=_is_empty_dict, namespace=NAMESPACE)
    empty = [_is_empty_dict(leaf) for leaf in leaves]
    return [leaf for leaf, hole in zip(leaves, empty, strict=True) if not hole], (spec, empty)  # pyright: ignore[reportReturnType]


def _is_empty_dict(value: Any) -> bool:
    return isinstance(value, dict) and not value


def _adopt(container: type) -> None:
    """Make optree see through a class that is registered with torch's own pytree, just as torch does."""
    node = pytree_nodes[container]

    def unflatten(context: Any, children: Any) -> Any:
        return node.unflatten_fn(list(children), context)

    optree.register_pytree_node(container, node.flatten_fn, unflatten, namespace=NAMESPACE)
