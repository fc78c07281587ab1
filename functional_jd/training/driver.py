"""The way from losses to a direction: observe, weigh, pull back."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from functional_jd.aggregation.aggregate import goes_to_host, initial_state, narrow_device, weigh
from functional_jd.aggregation.observation import Observation, Products
from functional_jd.aggregation.views import gramian
from functional_jd.core.host import run_on_host
from functional_jd.core.tree import CONTAINERS, all_finite, tree_leaves, tree_map
from functional_jd.core.types import Direction, Gramian, Losses, Tree, Weights
from functional_jd.engines.observed import settled, weights_for
from functional_jd.engines.plan import Engine, Plan
from functional_jd.objectives.buffers import Carried
from functional_jd.precision.autocast import autocast_disabled
from functional_jd.precision.loss_scale import update_scale
from functional_jd.precision.scale_state import ScaleState


class Directed(NamedTuple):
    """All that the optimizer and the next step need.

    Attributes:
        direction: a pytree like params.
        weights: the weight of each row.
        rule_state: the rule's next state.
        losses: the values, unscaled.
        finite: bool with the scale's shape: which rows did not overflow, and have a finite loss.
        moved: bool `[]`: whether all of them are finite, and weights and direction too.
        scale: the next loss scale.
        carried: `(buffers, aux)` from the losses.
        gramian: `[m, m]` as the rule received it; `()` for rules that need something else.
    """

    direction: Direction
    weights: Weights
    rule_state: Tree
    losses: Losses
    finite: Tensor
    moved: Tensor
    scale: ScaleState
    carried: Carried
    gramian: Gramian | tuple[()] = ()


class Verdict(NamedTuple):
    """What the flags of rows and losses say.

    Attributes:
        finite: bool with the scale's shape: which rows did not overflow, and have a finite loss.
        everywhere: bool `[]`: whether all are.
        scale: the next loss scale.
    """

    finite: Tensor
    everywhere: Tensor
    scale: ScaleState


class Decided(NamedTuple):
    """What follows from an observation and the rule's state.

    Attributes:
        weights: the weight of each row.
        rule_state: the rule's next state.
        pulled: the weights in the form that the observation's pullback takes.
        rows_finite: which rows did not overflow, as far as their products tell.
        products: the inner products as the rule received them.
        verdict: with a scale, what follows for it from the products.
    """

    weights: Weights
    rule_state: Tree
    pulled: Any
    rows_finite: Tensor | None
    products: Products | None
    verdict: Verdict | None = None


def directed(plan: Plan, engine: Engine, rule_state: Tree) -> Directed:
    """The direction of the rule, from one evaluation of the losses."""
    seen = observed(plan, engine)
    with autocast_disabled():
        decided = _decided(plan, seen, rule_state)
        direction, rows_finite, direction_finite = seen.pullback(decided.pulled)
        rows_finite = decided.rows_finite if rows_finite is None else rows_finite
        verdict = decided.verdict
        if direction_finite is None or rows_finite is None:
            # One backward pass hides a weight that is not finite where the loss is constant, as under `torch.where`.
            may_hide = plan.view.products == "none" and plan.view.losses
            hidden = _as_losses(decided.weights, seen.losses) if may_hide else ()
            direction_finite = all_finite((direction, seen.losses, hidden))
            finite = direction_finite if rows_finite is None else rows_finite & direction_finite
            verdict = Verdict(finite, finite, plan.scale)
        elif verdict is None:
            verdict = _verdict(plan.scale, rows_finite, _finite_losses(seen.losses, plan.scale.scale))
    finite, everywhere, scale = verdict
    # If both are the same tensor, `&` would only cost another launch.
    moved = everywhere if everywhere is direction_finite else everywhere & direction_finite
    # The flags show that the step was skipped, also where the direction alone is not finite.
    finite = finite & (direction_finite >= everywhere) if finite.ndim else moved
    products = decided.products if plan.view.products == "gramian" and plan.view.groups is None else ()
    return Directed(
        direction,
        decided.weights,
        decided.rule_state,
        seen.losses,
        finite,
        moved,
        scale,
        seen.carried,
        products,  # pyright: ignore[reportArgumentType]
    )


def _as_losses(weights: Weights, losses: Losses) -> Tree:
    """Weights in the dtype of the losses, with which they are looked at in one launch."""
    dtype = tree_leaves(losses)[0].dtype
    return tree_map(lambda own: own.to(dtype), weights)


def weighed(plan: Plan, engine: Engine, rule_state: Tree) -> tuple[Observation, Decided]:
    """What the engine observes, and what the rule makes of it."""
    seen = observed(plan, engine)
    with autocast_disabled():
        if rule_state is None and engine.replicate is not None:  # the first rank's counts: keys may differ
            rule_state = engine.replicate(initial_state(plan.rule, plan.view, seen))
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

    def on_host(products: Products, factor: Tensor, losses: Losses, rule_state: Tree, scale: ScaleState) -> Decided:
        found = decide(products, factor, losses, rule_state)
        assert found.rows_finite is not None
        verdict = _verdict(scale, found.rows_finite, _finite_losses(losses, scale.scale))
        return found._replace(verdict=verdict, pulled=weights_for(found.weights, factor, known=True))

    narrow = narrow_device(seen)
    if not (narrow or goes_to_host(plan.rule, (seen.products, factor, rule_state))):
        return decide(seen.products, factor, seen.losses, rule_state)
    if factor is not None and plan.guarded:
        decided = run_on_host(on_host, seen.products, factor, seen.losses, rule_state, plan.scale, device=narrow)
        # The next state is written anew, and has memory of its own.
        scale = tree_map(lambda new, old: new if new is old else new.clone(), decided.verdict.scale, plan.scale)
        return decided._replace(verdict=decided.verdict._replace(scale=scale))
    losses = seen.losses if narrow or plan.view.losses or plan.view.products == "none" else ()
    # A step writes the state anew; weights and state of `weights_fn` go to the user as they are.
    return run_on_host(decide, seen.products, factor, losses, rule_state, device=narrow, apart=not plan.guarded)


def started(plan: Plan, engine: Engine) -> tuple[Tree, Losses]:
    """The rule's initial state, and the losses that it starts from."""
    seen = observed(plan, engine)
    if seen.scaling is not None:
        seen = seen._replace(products=settled(seen.products, *seen.scaling)[0])
    with autocast_disabled():
        return initial_state(plan.rule, plan.view, seen), seen.losses


def observed(plan: Plan, engine: Engine) -> Observation:
    """What the engine observes, with the Gramian where the rule needs it and only rows are known.

    Losses that differentiate by their batch may let it require grad in place. Afterwards it does not: else the next
    state would keep the graph of all steps with this batch.
    """
    batch = plan.args[1:]
    if not CONTAINERS.isdisjoint(map(type, batch)):
        batch = tree_leaves(batch)
    constants: list[Tensor] = []
    for x in batch:
        if isinstance(x, Tensor) and not x.requires_grad:
            constants.append(x)
    try:
        seen = engine.observe(plan)
    finally:
        for x in constants:
            if x.requires_grad and x.is_leaf:
                x.requires_grad = False
    if seen.products is None and plan.view.products == "gramian" and plan.view.groups is None:
        return seen._replace(products=gramian(seen.rows))
    return seen


def _verdict(scale: ScaleState, rows_finite: Tensor, losses_finite: Tensor) -> Verdict:
    finite = rows_finite & losses_finite
    following = update_scale(scale, rows_finite, losses_finite=losses_finite)
    everywhere = finite.all() if finite.ndim else finite
    return Verdict(finite, everywhere, following)


def _finite_losses(values: Losses, scale: Tensor) -> Tensor:
    """Which losses are finite, bool of the scale's shape. Scale i serves the rows i of all replicas."""
    leaves = tree_leaves(values)
    scalars = all(leaf.ndim == 0 for leaf in leaves)
    joined = torch.stack(leaves) if scalars else torch.cat([leaf.reshape(-1) for leaf in leaves])
    finite = joined.abs() < torch.inf  # half the ops of `isfinite`
    return finite if finite.shape == scale.shape else finite.reshape(-1, *scale.shape).all(0)
