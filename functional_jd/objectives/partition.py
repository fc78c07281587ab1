"""Trained and constant parts of a pytree."""

from collections.abc import Callable
from typing import Any

from torch import Tensor

from functional_jd.core.arguments import check_function, refuse
from functional_jd.core.tree import tree_flatten, tree_names
from functional_jd.core.types import Tree

_NOTHING: tuple[()] = ()


def partition(tree: Tree, predicate: Callable[[str, Tensor], bool]) -> tuple[Tree, Tree]:
    """Split a pytree into the leaves that are chosen and the rest.

    Args:
        tree: dicts, lists, tuples and NamedTuples of tensors, `dict(model.named_parameters())` for instance.
        predicate: `predicate(name, leaf) -> bool`, with dotted names such as `"encoder.0.weight"`.

    Returns:
        `(chosen, rest)`: pytrees like `tree`. Keys of dicts whose leaf is elsewhere are left out; in other containers
        `()`, which has no leaves, takes its place. `merge(*partition(tree, predicate))` is the tree.

    Raises:
        TypeError: `predicate` is not callable, or no leaf is a tensor.

    Example:
        >>> tree = {"a.w": torch.ones(1), "b.w": torch.zeros(1)}
        >>> trained, constant = objectives.partition(tree, lambda name, _: name[0] == "a")
        >>> list(trained), list(constant)
        (['a.w'], ['b.w'])
    """
    check_function("predicate", predicate, "Pass predicate(name, leaf).")
    leaves, structure = tree_flatten(tree)
    if leaves and not any(isinstance(leaf, Tensor) for leaf in leaves):  # pyright: ignore[reportUnnecessaryIsInstance]
        cure = "Pass for instance dict(module.named_parameters())."
        refuse("tree", "a pytree with tensors", tree if leaves[0] is tree else leaves[0], cure)
    chosen = [bool(predicate(name, leaf)) for name, leaf in zip(tree_names(tree), leaves, strict=True)]
    parts = [
        structure.unflatten([x if flag is wanted else _NOTHING for x, flag in zip(leaves, chosen, strict=True)])
        for wanted in (True, False)
    ]
    return _without_empty_keys(parts[0], tree), _without_empty_keys(parts[1], tree)


def merge(chosen: Tree, rest: Tree) -> Tree:
    """Put together what `partition` took apart.

    Args:
        chosen: the chosen leaves, or others in their place.
        rest: the other leaves.

    Returns:
        The pytree with all leaves. Differentiable in both.

    Raises:
        ValueError: a leaf is in both, or the two do not fit together.

    Example:
        >>> objectives.merge({"a": 1.0}, {"b": 2.0})
        {'a': 1.0, 'b': 2.0}
    """
    if _is_nothing(chosen) or _is_nothing(rest):
        return rest if _is_nothing(chosen) else chosen
    if isinstance(chosen, dict) and isinstance(rest, dict):
        try:
            names = sorted({*chosen, *rest})  # as pytrees sort them
        except TypeError as error:
            raise ValueError(f"merge: keys must sort together, found others: {error}. Take strings.") from error
        return {name: merge(chosen.get(name, _NOTHING), rest.get(name, _NOTHING)) for name in names}
    if type(chosen) is not type(rest) or not isinstance(chosen, list | tuple) or len(chosen) != len(rest):
        raise ValueError(
            f"merge: expected two parts of one pytree, found {type(chosen).__name__} and {type(rest).__name__} in one "
            "place. Pass what partition returned."
        )
    return _like(chosen, [merge(x, y) for x, y in zip(chosen, rest, strict=True)])


def _is_nothing(value: Any) -> bool:
    return isinstance(value, tuple) and not value


def _without_empty_keys(part: Tree, tree: Tree) -> Tree:
    """The part without the keys of dicts that hold nothing of it."""
    if isinstance(part, dict):
        kept = {name: _without_empty_keys(value, tree[name]) for name, value in part.items()}
        return {name: value for name, value in kept.items() if not _is_nothing(value) or _is_nothing(tree[name])}
    if isinstance(part, list | tuple) and isinstance(tree, list | tuple) and len(part) == len(tree):
        return _like(part, [_without_empty_keys(x, y) for x, y in zip(part, tree, strict=True)])
    return part


def _like(container: Any, parts: list[Tree]) -> Tree:
    return type(container)(*parts) if hasattr(container, "_fields") else type(container)(parts)
