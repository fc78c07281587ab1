"""Observations of rows, in the form that rules take, and which rows did not overflow."""

from functools import reduce
from typing import Any

import torch
from torch import Tensor

from functional_jd.aggregation.combine import combined, products_of_rows
from functional_jd.aggregation.observation import Observation, Products
from functional_jd.core.heads import direction_with_heads, nan_unless_finite, of_groups, split_heads
from functional_jd.core.tree import any_sharded, tree_flatten, tree_leaves
from functional_jd.core.types import Direction, Jacobian, Losses
from functional_jd.engines.kinds.from_rows import gramian_from_rows
from functional_jd.engines.plan import Plan
from functional_jd.precision.loss_scale import nan_rows_unless, unscale


def of_rows(plan: Plan, jacobian: Jacobian, values: Losses, carried: Any) -> Observation:
    """The observation of rows of which some may not be finite: of their inner products if the rule needs no more."""
    view, exact = plan.view, True
    if plan.scale is not None:
        leaves = tree_leaves(jacobian)
        if view.products == "none" and view.groups is None and not any_sharded(leaves):
            return _of_magnitudes(plan, jacobian, values, carried)
        # The squares of finite float32 numbers are finite in float64. Without a scale it does not matter whether a step
        # is skipped for rows or for squares that overflow.
        exact = all(leaf.dtype != torch.float64 for leaf in leaves)
    if view.inner_products_suffice and exact:
        return of_products(*gramian_from_rows((jacobian, values, carried), plan))
    return _of_whole_rows(plan, jacobian, values, carried)


def of_products(products: Products, values: Losses, carried: Any, pull: Any) -> Observation:
    """The observation of inner products, which tell what overflowed."""
    return Observation(values, products=products, pullback=lambda weights: (pull(weights), None), carried=carried)


def _of_magnitudes(plan: Plan, jacobian: Jacobian, values: Losses, carried: Any) -> Observation:
    """The observation for rules that need no gradients: the largest magnitudes tell what overflowed."""
    rows, heads = split_heads(jacobian)
    found, pull = products_of_rows(plan.where, *tree_flatten(rows), "magnitudes")
    dims = plan.scale_state.scale.ndim
    finite = finite_rows(found if dims else nan_unless_finite(found, heads), dims)

    def pullback(weights: Any) -> tuple[Direction, None]:
        return direction_with_heads(pull(weights), heads), None

    return Observation(values, pullback=pullback, finite=finite, carried=carried)


def _of_whole_rows(plan: Plan, jacobian: Jacobian, values: Losses, carried: Any) -> Observation:
    """The observation for rules that receive the rows themselves."""
    jacobian, finite = checked(plan, jacobian)

    def pullback(weights: Any) -> tuple[Direction, None]:
        return combined(plan.where, jacobian, weights), None

    return Observation(values, rows=jacobian, pullback=pullback, finite=finite, carried=carried, where=plan.where)


def checked(plan: Plan, jacobian: Jacobian) -> tuple[Jacobian, Tensor | None]:
    """The rows, and which of them are finite.

    If they are not, a step is skipped, and its rule receives zeros. If no step looks at the flags, weights have to show
    it: the rule receives NaN.
    """
    if not plan.guarded and plan.scale is None:
        return jacobian, None
    rows, finite = unscale(torch.ones_like(plan.scale_state.scale), jacobian)
    return rows if plan.guarded else nan_rows_unless(finite, rows), finite


def without_overflow(products: Products, flags: int) -> tuple[Products, Tensor]:
    """Inner products with zeros for rows that overflowed, and flags of those that did not: one, or one a row.

    As with whole rows, the rule never receives what is not finite, nor any row if one scale serves all; the direction
    shows it.
    """
    rows = finite_rows(products, flags)

    def masked(own: Tensor) -> Tensor:
        return torch.where(rows[:, None] & rows if rows.ndim and own.ndim > 1 else rows, own, 0)

    return masked(products) if isinstance(products, Tensor) else of_groups(masked, products), rows


def finite_rows(products: Products, flags: int) -> Tensor:
    """Which rows have finite inner products with themselves: bool `[m]`, or, for 0 flags, `[]`, whether all have."""
    parts = [products] if isinstance(products, Tensor) else list(products.values())
    squares = [own if own.ndim == 1 else own.diagonal() for own in parts]
    largest = squares[0] if len(squares) == 1 else reduce(torch.maximum, squares)
    return (largest if flags else largest.amax()) < torch.inf
