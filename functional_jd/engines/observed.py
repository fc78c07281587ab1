"""Observations: from rows, from their inner products, or from a weighted backward pass, in the form that rules take."""

from functools import reduce
from typing import Any

import torch
from torch import Tensor

from functional_jd.aggregation.combine import combined, products_of_rows
from functional_jd.aggregation.observation import Observation, Products, Pulled, Scaling
from functional_jd.core.float64 import widest
from functional_jd.core.heads import (
    Heads,
    direction_of_rows,
    direction_with_heads,
    nan_unless_finite,
    split_heads,
)
from functional_jd.core.rows import InRange, are_in_range, in_range, of_groups, pulled_in_range
from functional_jd.core.tree import all_finite, any_sharded, tree_flatten, tree_leaves
from functional_jd.core.types import Direction, Jacobian, Losses, Tree, Weights
from functional_jd.engines.kinds.from_rows import Pull, products_and_pullback
from functional_jd.engines.plan import Plan
from functional_jd.precision.loss_scale import inverse_of, nan_rows_unless, unscale


def of_rows(plan: Plan, jacobian: Jacobian, values: Losses, carried: Any) -> Observation:
    """The observation of scaled rows."""
    view, scaled = plan.view, plan.options.scale is not None
    rows, heads = split_heads(jacobian)
    if scaled and view.products == "none" and view.groups is None and not any_sharded(tree_leaves(rows)):
        return of_magnitudes(plan, rows, heads, values, carried)
    # The squares of finite float32 numbers are finite in float64. Without a scale it does not matter whether a step is
    # skipped for rows or for squares that overflow.
    exact = not scaled or all(leaf.dtype.itemsize <= 4 for leaf in tree_leaves(rows))
    if view.inner_products_suffice and exact:
        groups = None if view.groups is None else {key: own.products for key, own in view.groups.items()}
        spoiling = _spoiling(plan, heads)
        found = products_and_pullback(plan.where, rows, view.products, groups)
        products = nan_unless_finite(found[0], spoiling) if spoiling else found[0]
        return of_products(plan, products, found[1], heads, values, carried)
    return of_whole_rows(plan, jacobian, values, carried)


def of_magnitudes(plan: Plan, rows: Tree, heads: Heads, values: Losses, carried: Any) -> Observation:
    """The observation of scaled rows for rules that need no gradients: the largest magnitudes tell what overflowed."""
    assert plan.options.scale is not None
    inverse = inverse_of(plan.options.scale)
    found, pull = products_of_rows(plan.where, rows, *tree_flatten(rows), "magnitudes", inverse)
    spoiling = _spoiling(plan, heads)
    finite = finite_rows(nan_unless_finite(found, spoiling) if spoiling else found, plan.scale.scale.ndim)

    def pullback(weights: Any) -> Pulled:
        whole = direction_with_heads(pull(weights), heads)
        return Pulled(whole, finite, all_finite(whole))

    return Observation(values, pullback=pullback, carried=carried)


def of_whole_rows(plan: Plan, jacobian: Jacobian, values: Losses, carried: Any) -> Observation:
    """The observation of scaled rows for rules that receive the rows themselves."""
    finite = torch.ones((), dtype=torch.bool)
    if plan.guarded or plan.options.scale is not None:
        jacobian, finite = unscaled(plan, jacobian)
    heads = split_heads(jacobian)[1]

    def pullback(weights: Weights) -> Pulled:
        direction = combined(plan.where, jacobian, weights)
        # The heads' gradient was finite, or is zero, as `unscale` left it.
        return Pulled(direction, finite, all_finite(direction_of_rows(direction, heads)))

    return Observation(values, rows=jacobian, pullback=pullback, carried=carried, where=plan.where)


def unscaled(plan: Plan, jacobian: Jacobian) -> tuple[Jacobian, Tensor]:
    """The rows without the scale, and which of them are finite.

    Where they are not, a step is skipped, and its rule sees zeros. Where nobody looks at the flags, weights shall show
    it: there the rule sees NaN.
    """
    rows, finite = unscale(plan.scale, jacobian)
    return rows if plan.guarded else nan_rows_unless(finite, rows), finite


def of_products(plan: Plan, products: Products, pull: Pull, heads: Heads, values: Losses, carried: Any) -> Observation:
    """The observation of the inner products of scaled rows: the scale goes into products and weights."""
    factor = plan.options.scale

    def pullback(weights: Any) -> Pulled:
        direction = pulled_by(pull, weights)
        whole = direction_with_heads(direction, heads) if heads else direction
        # With one scale, no row is finite where the heads' gradient is not.
        return Pulled(whole, None, None if factor is None else all_finite(whole if factor.ndim else direction))

    scaling = Scaling(factor, plan.scale.scale.ndim if plan.guarded else None)
    return Observation(values, products=products, pullback=pullback, carried=carried, scaling=scaling)


def _spoiling(plan: Plan, heads: Heads) -> Heads:
    """The heads of which products must tell an overflow: with a scale for each row, the rows do so by themselves."""
    factor = plan.options.scale
    return () if factor is not None and factor.ndim else heads


def settled(products: Products, factor: Tensor | None, flags: int | None) -> tuple[Products, Tensor | None]:
    """Inner products as rules take them, from those of scaled rows, and which rows did not overflow."""
    if factor is not None:
        # Where a device has no float64, products stand on the host.
        some = products if isinstance(products, Tensor) else next(iter(products.values()))
        inverse = factor.to(some.device).double().reciprocal()

        def divided(own: Tensor) -> Tensor:
            rows = inverse.expand(len(own))
            return own * (rows if own.ndim == 1 else rows[:, None]) * rows

        products = of_groups(divided, products)
    return (products, None) if flags is None else without_overflow(products, flags)


def weights_for(weights: Weights, factor: Tensor | None, known: bool = False) -> Weights | InRange:
    """The weights of scaled rows, from those of rows; `known`: whether a look at their values costs nothing."""
    if factor is None:
        return weights
    some = weights if isinstance(weights, Tensor) else next(iter(weights.values()))
    wide = widest(some.device)
    inverse = factor.to(some.device, wide).reciprocal()
    found = of_groups(lambda own: own.to(wide) * inverse, weights)
    return found if known and are_in_range(found) else in_range(found)


def pulled_by(pull: Pull, weights: Weights | InRange) -> Direction:
    """The direction that the pullback of scaled rows makes of their weights."""
    return pulled_in_range(pull, weights) if isinstance(weights, InRange) else pull(weights)


def without_overflow(products: Products, flags: int) -> tuple[Products, Tensor]:
    """Inner products with zeros for rows that overflowed, and flags of those that did not: one, or one a row.

    As with unscaled rows, the rule never sees what is not finite, nor any row where one scale serves all; the direction
    does.
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
