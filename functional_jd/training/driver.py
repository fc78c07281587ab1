"""The way from losses to a direction: observe, weigh, pull back."""

from typing import NamedTuple

import torch
from torch import Tensor

from functional_jd.aggregation.aggregate import weigh
from functional_jd.aggregation.observation import Observation
from functional_jd.aggregation.views import gramian
from functional_jd.core.tree import all_finite, tree_leaves
from functional_jd.core.types import Direction, Gramian, Losses, Tree, Weights
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


def directed(plan: Plan, engine: Engine, rule_state: Tree) -> Directed:
    """The direction of the rule, from one evaluation of the losses."""
    seen, weights, rule_state = weighed(plan, engine, rule_state)
    direction, rows_finite, direction_finite = seen.pullback(weights)
    if direction_finite is None or rows_finite is None:
        everything = all_finite((direction, seen.losses))
        direction_finite = losses_finite = everything
        rows_finite = everything if rows_finite is None else rows_finite
    else:
        losses_finite = _finite_losses(seen.losses, plan.scale.scale)
    products = seen.products if plan.view.products == "gramian" and plan.view.groups is None else ()
    return Directed(
        direction,
        weights,
        rule_state,
        seen.losses,
        rows_finite,
        direction_finite,
        losses_finite,
        seen.carried,
        products,  # pyright: ignore[reportArgumentType]
    )


def weighed(plan: Plan, engine: Engine, rule_state: Tree) -> tuple[Observation, Weights, Tree]:
    """What the engine observes, the weights, and the rule's next state."""
    seen = observed(plan, engine)
    return seen, *weigh(plan.rule, plan.view, seen, rule_state, plan.where)


def started(plan: Plan, engine: Engine) -> Tree:
    """The rule's initial state."""
    seen = observed(plan, engine)
    with autocast_disabled(seen[:3]):
        return plan.rule.init(plan.view.receive(seen))


def observed(plan: Plan, engine: Engine) -> Observation:
    """What the engine observes, with the Gramian where the rule needs it and only rows are known."""
    seen = engine.observe(plan)
    if seen.products is None and plan.view.products == "gramian" and plan.view.groups is None:
        with autocast_disabled(seen.rows):
            return seen._replace(products=gramian(seen.rows))
    return seen


def _finite_losses(values: Losses, scale: Tensor) -> Tensor:
    """Which losses are finite, bool of the scale's shape. Scale i serves the rows i of all replicas."""
    leaves = tree_leaves(values)
    scalars = all(leaf.ndim == 0 for leaf in leaves)
    joined = torch.stack(leaves) if scalars else torch.cat([leaf.reshape(-1) for leaf in leaves])
    finite = joined.abs() < torch.inf  # half the ops of `isfinite`
    return finite if finite.shape == scale.shape else finite.reshape(-1, *scale.shape).all(0)
