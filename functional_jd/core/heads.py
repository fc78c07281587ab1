"""Heads apart from rows: the one place that knows a `MultitaskJacobian` from a Jacobian of rows only."""

from typing import Any, NamedTuple

import torch

from functional_jd.core.foreach import largest_magnitude
from functional_jd.core.record_display import displayed_as, outline
from functional_jd.core.rows import of_distinct
from functional_jd.core.tree import all_finite, any_sharded, tree_leaves
from functional_jd.core.types import Direction, Jacobian, Tree


@displayed_as(outline)
class MultitaskJacobian(NamedTuple):
    """The Jacobian of `multitask` losses: the trunk by objective, the heads already summed and unscaled.

    Attributes:
        shared: pytree like `params["shared"]`, leaves `[m, *p]`, row i multiplied by scale i.
        heads: pytree like `params["heads"]`, leaves `[*p]`: the gradient of the plain sum of the losses.
    """

    shared: Tree
    heads: Tree


Heads = tuple[Tree, ...]
"""The gradient of the heads `[*p]`, in a tuple of one; an empty tuple where there are rows only."""


def split_heads(jacobian: Jacobian) -> tuple[Tree, Heads]:
    """The rows `[m, *p]` of a Jacobian, and the gradient of its heads."""
    return (jacobian.shared, (jacobian.heads,)) if isinstance(jacobian, MultitaskJacobian) else (jacobian, ())


def rows_of(jacobian: Jacobian) -> Tree:
    """The rows `[m, *p]` of a Jacobian, without heads."""
    return split_heads(jacobian)[0]


def with_heads(rows: Tree, heads: Heads) -> Jacobian:
    """The Jacobian that `split_heads` took apart."""
    return MultitaskJacobian(rows, *heads) if heads else rows


def direction_with_heads(direction: Direction, heads: Heads) -> Direction:
    """The direction of all parameters, in the structure of `multitask` params where there are heads."""
    return {"shared": direction, "heads": heads[0]} if heads else direction


def nan_unless_finite(products: Any, heads: Heads) -> Any:
    """An overflow in the heads' summed gradient belongs to no row, so that it spoils all inner products."""
    if not heads or not (leaves := tree_leaves(heads)):
        return products
    if any_sharded(leaves):
        finite = all_finite(heads)
        return of_distinct(lambda own: torch.where(finite, own, torch.nan), products)
    if (largest := largest_magnitude(leaves)) is None:
        return products
    add = lambda own: torch.add(own, largest.to(own.device), alpha=0)  # zero times what is not finite is NaN
    return add(products) if isinstance(products, torch.Tensor) else of_distinct(add, products)
