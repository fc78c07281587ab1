"""The record of a kind of objectives for engines, and defaults that are made from its rows."""

from collections.abc import Callable
from functools import partial, reduce
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from functional_jd.aggregation.combine import combine, combined, products_of_rows
from functional_jd.aggregation.observation import Products
from functional_jd.aggregation.views import gramian_of_leaves, norms
from functional_jd.core.heads import direction_with_heads, nan_unless_finite, split_heads
from functional_jd.core.rows import at_least_float32, of_distinct
from functional_jd.core.tree import any_sharded, tree_flatten, tree_leaves, tree_map
from functional_jd.core.types import Direction, Jacobian, Losses, Params, Tree
from functional_jd.engines.evaluate import check_weights, objective_count, row_scales
from functional_jd.engines.plan import Plan, RowsNeededError
from functional_jd.objectives.buffers import CarryingLosses, Extras, carrying_losses
from functional_jd.precision.autocast import autocast_disabled
from functional_jd.precision.loss_scale import unscale
from functional_jd.torch_compat.slow_path import attempt
from functional_jd.torch_compat.watching import StateJournal

Args: TypeAlias = tuple[Any, ...]
"""What the losses are called with: the parameters and the batch."""

FoundJacobian: TypeAlias = tuple[Jacobian, Losses, Any]
"""The Jacobian without the scale, in at least float32 if there is one, the losses, and aux."""

FoundGramian: TypeAlias = tuple[Any, Losses, Any, Callable[[Any], Direction]]
"""The Gramian, or what `plan.products` says; losses, aux, and the pullback of weights to a direction, all without the
scale."""

Pullback: TypeAlias = Callable[..., tuple[Direction, Tensor | None]]
"""From weights `[m]` to the unscaled direction of all parameters: `pullback(weights, *, last=False) -> (direction,
finite)`. `finite` has the scale's shape, and is None without a scale. `last` frees the graph."""

FoundWeighted: TypeAlias = tuple[Losses, Any, Pullback]
"""The losses, aux, and the pullback of weights, unscaled."""


class Kind(NamedTuple):
    """A kind of objectives, such as one loss per example: how each engine differentiates it. One file a kind.

    Only the rows are needed: `gramian` and `weighted`, which engines call, make of them what else is not given.

    Attributes:
        jacobian: `jacobian(losses, args, plan)` returns the Jacobian, the losses, and aux: detached unless it is to
            be differentiable. Its backward passes run at `plan.scale`; the rows are divided by it afterwards.
        layered: what `gramian` returns, `layered(losses, args, plan)`, without rows where that costs less.
            May raise where it cannot do without.
        in_one_pass: what `weighted` returns, `in_one_pass(losses, args, plan)`, in one backward pass.
        features: `features(losses, args, plan)` returns the Gramian of the rows by feature, the losses, aux, and
            `pullback(weights) -> (direction, finite)`; None without features.
        row_params: `row_params(losses, params)`: the parameters that have rows.
        expected_m: `expected_m(losses, batch, others)`: the number m as far as shapes tell it, else an estimate; so
            many leaves have no rows.
        carrying: `carrying(losses, batch, extras)`: the losses, with or without buffers and aux, as `CarryingLosses`.
        sample: `sample(losses, args) -> (losses, args)`: a plain function and its arguments, for a look at the
            graph by the function that the user called.
        over_shards: `over_shards(losses, chosen, enter)`: the losses as functions of shards, made of their functions of
            whole parameters by `enter(f, chosen)`; None: parameters may not be sharded.
        rows_are_examples: whether replicas add their rows to those of others, instead of taking the mean.
        several_sets: whether these are several sets of examples, one after the other.
    """

    jacobian: Callable[..., FoundJacobian]
    layered: Callable[..., FoundGramian] | None = None
    in_one_pass: Callable[..., FoundWeighted] | None = None
    features: Callable[..., FoundGramian] | None = None
    row_params: Callable[[Any, Params], Tree] = lambda _losses, params: params
    # Not known before the losses are evaluated: four are usual.
    expected_m: Callable[[Any, Args, int], int] = lambda _losses, _batch, _others: 4
    carrying: Callable[[Any, Args, Extras], CarryingLosses] = carrying_losses
    sample: Callable[[Any, Args], tuple[Callable[..., Any], Args]] = lambda losses, args: (losses, args)
    over_shards: Callable[..., Any] | None = None
    rows_are_examples: bool = False
    several_sets: bool = False

    def gramian(self, losses: Any, args: Args, plan: Plan) -> FoundGramian:
        """The products that `plan.products` names, layer by layer; from all rows if that cannot be."""

        def by_rows() -> FoundGramian:
            return gramian_from_rows(self.jacobian(losses, args, plan._replace(mode="auto")), plan)

        layered = self.layered
        if layered is None:
            return by_rows()
        # torch.compile cannot trace a fallback that depends on what raises, and tells zero gradients only under vmap.
        if torch.compiler.is_compiling():
            try:
                return layered(losses, args, plan._replace(mode="vmap"))
            except RowsNeededError:
                return by_rows()
        journal = plan.journal or StateJournal()
        return attempt(
            partial(layered, losses, args, plan._replace(journal=journal)),
            by_rows,
            instead="evaluates the losses again and forms all rows, as engine='jacobian' does at once, which takes "
            "memory for [m, n]",
            journal=journal,
        )

    def weighted(self, losses: Any, args: Args, plan: Plan) -> FoundWeighted:
        """The losses, aux, and the pullback of weights: `pullback(weights, last=True)` returns the direction
        of all parameters, and the finite flags; None without a scale.
        """
        if self.in_one_pass is None:
            values, aux, pull = _weighted_from_rows(self.jacobian(losses, args, plan), plan)
        else:
            values, aux, pull = self.in_one_pass(losses, args, plan)
            if plan.scale is not None and plan.scale.ndim:  # a scale that does not fit is refused at once
                row_scales(plan, objective_count(values), plan.scale)
        if plan.groups is not None:
            pull = _by_group(pull, heads=self.row_params(losses, args[0]) is not args[0])
        return values, aux, pull


def _by_group(pull: Pullback, *, heads: bool) -> Pullback:
    """The pullback of a dict of weights, by top-level key of the parameters that have rows: one pass for each tensor.

    Groups that share a tensor share a pass: whether two tensors are equal, only their values would tell.
    """

    def pullback(weights: dict[str, Tensor], *, last: bool = False) -> tuple[Direction, Tensor | None]:
        passes = {id(own): own for own in weights.values()}
        found: dict[int, Direction] = {}
        direction: Any = ()
        finite = None
        for left, (key, own) in enumerate(passes.items(), start=1 - len(passes)):
            direction, flags = pull(own, last=last and not left)
            found[key] = direction["shared"] if heads else direction
            finite = flags if finite is None or flags is None else finite & flags
        of_groups = {name: found[id(own)][name] for name, own in weights.items()}
        return {**direction, "shared": of_groups} if heads else of_groups, finite

    return pullback


def gramian_from_rows(found: FoundJacobian, plan: Plan) -> FoundGramian:
    """The products of rows that `plan.products` names, per group if there are groups."""
    jacobian, values, aux = found
    rows, heads = split_heads(jacobian)
    if plan.products == "factors":
        return [[leaf] for leaf in tree_leaves(rows)], values, aux, lambda _: ()
    products, pull = products_and_pullback(rows, plan.products, plan.groups)
    if not heads:
        return products, values, aux, pull
    # With a scale for each row, the rows tell by themselves what overflowed in the heads.
    if plan.scale is None or not plan.scale.ndim:
        products = nan_unless_finite(products, heads)
    return products, values, aux, lambda weights: direction_with_heads(pull(weights), heads)


def _weighted_from_rows(found: FoundJacobian, plan: Plan) -> FoundWeighted:
    """The pullback of weights of rows."""
    jacobian, values, aux = found
    finite = None
    if plan.scale is not None:
        jacobian, each = unscale(torch.ones_like(plan.scale), jacobian)
        finite = each.all().expand(each.shape)
    rows = tree_map(at_least_float32, jacobian)

    def pullback(weights: Tensor, *, last: bool = False) -> tuple[Direction, Tensor | None]:  # noqa: ARG001
        check_weights(weights, objective_count(values))
        return combine(rows, weights), finite

    return values, aux, pullback


def products_and_pullback(rows: Tree, needed: str, groups: Any) -> tuple[Products, Callable[[Any], Direction]]:
    """The inner products of rows, or their squared norms, by group if there are any, and `combine` of the rows."""
    if groups is not None:
        found = {key: products_and_pullback(rows[key], own, None) for key, _, own in groups}
        return {key: products for key, (products, _) in found.items()}, lambda weights: {
            key: found[key][1](weights[key]) for key in rows
        }
    with autocast_disabled():
        leaves, structure = tree_flatten(rows)
        if not any_sharded(leaves):
            return products_of_rows(leaves, structure, needed)
        whole = tree_map(at_least_float32, rows)
        return gramian_of_leaves(leaves) if needed == "gramian" else norms(whole).square(), partial(combined, whole)


def without_overflow(products: Products, flags: int) -> tuple[Products, Tensor]:
    """Inner products with zeros for rows that overflowed, for all if one scale serves all, and flags of the others."""
    rows = finite_rows(products, flags)

    def masked(own: Tensor) -> Tensor:
        return torch.where(rows[:, None] & rows if rows.ndim and own.ndim > 1 else rows, own, 0)

    return masked(products) if isinstance(products, Tensor) else of_distinct(masked, products), rows


def finite_rows(products: Products, flags: int) -> Tensor:
    """Which rows have finite inner products with themselves: bool `[m]`, or, for 0 flags, `[]`, whether all have."""
    parts = [products] if isinstance(products, Tensor) else list(products.values())
    squares = [own if own.ndim == 1 else own.diagonal() for own in parts]
    largest = squares[0] if len(squares) == 1 else reduce(torch.maximum, squares)
    return (largest if flags else largest.amax()) < torch.inf
