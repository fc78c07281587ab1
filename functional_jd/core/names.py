"""The names of the objectives."""

from itertools import product
from typing import Any

from torch import Tensor

from functional_jd.core.record_display import children
from functional_jd.core.tree import tree_leaves, tree_map, tree_names
from functional_jd.core.types import Losses, Tree


def objective_names(losses: Losses) -> list[str]:
    """A name for every objective, in the order of the rows.

    Records hold tensors only, so names stand beside them: in the structure of the losses, which `StepInfo` keeps.

    Args:
        losses: tensors with m elements, or a pytree of them: what a loss function returns, or `StepInfo.losses`.

    Returns:
        m names: the keys, joined by dots; with the index, `"key[2]"`, where a leaf holds several objectives; the index
        alone for one tensor `[m]`.

    Raises:
        TypeError: a leaf is no tensor.

    Example:
        >>> objective_names({"image": torch.zeros(2), "digits": {"left": torch.zeros(())}})
        ['digits.left', 'image[0]', 'image[1]']
    """
    names: list[str] = []
    for name, leaf in zip(_leaf_names(losses), tree_leaves(losses), strict=True):
        if not isinstance(leaf, Tensor):
            raise TypeError(
                f"objective_names: every loss must be a tensor, found {type(leaf).__name__} in {name!r}. "
                "Hand over what the loss function returned."
            )
        for index in product(*map(range, leaf.shape)):
            place = ", ".join(map(str, index))
            bare = isinstance(losses, Tensor)
            names.append((place or "loss") if bare else f"{name}[{place}]" if index else name)
    return names


def names_or_indices(names: Any, m: int, where: str) -> list[str]:
    """The names given, or the numbers of the rows, if they are m.

    Raises:
        ValueError: more or fewer than m.
    """
    chosen = [str(i) for i in range(m)] if names is None else [str(name) for name in names]
    if len(chosen) != m:
        raise ValueError(
            f"{where}: expected one name for each of {m} objectives, found {len(chosen)}. "
            "objective_names(losses) gives them in the order of the rows."
        )
    return chosen


class _Mark:
    """Stands where a leaf stood: no other is the same, though one tensor may stand in two places."""


def _leaf_names(tree: Tree) -> list[str]:
    """The leaves' names, in the order of `tree_leaves`: with the fields of records, which optree only counts."""
    marked = tree_map(lambda _: _Mark(), tree)
    names: dict[Any, str] = {}

    def walk(node: Any, path: tuple[str, ...]) -> None:
        names[id(node)] = ".".join(path)
        for key, child in children(node) or []:
            walk(child, (*path, key))

    walk(marked, ())
    marks = tree_leaves(marked)
    return [names.get(id(mark), name) for mark, name in zip(marks, tree_names(tree), strict=True)]
