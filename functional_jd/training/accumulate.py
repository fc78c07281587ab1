"""The direction of a batch that comes in parts, since memory does not hold it at once."""

from collections.abc import Callable, Iterable
from contextlib import nullcontext
from functools import partial, reduce
from typing import Any, NamedTuple

import torch
from torch import Tensor

from functional_jd.aggregation.aggregate import Aggregator, check_rule
from functional_jd.aggregation.observation import Observation
from functional_jd.core.arguments import check_option, here, refuse
from functional_jd.core.float64 import widest
from functional_jd.core.record_display import displayed_as, outline
from functional_jd.core.rows import at_least_float32, of_distinct
from functional_jd.core.tree import all_finite, described_leaves, tree_leaves, tree_map
from functional_jd.core.types import Direction, Losses, LossFunction, Params, Tree, Weights
from functional_jd.engines import replicas
from functional_jd.engines.by_name import of_rows, rows_of_plan
from functional_jd.engines.evaluate import check_losses, element_count
from functional_jd.engines.plan import Engine, Plan
from functional_jd.precision.autocast import autocast_disabled
from functional_jd.precision.loss_scale import select, unscale, update_scale, zeros_unless
from functional_jd.precision.scale_state import ScaleState
from functional_jd.torch_compat.torch_internals import has_values, version
from functional_jd.torch_compat.watching import StateJournal
from functional_jd.training.checks import check_buffers, check_learning, check_ranks, detach_parameters, keys_of, undone
from functional_jd.training.driver import RuleAnswer, Verdict, observe, prepare, pulled, remembered, verdict_of, weighed
from functional_jd.training.weights import memory_after


@displayed_as(outline)
class Accumulated(NamedTuple):
    """The result of `accumulate`.

    Attributes:
        direction: that of the whole batch; it may be anything if `moved` is false.
        weights: one per row, as in `StepInfo`.
        losses: their means over the parts; of `per_example` losses those of all examples, the first part's first.
        finite: bool with the scale's shape: which losses and rows are finite in all parts.
        moved: bool `[]`: whether the optimizer may take its step: all of them are, or all of a part with `skip="part"`.
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
    skip: str = "step",
    group: Any = None,
) -> Accumulated:
    """Find the direction of a batch, one part after the other.

    Args:
        losses: as for `step`: plain, `multitask` or `per_example`. Each loss is a mean over its batch.
        parts: the parts of the batch, equally large: for each, the tuple of the arguments after parameters and buffers.
        params: as for `train_state`, and so are `scale` and `buffers`. Each part gets the buffers of the part before.
        aggregator: the rule. It receives the mean of the parts' rows, or the rows of all examples.
        state: what the last call returned, or `state.aggregator` of a `TrainState`. None: the rule's initial state.
        skip: what is left out if a part is not finite: the `"step"`, or that `"part"` alone: means are then over the
            others. If its gradients overflow, the scale backs off; a rule of losses alone has then seen its losses.
        group: the ranks, each with parts of its own, as in `weights_fn`: the same number on each rank.

    Returns:
        `Accumulated(direction, weights, losses, finite, moved, scale, state, buffers)`.

    Raises:
        TypeError: no parts; a part that is not a tuple or a list.
        ValueError: parts whose memory later ones take; without a state, losses that do not depend on the parameters,
            and ranks that differ; parts or ranks with different losses; a scale `[m]`, losses by name, `skip="part"` or
            a group under `per_example`; a frozen `nn.Parameter`; several ranks and no group.

    Guarantees:
        Equal to rounding to the whole batch, without buffers. A rule that needs no gradients costs a backward pass for
        each part, and the memory of one direction; if it looks at losses, they are evaluated twice. Other rules keep
        all rows. Without a state, the first part is evaluated once more. Pure; composes with vmap, grad and compile.
    """
    check_losses(losses, 0, False)
    check_rule(aggregator)
    own = detach_parameters(params)
    check_buffers(buffers)
    parts = _read(parts) if isinstance(parts, Iterable) and not isinstance(parts, Tensor) else []
    if not parts or not all(isinstance(part, tuple | list) for part in parts):  # pyright: ignore[reportUnnecessaryIsInstance]
        refuse("parts", "at least one tuple", parts, "Write [(x1, y1), (x2, y2)], and (x,) for one tensor.")
    group = replicas.group_of_ranks(group, losses, own)
    how: Any = {"scale": scale, "engine": "auto" if group is None else replicas.replicated(group=group)}
    plan_of = lambda part, buffers: prepare(losses, own, part, aggregator, buffers=buffers, **how)[0]
    plan = plan_of(tuple(parts[0]), buffers)
    _check_examples(plan, skip, group)
    if state is None:
        check_learning(plan, buffers, training=False)
        check_ranks(losses, own, {"parameters": own, "scale": plan.scale_state}, {"rule": aggregator})
        if group is not None:
            replicas.check_alike(own, group, "parameters", {"rule": aggregator})
    run = _Run(list(map(tuple, parts)), plan_of, buffers, skip == "part", group)
    if plan.view.products == "none":
        seen, memory, found, left, next_buffers = _by_weights(run, plan, state)
    else:

        def unscaled(plan: Plan) -> Any:
            rows, *more = rows_of_plan(plan)
            rows, flags = (rows, None) if skip == "step" else unscale(torch.ones_like(plan.scale_state.scale), rows)
            return rows, *more, flags

        rows, values, left, next_buffers = run.summed(unscaled, joined=plan.kind.rows_are_examples)
        seen = observe(plan, Engine(lambda plan: of_rows(plan, rows, values, ())))
        with autocast_disabled():
            memory, found = _weighed(plan, seen, state, group)
    with autocast_disabled():
        direction, verdict = pulled(plan, seen, found)
        finite, moved, following = verdict if left is None else left.verdict(plan, verdict)
    after = memory_after(moved, found.memory, memory, given=state), select(moved, next_buffers, buffers)
    return Accumulated(direction, found.weights, seen.losses, finite, moved, following, *after)


def _read(parts: Iterable[Any]) -> list[Any]:
    """All parts. Raise if the memory of one is that of a later one."""
    changes = lambda part: [version(x) for x in tree_leaves(part) if has_values(x) and not x.is_inference()]
    found = [(part, changes(part)) for part in parts]
    if any(before != changes(part) for part, before in found):
        raise ValueError(f"{here()}: parts must have memory of their own, found one written over. Yield clones.")
    return [part for part, _ in found]


def _check_examples(plan: Plan, skip: str, group: Any) -> None:
    check_option("skip", skip, ("step", "part"), "'part' leaves out the parts that are not finite.")
    given = {"names": plan.kind.several_sets, "scale [m]": plan.scale_state.scale.ndim, "skip='part'": skip == "part"}
    wrong = [name for name, found in (given | {"group": group is not None}).items() if found]
    if wrong and plan.kind.rows_are_examples:
        cure = "Leave it out; on several ranks use step with replicated(group=group)."
        raise ValueError(f"{here()}: per_example losses in parts must have no {wrong[0]}, found one. {cure}")


def _weighed(plan: Plan, seen: Observation, state: Tree, group: Any) -> tuple[Tree, RuleAnswer]:
    """The memory of the rule, and its answer."""
    memory = remembered(plan, seen, state, group and partial(replicas.replicate, group=group))
    if state is None:
        check_ranks(plan.losses, plan.args[0], {"keys": keys_of(memory)})
    return memory, weighed(plan, seen, memory)


class _Left(NamedTuple):
    """The outcome of leaving out parts: which losses and rows are finite in all, and which rows overflow in none, bool
    of the scale's shape; whether all losses are finite; and the share of the parts.
    """

    finite: Tensor
    sound: Tensor
    known: Tensor
    share: Tensor

    def verdict(self, plan: Plan, last: Verdict) -> Verdict:
        """The verdict of the step, from that of the parts left."""
        following = update_scale(plan.scale_state, self.sound, losses_finite=self.known | ~self.sound)
        return Verdict(self.finite & last.finite, last.moved & (self.share > 0), following)


def _left(verdicts: list[list[Tensor]], group: Any) -> _Left:
    """The outcome on all ranks together."""
    finite, sound, known, moved = map(torch.stack, zip(*verdicts, strict=True))
    flags, share = [x.all(0) for x in (finite, sound, known)], moved.to(widest(moved.device)).mean()
    if group is not None:
        flags, share = [replicas.agree(x, group) for x in flags], replicas.mean_over_group(share, group)
    return _Left(flags[0], flags[1], flags[2], share)


class _Run(NamedTuple):
    """A walk through the parts of the ranks of a group; `skipping` leaves out those that are not finite."""

    parts: list[tuple[Any, ...]]
    plan_of: Callable[..., Plan]
    buffers: Tree
    skipping: bool
    group: Any

    def summed(
        self, find: Callable[[Plan], tuple[Any, Losses, Any, Tensor | None]], *, joined: bool = False
    ) -> tuple[Any, Losses, _Left | None, Tree]:
        """The means of the first that `find` returns and of losses, of examples sums or all; the outcome; buffers."""
        total, each, many, verdicts, buffers, examples = None, [], [], [], self.buffers, False
        for part in self.parts:
            plan, before = self.plan_of(part, buffers), buffers
            found, values, carried, finite = find(plan)
            buffers, examples = plan.next_buffers(carried[0]), plan.kind.rows_are_examples
            if each and described_leaves(values) != described_leaves(each[0]) and not examples:
                raise ValueError(
                    f"{here()}: all parts must have the same losses, found {described_leaves(each[0])} and then "
                    f"{described_leaves(values)}. For an objective that a part does not have, return 0 * another loss."
                )
            if self.skipping:
                flags = torch.ones_like(plan.scale_state.scale, dtype=torch.bool) if finite is None else finite
                own, known = verdict_of(plan.scale_state, flags, values), all_finite(values)
                verdicts.append([own.finite, flags | ~known, known, own.moved])
                found, values = zeros_unless(own.moved, (found, values))
                buffers = select(own.moved, buffers, before)
            each.append(values)
            if joined:
                many.append(found)
                continue
            share = 1.0 if examples else 1 / len(self.parts)
            wide = tree_map(at_least_float32, found)
            add = partial(torch.add if plan.differentiable else Tensor.add_, alpha=share)
            total = tree_map(partial(torch.mul, other=share), wide) if total is None else tree_map(add, total, wide)
        if examples:
            join = lambda trees: tree_map(lambda *leaves: torch.cat(leaves), trees[0], *trees[1:])
            return join(many) if joined else total, join(each), None, buffers
        mean = lambda *own: (reduce(torch.add, map(at_least_float32, own)) / len(own)).to(own[0].dtype)
        means: Any = total, tree_map(mean, each[0], *each[1:])
        if self.group is not None:
            means, buffers = replicas.mean_over_group(means, self.group), replicas.pooled_buffers(buffers, self.group)
        left = _left(verdicts, self.group) if verdicts else None
        if left is not None:
            share = torch.where(left.share > 0, left.share, 1)
            means = tree_map(lambda x: x / share.to(x.dtype), means)
        return *means, left, buffers


def _by_weights(run: _Run, plan: Plan, state: Tree) -> tuple[Observation, Tree, RuleAnswer, _Left | None, Tree]:
    """One backward pass for each part, with weights that look at no gradient."""
    known, taken, examples = None, 0, plan.kind.rows_are_examples
    if plan.view.losses or examples:
        journal = None if plan.differentiable else StateJournal()
        look = lambda plan: plan.kind.weighted(plan.losses, plan.args, plan._replace(journal=journal))[:2]
        with nullcontext() if journal is None else undone(journal):
            _, known, *_ = run.summed(lambda plan: ((), *look(plan), None))
    first = [plan.kind.weighted(plan.losses, plan.args, plan)]
    with autocast_disabled():
        memory, found = _weighed(plan, Observation(first[0][0] if known is None else known), state, run.group)
    flags: list[Tensor] = []

    def one(plan: Plan) -> tuple[Direction, Losses, Any, Tensor | None]:
        nonlocal taken
        values, carried, pull = first.pop() if first else plan.kind.weighted(plan.losses, plan.args, plan)
        with autocast_disabled():
            own = found.own
            if examples:
                start, taken = taken, taken + element_count(tree_leaves(values))
                own = of_distinct(lambda each: each[start:taken], own)
            direction, finite = pull(own, last=True)
            if run.skipping:  # no part is to blame for weights that are not finite
                finite = (all_finite(direction) if finite is None else finite) | ~all_finite(found.weights)
        flags.extend([] if finite is None else [finite])
        return direction, values, carried, finite

    direction, values, left, buffers = run.summed(one)
    finite = torch.stack(flags).all(0) if flags and plan.scale is not None else None
    if finite is not None and left is not None:  # what is left is finite
        finite = torch.ones_like(finite)
    elif finite is not None and run.group is not None:
        finite = replicas.agree(finite, run.group)
    return Observation(values, pullback=lambda _: (direction, finite)), memory, found, left, buffers
