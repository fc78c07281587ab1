"""The way from losses to a direction: plan, observe, weigh, pull back."""

from collections.abc import Sequence
from itertools import islice
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from functional_jd.aggregation.aggregate import Aggregator, apply_rule, check_rule, initial_state, where_it_runs
from functional_jd.aggregation.combine import combined, weights_to_sum
from functional_jd.aggregation.groups import leaf_groups
from functional_jd.aggregation.observation import Observation
from functional_jd.aggregation.views import View, as_view, gramian, loss_count, norms
from functional_jd.core.arguments import check_flag, check_function, check_type, here, refuse
from functional_jd.core.float64 import has_float64
from functional_jd.core.tree import TENSORS, all_finite, any_sharded, tree_leaves, tree_map
from functional_jd.core.types import Direction, Gramian, Losses, LossFunction, Params, Tree, Weights
from functional_jd.engines.by_name import ENGINES
from functional_jd.engines.choose import EngineChoice, choose_engine
from functional_jd.engines.evaluate import is_differentiable
from functional_jd.engines.kinds import kind_of, losses_of_shards
from functional_jd.engines.kinds.kind import without_overflow
from functional_jd.engines.plan import Engine, Plan
from functional_jd.objectives.buffers import Extras
from functional_jd.optimizers.base import Optimizer, check_optimizer
from functional_jd.precision.autocast import autocast_disabled
from functional_jd.precision.loss_scale import multiplier, update_scale
from functional_jd.precision.scale_state import ScaleState, no_scale
from functional_jd.solvers.spectral import may_be_read
from functional_jd.torch_compat.torch_internals import has_values
from functional_jd.training.state import START, TrainState, warn


def check_method(losses: Any, aggregator: Aggregator, optimizer: Optimizer, has_aux: Any, *state: Any) -> None:
    """Raise for wrong types of functions, rules, optimizers, flags and states, and for noise without effect."""
    if state and not isinstance(state[0], TrainState):
        refuse("state", "a TrainState", state[0], START)
    are_fit = isinstance(aggregator, Aggregator) and isinstance(optimizer, Optimizer)
    if not (callable(losses) and are_fit and (has_aux is True or has_aux is False)):
        check_function("losses", losses, "Pass losses(params, ...).")
        check_flag("has_aux", has_aux)
        check_rule(aggregator)
        check_optimizer(optimizer)
    if optimizer.sensitivity is not None:
        check_noise(losses, aggregator, optimizer, reading=state == ())
    if getattr(aggregator.view, "batches", 1) > 1:
        raise ValueError(
            f"{here()}: the rule must use one batch, found a rule that compares two. Take its steps by hand: "
            "aggregate(rule, jacobian, memory, other_jacobian)."
        )


def check_noise(losses: LossFunction, rule: Aggregator, optimizer: Optimizer, *, reading: bool) -> None:
    """Raise for noise that protects too little, or not at all. Only `reading` reads bounds that are tensors."""
    norm, bound = cast(Any, optimizer.sensitivity), rule.sensitivity
    found, kind = "", kind_of(losses)
    if not kind.rows_are_examples:
        found = "the losses must be made by per_example, found others: the noise protects nobody"
    elif kind.several_sets:
        found = "the losses must have one set of examples, found several: one example may have several rows"
    elif bound is None:
        found = "the rule must bound every row, as clipped(max_norm) does, found none: the noise protects nobody"
    elif all(not isinstance(x, Tensor) or (reading and has_values(x)) for x in (norm, bound)):
        norm, bound = float(norm), float(bound)
        if abs(norm - bound) > 1e-6 * bound:  # rounding, by whatever dtype, such as of the root of a sum of squares
            found = f"the rule must bound rows by {norm:g}, the norm of the noise, found {bound:g}"
    if found:
        raise ValueError(
            f"{here()}: with noised, {found}. Take private(loss, ...), whose losses, rule and optimizer fit."
        )


_KNOWN = f"one of auto, {', '.join(ENGINES)}, or made by jacobian_engine(...) and the like"


def prepare(
    losses: LossFunction,
    params: Params,
    batch: tuple[Any, ...],
    rule: Aggregator,
    *,
    scale: ScaleState | None,
    buffers: Tree = (),
    has_aux: bool = False,
    engine: str | Engine = "auto",
    **fields: Any,
) -> tuple[Plan, Engine, EngineChoice]:
    """The plan of a step, its engine and why. The arguments are those of `step`, and other fields of `Plan`."""
    named: Any = ENGINES.get(engine) if isinstance(engine, str) else engine
    if not (isinstance(named, Engine) or (isinstance(engine, str) and engine == "auto")):
        refuse("engine", _KNOWN, engine, "'auto' takes the cheapest that the rule allows.", ValueError)
    if scale is not None and not isinstance(scale, ScaleState):  # pyright: ignore[reportUnnecessaryIsInstance]
        refuse("scale", "a ScaleState", scale, "Start it with scale_state(2.0**16); without one, no_scale().")
    factor = multiplier(scale) if scale is not None and isinstance(scale.growth_interval, Tensor) else None
    kind, view = kind_of(losses), rule.view if isinstance(rule.view, View) else as_view(rule.view)
    place = engine.place() if isinstance(engine, Engine) and tree_leaves(buffers) else (0, 1)
    carrying = kind.carrying(losses, batch, Extras(buffers, has_aux, *place))
    differentiable, leaves = is_differentiable((params, carrying.args, factor)), tree_leaves(params)
    scale = no_scale(device=leaves[0].device) if scale is None else scale
    whole = losses_of_shards(carrying.losses) if (sharded := any_sharded(leaves)) else carrying.losses
    choice = EngineChoice("", "it was named")
    if named is None:
        with_rows, shape = kind.row_params(losses, params), scale.scale.shape
        # torch 2.11 cannot compile `is` of dicts.
        own = leaves if not torch.compiler.is_compiling() and with_rows is params else tree_leaves(with_rows)
        m = shape[0] if shape else kind.expected_m(losses, batch, len(leaves) - len(own))
        choice = choose_engine(view, m, own, batch, kind, sharded=sharded)
    plan = Plan(
        True,
        factor,
        differentiable,
        products=view.products,
        groups=None if view.groups is None else leaf_groups(kind.row_params(losses, params), view.groups),
        rule=rule,
        losses=whole,
        args=(params, *carrying.args),
        leaves=leaves,
        kind=kind if whole is carrying.losses else kind_of(whole),
        view=view,
        scale_state=scale,
        next_buffers=carrying.next_buffers,
        **fields,
    )
    if named is not None:
        named.check(plan)
    return plan, named or ENGINES[choice.engine], choice


def chosen_engine(state: TrainState, *batch: Any, losses: LossFunction, aggregator: Aggregator) -> EngineChoice:
    """Which engine `step(engine="auto")` takes, and why.

    Args:
        state: from `train_state`.
        batch: what the losses take after the parameters and buffers; only shapes are read, nothing is evaluated.
        losses: as for `step`, and so is `aggregator`.

    Returns:
        `EngineChoice(engine, reason)`: a name and a sentence.

    Guarantees:
        Shapes and dtypes decide, never values: eager and compiled steps, and steps under vmap, choose alike. A step
        with layers that its engine cannot follow forms all rows, and warns.
    """
    check_type("state", state, TrainState, START)
    check_function("losses", losses, "Pass losses(params, ...).")
    check_rule(aggregator)
    return prepare(losses, state.params, batch, aggregator, scale=state.scale, buffers=state.buffers)[2]


class RuleAnswer(NamedTuple):
    """The answer of a rule to an observation."""

    weights: Weights
    memory: Tree  # the rule's next state
    gramian: Gramian | tuple[()]  # as the rule received it, if it did
    finite: Tensor | None  # which rows did not overflow, as far as it is known before the pullback
    verdict: "Verdict | None"  # with a scale, if the flags are known
    own: Weights  # in the dtype in which rows are summed


class Verdict(NamedTuple):
    """Whether a step is taken."""

    finite: Tensor  # bool with the scale's shape: which rows did not overflow, and have a finite loss
    moved: Tensor  # bool []: whether all of them are finite, and weights and direction too
    scale: ScaleState  # the next one


def observe(plan: Plan, engine: Engine) -> Observation:
    """The observation of the engine, with the Gramian where the rule needs it and only rows are known."""
    # Losses that differentiate by their batch may let it require grad in place. Afterwards it does not: else the next
    # state would keep the graph of all steps with this batch.
    batch = plan.args[1:]
    if not TENSORS.issuperset(map(type, batch)):
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
        pull = lambda own: (combined(seen.rows, own, wide=True), None)
        return seen._replace(products=gramian(seen.rows), pullback=pull)
    return seen


def started(plan: Plan, engine: Engine, reached: Sequence[tuple[int, ...]] = ()) -> tuple[Tree, Losses]:
    """The rule's initial state, and its losses. `reached`: for each leaf of the rows, the losses, if known."""
    seen, leaves, known = observe(plan, engine), iter(reached), dict[str, tuple[int, ...]]()
    for key, count, need in plan.groups or ():
        places, view = sorted({i for leaf in islice(leaves, count) for i in leaf}), plan.view.groups[key]
        if view.objectives == "reached" and 0 < len(places) < loss_count(seen.losses):
            known[key] = tuple(places)
        elif need in ("norms", "gramian") and view.objectives != "some":
            _warn_of_zero_rows(key, (norms if need == "norms" else gramian).receive(seen.of_group(key)))
    seen = seen._replace(reached=known)
    with autocast_disabled():
        if seen.products is not None and plan.guarded and seen.finite is None:
            seen = seen._replace(products=without_overflow(seen.products, plan.scale_state.scale.ndim)[0])
        return initial_state(plan.rule, plan.view, seen), seen.losses


def _warn_of_zero_rows(key: str, products: Tensor) -> None:
    """Warn of losses that have a row of zeros in a group, where training starts."""
    squares = products.diagonal() if products.ndim > 1 else products
    known = squares.nonzero().flatten().tolist() if may_be_read(products) else []
    if 0 < len(known) < len(squares):
        warn(
            f"{here()}: expected losses that reach the group {key!r}, found zeros of all but the losses {known}. "
            f"If these alone reach it, pass grouped(rules, rows={{{key!r}: {known}}})."
        )


def remembered(plan: Plan, seen: Observation, state: Tree, replicate: Any) -> Tree:
    """The memory of the rule; without a state the initial one, of the first rank if there is `replicate`."""
    if state is not None:
        return state
    memory = initial_state(plan.rule, plan.view, seen)
    return memory if replicate is None else replicate(memory)  # keys and counts may differ


def weighed(plan: Plan, seen: Observation, memory: Tree) -> RuleAnswer:
    """The weights of the rule, and the verdict of the flags, where the rule runs: on the host or here."""
    by_gramian = plan.view.products == "gramian" and plan.view.groups is None
    by_products, scaled = seen.products is not None, plan.scale is not None

    def weighed_there(given: Any, finite: Tensor | None, losses: Losses, memory: Tree, scale: Any) -> RuleAnswer:
        if by_products and plan.guarded and finite is None:
            given, finite = without_overflow(given, plan.scale_state.scale.ndim)
        known = seen._replace(losses=losses, products=given if by_products else None)
        weights, memory = apply_rule(plan.rule, plan.view.receive(known) if by_products else given, memory, known)
        verdict = verdict_of(scale, finite, losses) if scaled and finite is not None else None
        own = weights
        if by_products:
            weights, own = weights_to_sum(weights, given, list(plan.leaves), by_autograd=not plan.guarded)
        return RuleAnswer(weights, memory, given if by_gramian else (), finite, verdict, own)

    given = seen.products if by_products else plan.view.receive(seen)
    inputs = given, seen.finite, seen.losses, memory, plan.scale_state if scaled else ()
    # A step writes the state again; weights and state of `weights_fn` go to the user as they are.
    found = where_it_runs(plan.rule, seen, weighed_there, *inputs, apart=not plan.guarded, auto=plan.guarded)
    device = plan.scale_state.scale.device
    if found.verdict is None or device.type == "cpu" or (has_float64(device) and not plan.rule.on_host):
        return found
    scale = found.verdict.scale  # what came from the host shares memory, which `torch.save` does not take
    return found._replace(verdict=found.verdict._replace(scale=scale._replace(scale=scale.scale.clone())))


def pulled(plan: Plan, seen: Observation, found: RuleAnswer) -> tuple[Direction, Verdict]:
    """The direction of the weights, and whether the step is taken."""
    direction, passed = seen.pullback(found.own)
    rows_finite = found.finite if passed is None else passed
    if plan.scale is None or rows_finite is None:
        # One backward pass hides a weight that is not finite where the loss is constant, as under `torch.where`.
        may_hide = plan.view.products == "none" and plan.view.losses
        dtype = tree_leaves(seen.losses)[0].dtype if may_hide else None  # the same, for one launch
        weights = tree_map(lambda own: own.to(dtype), found.weights) if may_hide else ()
        everywhere = all_finite((direction, seen.losses, weights))
        finite = everywhere if rows_finite is None else rows_finite & everywhere
        return direction, Verdict(finite, finite, plan.scale_state)
    if passed is not None:  # weights that are not finite are the rule's doing, not an overflow
        return direction, verdict_of(plan.scale_state, passed, seen.losses, found.weights, plan.view.losses)
    sound, (finite, moved, scale) = all_finite(direction), cast(Verdict, found.verdict)
    taken = moved & sound
    # The flags show that the step was skipped, also if the direction alone is not finite.
    return direction, Verdict(torch.where(moved, sound, finite) if finite.ndim else taken, taken, scale)


def verdict_of(
    scale: ScaleState, rows_finite: Tensor, losses: Losses, weights: Weights = (), of_losses: bool = False
) -> Verdict:
    """The verdict of finite rows, losses and weights. A loss that is not finite can make NaN of all rows. It alone is
    to blame, and no scale moves; so it is with weights.
    """
    own = _finite_values((losses, weights), scale.scale)
    if of_losses and own.ndim:  # one loss makes NaN of all weights
        own = torch.where((known := _finite_values(losses, scale.scale)).all(), own, known)
    sound = own.all() if own.ndim else own
    flags = torch.where(sound, rows_finite, own)  # rows are to blame only if all losses are finite
    return Verdict(flags, flags.all() if flags.ndim else flags, update_scale(scale, rows_finite, losses_finite=sound))


def _finite_values(values: Tree, scale: Tensor) -> Tensor:
    """Which losses and weights are finite, bool of the scale's shape. Scale i serves the rows i of all replicas."""
    joined = torch.cat([leaf.reshape(-1) for leaf in tree_leaves(values)])
    return torch.linalg.vector_norm(joined.detach().reshape(-1, *scale.shape), torch.inf, dim=0) < torch.inf
