"""Flattening of pytrees in functions that torch.compile traces.

A tracer walks through every instruction: through optree's own walk, a step of two layers spent half of the time that
it took to trace there. This walk knows the containers of Python; the others are left to optree.
"""

from collections import OrderedDict
from collections.abc import Callable
from types import NoneType
from typing import Any

from torch import Tensor

_LEAVES = (Tensor, int, float, str)


class Node:
    """A container in the structure of a pytree.

    Attributes:
        kind: the class of the container.
        keys: of a dict, as they were inserted.
        ordered: of a dict, the same keys sorted, which is the order of the leaves.
        children: the structure of what it contains, None for a leaf; of a dict by sorted key.
    """

    def __init__(self, kind: Any, keys: list[Any], ordered: list[Any], children: "list[Node | None]"):
        self.kind = kind
        self.keys = keys
        self.ordered = ordered
        self.children = children

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Node) and same_structure(self, other)

    __hash__ = None  # pyright: ignore[reportAssignmentType]


def same_structure(one: Node | None, other: Node | None) -> bool:
    """Return whether two pytrees have the same structure. The order in which keys were inserted counts as in optree."""
    if one is None or other is None:
        return one is other
    if one.kind is not other.kind or one.ordered != other.ordered or len(one.children) != len(other.children):
        return False
    if one.kind is OrderedDict and one.keys != other.keys:
        return False
    for a, b in zip(one.children, other.children, strict=True):
        if not (a is None and b is None) and not same_structure(a, b):
            return False
    return True


def flatten(tree: Any, leaves: list[Any], is_named_tuple: Callable[[Any], bool]) -> "Node | bool | None":
    """Append the leaves of a pytree to a list, and return its structure; False where a class is unknown here.

    Args:
        tree: the pytree.
        leaves: where its leaves go.
        is_named_tuple: whether a class is a named tuple that nobody registered with functions of its own.
    """
    if isinstance(tree, _LEAVES):
        leaves.append(tree)
        return None
    keys = ordered = []
    kind = type(tree)
    if tree is None:
        return Node(kind, keys, ordered, [])
    if kind is dict or kind is OrderedDict:
        keys = list(tree)
        for key in keys:  # others, optree sorts in its own way
            if type(key) is not type(keys[0]) or type(key) not in (str, int):
                return False
        ordered = sorted(keys)
        parts = [tree[key] for key in ordered]
    elif kind is tuple or kind is list or is_named_tuple(kind):
        parts = list(tree)
    else:
        return False
    children: list[Node | None] = []
    for part in parts:
        if isinstance(part, Tensor):  # most of them: no call
            leaves.append(part)
            children.append(None)
            continue
        child = flatten(part, leaves, is_named_tuple)
        if child is False:
            return False
        children.append(child)  # pyright: ignore[reportArgumentType]
    return Node(kind, keys, ordered, children)


def unflatten(structure: Node | None, leaves: list[Any]) -> Any:
    """Build the pytree with this structure, and remove its leaves from the end of a list that holds them reversed."""
    if structure is None:
        return leaves.pop()
    kind = structure.kind
    parts = [leaves.pop() if child is None else unflatten(child, leaves) for child in structure.children]
    if kind is dict or kind is OrderedDict:
        # A comprehension, as `dict` takes longer to trace.
        named = {key: part for key, part in zip(structure.ordered, parts, strict=True)}  # noqa: C416
        if structure.keys != structure.ordered:
            named = {key: named[key] for key in structure.keys}
        return named if kind is dict else OrderedDict(named)
    if kind is list:
        return parts
    if kind is tuple:
        return tuple(parts)
    return None if kind is NoneType else kind(*parts)


def up_to(structure: Node | None, tree: Any, leaves: list[Any]) -> None:
    """Append what stands in a pytree where the structure has leaves to a list.

    Raises:
        ValueError: the pytree has another structure.
    """
    if structure is None:
        leaves.append(tree)
        return
    is_dict = structure.kind is dict or structure.kind is OrderedDict
    # To optree, all dicts are of one kind here.
    if not (isinstance(tree, dict) if is_dict else type(tree) is structure.kind):
        raise ValueError(f"expected a {structure.kind.__name__}, found {type(tree).__name__}.")
    if tree is None:
        return
    if is_dict and sorted(tree) != structure.ordered:
        raise ValueError(f"expected the keys {structure.ordered}, found {sorted(tree)}.")
    if len(tree) != len(structure.children):
        raise ValueError(f"expected {len(structure.children)} elements, found {len(tree)}.")
    parts = [tree[key] for key in structure.ordered] if is_dict else list(tree)
    for part, child in zip(parts, structure.children, strict=True):
        up_to(child, part, leaves)


def paths(structure: Node | None) -> list[list[str]]:
    """Return the keys, indices and names of fields that lead to each leaf."""
    if structure is None:
        return [[]]
    keys: Any = range(len(structure.children))
    if structure.kind is dict or structure.kind is OrderedDict:
        keys = structure.ordered
    elif hasattr(structure.kind, "_fields"):
        keys = structure.kind._fields
    found: list[list[str]] = []
    for key, child in zip(keys, structure.children, strict=True):
        found += [[str(key), *path] for path in paths(child)]
    return found
