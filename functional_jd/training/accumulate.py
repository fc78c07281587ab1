"""The direction of a batch that comes in parts, since memory does not hold it at once."""

from collections.abc import Callable, Iterable
from contextlib import nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from functional_jd.aggregation.aggregate import Aggregator, check_rule, initial_state
from functional_jd.aggregation.observation import Observation
from functional_jd.core.arguments import here, refuse
from functional_jd.core.record_display import displayed_as, outline
from functional_jd.core.rows import at_least_float32, of_distinct
from functional_jd.core.tree import described_leaves, detach_tree, tree_leaves, tree_map
from functional_jd.core.types import Direction, Losses, LossFunction, Params, Tree, Weights
from functional_jd.engines.by_name import of_rows, rows_of_plan
from functional_jd.engines.evaluate import check_losses, evaluate_losses
from functional_jd.engines.plan import Engine, Plan
from functional_jd.precision.autocast import autocast_disabled
from functional_jd.precision.loss_scale import select
from functional_jd.precision.scale_state import ScaleState
from functional_jd.torch_compat.slow_path import random_state, set_random_state
from functional_jd.training.checks import check_tensors, detach_parameters
from functional_jd.training.driver import Weighed, observe, prepare, pulled, weighed


@displayed_as(outline)
class Accumulated(NamedTuple):
    """What `accumulate` returns.

    Attributes:
        direction: that of the whole batch; it may be anything if `moved` is false.
        weights: one per row, as in `StepInfo`.
        losses: their means over the parts; of `per_example` losses those of all examples, the first part's first.
        finite: bool with the scale's shape: which losses and rows are finite in all parts.
        moved: bool `[]`: whether all of them are, so that the optimizer may take its step.
        scale: the next loss scale.
        state: what the rule remembers, for the next call; what was given if `moved` is false.
        buffers: those of the last part; those that were given if `moved` is false.
    """

    direction: Direction
    weights: Weights
    losses: Losses
    finite: Tensor
    moved: Tensor
    scale: ScaleState
    state: Tree
    buffers: Tree


def accumulate(
    losses: LossFunction,
    parts: Iterable[tuple[Any, ...]],
    *,
    params: Params,
    aggregator: Aggregator,
    state: Tree = None,
    scale: ScaleState | None = None,
    buffers: Tree = (),
) -> Accumulated:
    """Find the direction of a batch, one part after the other.

    Args:
        losses: as for `step`: plain, `multitask` or `per_example`. Each loss is a mean over its batch.
        parts: the parts of the batch, equally large: for each, the tuple of the arguments after parameters and buffers.
        params: as for `train_state`, and so are `scale` and `buffers`. Each part receives the buffers that the part
            before returned. `per_example` losses take one scale `[]`.
        aggregator: the rule. It receives the mean of the parts' rows, or the rows of all examples.
        state: what the last call returned, or `state.aggregator` of a `TrainState`. None: the rule's initial state.

    Returns:
        `Accumulated(direction, weights, losses, finite, moved, scale, state, buffers)`.

    Raises:
        TypeError: no parts; a part that is no tuple; errors of `train_state`.
        ValueError: parts with different losses; a scale `[m]` or losses by name under `per_example`; a frozen
            `nn.Parameter`.

    Guarantees:
        Equal to rounding to the whole batch, if there are no buffers.
        A rule that needs no gradients costs one backward pass for each part, and memory for one direction. If it looks
        at losses, or if these are of examples, they are evaluated twice. Other rules keep all rows and those of a part.
        Pure; composes with vmap, grad and compile.

    Example:
        >>> losses = lambda params, x: (x * params["w"]).square().mean(0)
        >>> parts = [(torch.ones(2, 3),), (torch.zeros(2, 3),)]
        >>> found = accumulate(losses, parts, params={"w": torch.ones(3)}, aggregator=mean())
        >>> found.direction["w"], bool(found.moved)
        (tensor([0.3333, 0.3333, 0.3333]), True)
    """
    check_losses(losses, 0, False)
    check_rule(aggregator)
    own = detach_parameters(params)
    check_tensors("state", state, "what the last call returned, or None", "Pass found.state.")
    parts = [*parts] if isinstance(parts, Iterable) and not isinstance(parts, Tensor) else []
    if not parts or not all(isinstance(part, tuple) for part in parts):  # pyright: ignore[reportUnnecessaryIsInstance]
        refuse("parts", "at least one tuple", parts, "Write [(x1, y1), (x2, y2)], and (x,) for one tensor.")
    plan_of = lambda part, buffers: prepare(losses, own, part, aggregator, scale=scale, buffers=buffers)[0]
    plan = plan_of(parts[0], buffers)
    examples, each = plan.kind.rows_are_examples, plan.scale_state.scale.ndim
    if plan.kind.several_sets or (examples and each):
        wanted = "one scale []" if each else "one loss without a name"
        raise ValueError(f"{here()}: per_example losses in parts must have {wanted}, found several. Pass one.")
    walk = partial(_walk, parts, plan_of, buffers, examples)
    if plan.view.products == "none":
        seen, memory, found, next_buffers = _by_weights(walk, plan, state)
    else:
        rows, values, next_buffers = walk(rows_of_plan, joined=examples)
        seen = observe(plan, Engine(lambda plan: of_rows(plan, rows, values, ())))
        with autocast_disabled():
            memory, found = _weighed(plan, seen, state)
    with autocast_disabled():
        direction, (finite, moved, following) = pulled(plan, seen, found)
    kept = select(moved, (found.memory, next_buffers), (memory, buffers))
    return Accumulated(direction, found.weights, seen.losses, finite, moved, following, *kept)


def _weighed(plan: Plan, seen: Observation, state: Tree) -> tuple[Tree, Weighed]:
    """The memory of the rule, its initial one if there is none, and its answer."""
    memory = initial_state(plan.rule, plan.view, seen) if state is None else state
    return memory, weighed(plan, seen, memory)


def _walk(
    parts: list[tuple[Any, ...]],
    plan_of: Callable[..., Plan],
    buffers: Tree,
    examples: bool,
    find: Callable[[Plan], tuple[Any, Losses, Any]],
    *,
    joined: bool = False,
) -> tuple[Any, Losses, Tree]:
    """The mean over the parts of the first that `find` returns, of examples the sum, or all joined; the mean of the
    losses, or those of all examples; and the last buffers.
    """
    total, each, many, share = None, [], [], 1.0 if examples else 1 / len(parts)
    for part in parts:
        plan = plan_of(part, buffers)
        found, values, carried = find(plan)
        buffers = plan.next_buffers(carried[0])
        if each and described_leaves(values) != described_leaves(each[0]) and not examples:
            raise ValueError(
                f"{here()}: all parts must have the same losses, found {described_leaves(each[0])} and then "
                f"{described_leaves(values)}. For an objective that a part does not have, return 0 * another loss."
            )
        each.append(values)
        if joined:
            many.append(found)
            continue
        wide = tree_map(at_least_float32, found)
        add = partial(torch.add if plan.differentiable else Tensor.add_, alpha=share)
        total = tree_map(lambda x: x * share, wide) if total is None else tree_map(add, total, wide)
    values = _joined(each) if examples else tree_map(lambda *own: sum(own) / len(own), each[0], *each[1:])
    return _joined(many) if joined else total, values, buffers


def _joined(trees: list[Any]) -> Any:
    return tree_map(lambda *leaves: torch.cat(leaves), trees[0], *trees[1:])


def _by_weights(walk: Callable[..., Any], plan: Plan, state: Tree) -> tuple[Observation, Tree, Weighed, Tree]:
    """One backward pass for each part, with weights that look at no gradient."""
    known, taken, examples = None, 0, plan.kind.rows_are_examples
    if plan.view.losses or examples:
        draws = None if plan.differentiable else random_state()
        with nullcontext() if plan.differentiable else torch.enable_grad():  # losses may differentiate by their batch
            kept = (lambda tree: tree) if plan.differentiable else detach_tree
            alone = lambda plan: kept(evaluate_losses(plan.losses, plan.args, plan._replace(examples=examples))[1])
            _, known, _ = walk(lambda plan: ((), *alone(plan)))
        if draws is not None:
            set_random_state(draws)
    decided: list[Any] = []
    flags: list[Tensor] = []

    def one(plan: Plan) -> tuple[Direction, Losses, Any]:
        nonlocal taken
        values, carried, pull = plan.kind.weighted(plan.losses, plan.args, plan)
        with autocast_disabled():
            if not decided:
                decided[:] = _weighed(plan, Observation(values if known is None else known), state)
            own = decided[1].own
            if examples:
                start, taken = taken, taken + sum(leaf.numel() for leaf in tree_leaves(values))
                own = of_distinct(lambda each: each[start:taken], own)
            direction, finite = pull(own, last=True)
        flags.extend([] if finite is None else [finite])
        return direction, values, carried

    direction, values, buffers = walk(one)
    finite = torch.stack(flags).all(0) if flags else None
    return Observation(values, pullback=lambda _: (direction, finite)), *decided, buffers
