"""The names of the objectives."""

from collections.abc import Sequence
from itertools import product
from typing import Any

from torch import Tensor

from functional_jd.core.arguments import here, refuse
from functional_jd.core.tree import tree_leaves, tree_names
from functional_jd.core.types import Losses


def objective_names(losses: Losses) -> list[str]:
    """Return the name of every objective, in the order of the rows, from the structure of the losses.

    Args:
        losses: a tensor or pytree of tensors with m elements: what a loss function returns, or `StepInfo.losses`.

    Returns:
        m names: the keys, joined by dots; with an index, `"key[2]"`, if a leaf holds several objectives; the index
        alone for one tensor `[m]`.

    Raises:
        TypeError: a leaf is not a tensor.

    Example:
        >>> objective_names({"image": torch.zeros(2), "digits": {"left": torch.zeros(())}})
        ['digits.left', 'image[0]', 'image[1]']
    """
    names: list[str] = []
    for name, leaf in zip(tree_names(losses), tree_leaves(losses), strict=True):
        if not isinstance(leaf, Tensor):
            found = f"every loss must be a tensor, found {type(leaf).__name__} in {name!r}"
            raise TypeError(f"objective_names: {found}. Pass what the loss function returned.")
        for index in product(*map(range, leaf.shape)):
            indices = ", ".join(map(str, index))
            one = f"{name}[{indices}]" if index else name
            names.append((indices or "loss") if isinstance(losses, Tensor) else one)
    return names


def names_or_indices(names: Any, m: int) -> list[str]:
    """Return the m given names, or the row indices for `names=None`."""
    cure = "objective_names(losses) returns them in the order of the rows."
    if names is None:
        return [str(i) for i in range(m)]
    if not isinstance(names, Sequence) or isinstance(names, str):  # a set has no order
        refuse("names", "a list of names", names, cure)
    if len(names) != m:
        raise ValueError(f"{here()}: expected one name for each of {m} objectives, found {len(names)}. {cure}")
    return list(map(str, names))
