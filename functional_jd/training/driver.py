"""The way from losses to a direction: observe, weigh, pull back."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from functional_jd.aggregation.aggregate import goes_to_host, weigh
from functional_jd.aggregation.observation import Observation, Products
from functional_jd.aggregation.views import gramian
from functional_jd.core.host import run_on_host
from functional_jd.core.tree import all_finite, tree_leaves
from functional_jd.core.types import Direction, Gramian, Losses, Tree, Weights
from functional_jd.engines.observed import settled, weights_for
from functional_jd.engines.plan import Engine, Plan
from functional_jd.objectives.buffers import Carried
from functional_jd.precision.autocast import autocast_disabled


class Directed(NamedTuple):
    """All that the optimizer and the next step need.

    Attributes:
        direction: a pytree like params.
        weights: the weight of each row.
        rule_state: the rule's next state.
        losses: the values, unscaled.
        rows_finite: bool with the scale's shape: which rows did not overflow.
        direction_finite: bool `[]`: whether the weights, and with them the direction, are finite.
        losses_finite: bool with the scale's shape: which losses are finite. Without a scale, the three flags may be one
            for everything.
        carried: `(buffers, aux)` from the losses.
        gramian: `[m, m]` as the rule received it; `()` for rules that need something else.
    """

    direction: Direction
    weights: Weights
    rule_state: Tree
    losses: Losses
    rows_finite: Tensor
    direction_finite: Tensor
    losses_finite: Tensor
    carried: Carried
    gramian: Gramian | tuple[()] = ()


class Decided(NamedTuple):
    """What follows from an observation and the rule's state.

    Attributes:
        weights: the weight of each row.
        rule_state: the rule's next state.
        pulled: the weights in the form that the observation's pullback takes.
        rows_finite: which rows did not overflow, as far as their products tell.
        products: the inner products as the rule received them.
    """

    weights: Weights
    rule_state: Tree
    pulled: Any
    rows_finite: Tensor | None
    products: Products | None


def directed(plan: Plan, engine: Engine, rule_state: Tree) -> Directed:
    """The direction of the rule, from one evaluation of the losses."""
    seen = observed(plan, engine)
    with autocast_disabled():
        decided = _decided(plan, seen, rule_state)
        direction, rows_finite, direction_finite = seen.pullback(decided.pulled)
        rows_finite = decided.rows_finite if rows_finite is None else rows_finite
        if direction_finite is None or rows_finite is None:
            everything = all_finite((direction, seen.losses))
            direction_finite = losses_finite = everything
            rows_finite = everything if rows_finite is None else rows_finite
        else:
            losses_finite = _finite_losses(seen.losses, plan.scale.scale)
    products = decided.products if plan.view.products == "gramian" and plan.view.groups is None else ()
    return Directed(
        direction,
        decided.weights,
        decided.rule_state,
        seen.losses,
        rows_finite,
        direction_finite,
        losses_finite,
        seen.carried,
        products,  # pyright: ignore[reportArgumentType]
    )


def weighed(plan: Plan, engine: Engine, rule_state: Tree) -> tuple[Observation, Decided]:
    """What the engine observes, and what the rule makes of it."""
    seen = observed(plan, engine)
    with autocast_disabled():
        return seen, _decided(plan, seen, rule_state)


def _decided(plan: Plan, seen: Observation, rule_state: Tree) -> Decided:
    """What the rule makes of an observation: of products of rows on the host, if the rule runs there."""
    if seen.scaling is None:
        weights, rule_state = weigh(plan.rule, plan.view, seen, rule_state, plan.where, apart=not plan.guarded)
        return Decided(weights, rule_state, weights, None, seen.products)
    factor, flags = seen.scaling

    def decide(products: Products, factor: Tensor | None, losses: Losses, rule_state: Tree) -> Decided:
        products, rows_finite = settled(products, factor, flags)
        received = seen._replace(products=products, losses=losses)
        weights, rule_state = weigh(plan.rule, plan.view, received, rule_state, plan.where)
        return Decided(weights, rule_state, weights_for(weights, factor), rows_finite, products)

    if goes_to_host(plan.rule, (seen.products, factor, rule_state)):
        losses = seen.losses if plan.view.losses or plan.view.products == "none" else ()
        # A step writes the state anew; weights and state of `weights_fn` go to the user as they are.
        return run_on_host(decide, seen.products, factor, losses, rule_state, apart=not plan.guarded)
    return decide(seen.products, factor, seen.losses, rule_state)


def started(plan: Plan, engine: Engine) -> Tree:
    """The rule's initial state."""
    seen = observed(plan, engine)
    if seen.scaling is not None:
        seen = seen._replace(products=settled(seen.products, *seen.scaling)[0])
    with autocast_disabled():
        return plan.rule.init(plan.view.receive(seen))


def observed(plan: Plan, engine: Engine) -> Observation:
    """What the engine observes, with the Gramian where the rule needs it and only rows are known."""
    seen = engine.observe(plan)
    if seen.products is None and plan.view.products == "gramian" and plan.view.groups is None:
        return seen._replace(products=gramian(seen.rows))
    return seen


def _finite_losses(values: Losses, scale: Tensor) -> Tensor:
    """Which losses are finite, bool of the scale's shape. Scale i serves the rows i of all replicas."""
    leaves = tree_leaves(values)
    scalars = all(leaf.ndim == 0 for leaf in leaves)
    joined = torch.stack(leaves) if scalars else torch.cat([leaf.reshape(-1) for leaf in leaves])
    finite = joined.abs() < torch.inf  # half the ops of `isfinite`
    return finite if finite.shape == scale.shape else finite.reshape(-1, *scale.shape).all(0)
