"""What a kind of objectives does not say of itself, from its rows."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from functional_jd.aggregation.combine import combine, combined, products_of_rows
from functional_jd.aggregation.observation import Products
from functional_jd.aggregation.views import gramian_of_leaves, norms
from functional_jd.core.heads import direction_with_heads, nan_unless_finite, split_heads
from functional_jd.core.rows import at_least_float32
from functional_jd.core.tree import any_sharded, tree_flatten, tree_leaves, tree_map
from functional_jd.core.types import Direction, Tree
from functional_jd.engines.evaluate import check_weights, objective_count
from functional_jd.engines.kinds.results import FoundGramian, FoundJacobian, FoundWeighted, Pullback, PulledRows
from functional_jd.engines.plan import Plan
from functional_jd.precision.autocast import autocast_disabled
from functional_jd.precision.loss_scale import unscale

Pull = Callable[[Any], Direction]
"""From weights to a direction."""


def gramian_from_rows(found: FoundJacobian, plan: Plan) -> FoundGramian:
    """What `plan.products` says of rows, of each group if there are groups."""
    jacobian, values, aux = found
    rows, heads = split_heads(jacobian)
    if plan.products == "factors":
        return [[leaf] for leaf in tree_leaves(rows)], values, aux, partial(combine, rows)
    products, pull = products_and_pullback(plan.where, rows, plan.products, plan.groups)
    if not heads:
        return products, values, aux, pull
    # With a scale for each row, the rows tell by themselves what overflowed in the heads.
    if plan.scale is None or not plan.scale.ndim:
        products = nan_unless_finite(products, heads)
    return products, values, aux, lambda weights: direction_with_heads(pull(weights), heads)


def weighted_from_rows(found: FoundJacobian, plan: Plan) -> FoundWeighted:
    """The pullback of weights of rows."""
    jacobian, values, aux = found
    flags = None
    if plan.scale is not None:
        jacobian, finite = unscale(torch.ones_like(plan.scale), jacobian)
        flags = finite.all().expand(finite.shape)
    rows, heads = tree_map(at_least_float32, split_heads(jacobian))

    def pullback(weights: Tensor, *, last: bool = False) -> PulledRows:  # noqa: ARG001
        check_weights(plan.where, weights, objective_count(values))
        return combine(rows, weights), flags

    return values, aux, Pullback(pullback, (lambda: (heads, flags)) if heads else None)


def products_and_pullback(where: str, rows: Tree, needed: str, groups: Any) -> tuple[Products, Pull]:
    """The inner products of rows, or their squared norms, by group if there are groups, and `combine` of the rows as
    at least float32.
    """
    if groups is not None:
        found = {key: products_and_pullback(where, rows[key], own, None) for key, _, own in groups}
        return {key: products for key, (products, _) in found.items()}, lambda weights: {
            key: found[key][1](weights[key]) for key in rows
        }
    with autocast_disabled():
        leaves, structure = tree_flatten(rows)
        if not any_sharded(leaves):
            return products_of_rows(where, leaves, structure, needed)
        whole = tree_map(at_least_float32, rows)
        products = gramian_of_leaves(leaves) if needed == "gramian" else norms(whole).square()
        return products, partial(combined, where, whole)
