"""The way from losses to a direction: observe, weigh, pull back."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from functional_jd.aggregation.aggregate import initial_state, weigh, where_it_runs
from functional_jd.aggregation.observation import Observation, Products
from functional_jd.aggregation.views import gramian
from functional_jd.core.float64 import has_float64
from functional_jd.core.tree import CONTAINERS, all_finite, tree_leaves, tree_map
from functional_jd.core.types import Direction, Gramian, Losses, Tree, Weights
from functional_jd.engines.observed import without_overflow
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


class Weighed(NamedTuple):
    """What the rule makes of an observation.

    Attributes:
        weights: the weight of each row.
        rule_state: the rule's next state.
        products: the inner products as the rule received them.
        finite: which rows did not overflow, as far as it is known before the pullback.
        verdict: with a scale, and if the flags are known, what follows for it.
    """

    weights: Weights
    rule_state: Tree
    products: Products | None
    finite: Tensor | None
    verdict: tuple[Tensor, Tensor, ScaleState] | None


def directed(plan: Plan, engine: Engine, rule_state: Tree) -> Directed:
    """The direction of the rule, from one evaluation of the losses."""
    seen = observed(plan, engine)
    with autocast_disabled():
        found = _weighed(plan, seen, rule_state)
        direction, passed = seen.pullback(found.weights)
        rows_finite = found.finite if passed is None else passed
        if plan.scale is None or rows_finite is None:
            # One backward pass hides a weight that is not finite where the loss is constant, as under `torch.where`.
            may_hide = plan.view.products == "none" and plan.view.losses
            hidden = _as_losses(found.weights, seen.losses) if may_hide else ()
            everywhere = all_finite((direction, seen.losses, hidden))
            finite = everywhere if rows_finite is None else rows_finite & everywhere
            moved, scale = finite, plan.scale_state
        else:
            sound = all_finite(direction if passed is None else found.weights)
            if passed is not None:  # weights that are not finite are the rule's doing, not an overflow
                rows_finite = passed | ~sound
            known = found.verdict if passed is None else None
            finite, moved, scale = known or _verdict(plan.scale_state, rows_finite, seen.losses)
            # The flags show that the step was skipped, also if the direction alone is not finite.
            finite = torch.where(moved, sound, finite) if finite.ndim else moved & sound
            moved = moved & sound if finite.ndim else finite
    by_gramian = plan.view.products == "gramian" and plan.view.groups is None
    products: Any = found.products if by_gramian else ()
    return Directed(
        direction, found.weights, found.rule_state, seen.losses, finite, moved, scale, seen.carried, products
    )


def _as_losses(weights: Weights, losses: Losses) -> Tree:
    """Weights in the dtype of the losses, with which they are looked at in one launch."""
    dtype = tree_leaves(losses)[0].dtype
    return tree_map(lambda own: own.to(dtype), weights)


def weighed(plan: Plan, engine: Engine, rule_state: Tree) -> tuple[Observation, Weighed]:
    """What the engine observes, and what the rule makes of it."""
    seen = observed(plan, engine)
    with autocast_disabled():
        if rule_state is None and engine.replicate is not None:  # the first rank's counts: keys may differ
            rule_state = engine.replicate(initial_state(plan.rule, plan.view, seen))
        return seen, _weighed(plan, seen, rule_state)


def _weighed(plan: Plan, seen: Observation, rule_state: Tree) -> Weighed:
    """What the rule makes of an observation, and of its flags, where the rule runs."""
    by_products, scaled = seen.products is not None, plan.scale is not None

    def weighed_there(given: Any, finite: Tensor | None, losses: Losses, memory: Tree, scale: Any) -> Weighed:
        received = given
        if by_products:
            if plan.guarded and finite is None:
                given, finite = without_overflow(given, plan.scale_state.scale.ndim)
            received = plan.view.receive(seen._replace(products=given, losses=losses))
        weights, memory = weigh(plan.rule, received, memory, plan.where)
        verdict = _verdict(scale, finite, losses) if scaled and finite is not None else None
        return Weighed(weights, memory, given, finite, verdict)

    given = seen.products if by_products else plan.view.receive(seen)
    inputs = given, seen.finite, seen.losses, rule_state, plan.scale_state if scaled else ()
    # A step writes the state anew; weights and state of `weights_fn` go to the user as they are.
    found = where_it_runs(plan.rule, plan.view, seen, weighed_there, *inputs, apart=not plan.guarded)
    device = plan.scale_state.scale.device
    if found.verdict is None or device.type == "cpu" or (has_float64(device) and not plan.rule.on_host):
        return found
    finite, moved, scale = found.verdict
    # What came from the host shares memory, and `torch.save` takes no memory that is shared by dtypes.
    return found._replace(verdict=(finite, moved, scale._replace(scale=scale.scale.clone())))


def started(plan: Plan, engine: Engine) -> tuple[Tree, Losses]:
    """The rule's initial state, and the losses that it starts from."""
    seen = observed(plan, engine)
    with autocast_disabled():
        if seen.products is not None and plan.guarded and seen.finite is None:
            seen = seen._replace(products=without_overflow(seen.products, plan.scale_state.scale.ndim)[0])
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


def _verdict(scale: ScaleState, rows_finite: Tensor, losses: Losses) -> tuple[Tensor, Tensor, ScaleState]:
    """Which objectives are finite, whether all are, and the next loss scale.

    A loss that is not finite can make NaN of all rows that are differentiated with it. It alone is to blame, and its
    scale stays, as do those of such rows.
    """
    losses_finite = told = _finite_losses(losses, scale.scale)
    finite = rows_finite & losses_finite
    if finite.ndim:
        sound = losses_finite.all()
        told, finite = finite | sound, torch.where(sound, finite, losses_finite)
    following = update_scale(scale, rows_finite, losses_finite=told)
    return finite, finite.all() if finite.ndim else finite, following


def _finite_losses(values: Losses, scale: Tensor) -> Tensor:
    """Which losses are finite, bool of the scale's shape. Scale i serves the rows i of all replicas."""
    leaves = tree_leaves(values)
    scalars = all(leaf.ndim == 0 for leaf in leaves)
    joined = torch.stack(leaves) if scalars else torch.cat([leaf.reshape(-1) for leaf in leaves])
    finite = joined.abs() < torch.inf  # half the ops of `isfinite`
    return finite if finite.shape == scale.shape else finite.reshape(-1, *scale.shape).all(0)
