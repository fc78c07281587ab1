"""One loss per example: every example is differentiated by itself, all together under vmap."""

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from functional_jd.core.tree import (
    detach_tree,
    floating_leaves,
    tree_flatten,
    tree_leaves,
    tree_map,
    tree_names,
    tree_unflatten,
)
from functional_jd.core.types import Params, Tree
from functional_jd.engines.evaluate import check_example_losses, evaluate_losses, row_scales
from functional_jd.engines.gramian.assemble import gramian_of_uses, recorded
from functional_jd.engines.kinds.kind import Args, FoundGramian, FoundJacobian, FoundWeighted, Kind
from functional_jd.engines.kinds.plain import gramian as gramian_of_plain
from functional_jd.engines.kinds.plain import jacobian as jacobian_of_plain
from functional_jd.engines.kinds.plain import weighted as weighted_of_plain
from functional_jd.engines.plan import Plan
from functional_jd.engines.row_vjps import by_mode, dense, pulled, unscaled_rows, vjp_rows
from functional_jd.engines.vjp import Cotangent, Vjp, vjp
from functional_jd.objectives import ExampleSets, PerExample, stacked
from functional_jd.objectives.buffers import CarryingLosses, Extras, checked_buffers, is_key, with_carried
from functional_jd.precision.autocast import autocast_as_now, autocast_disabled
from functional_jd.random import split
from functional_jd.torch_compat.callers import here
from functional_jd.torch_compat.slow_path import attempt, random_state, set_random_state
from functional_jd.torch_compat.watching import StateJournal


def jacobian(losses: PerExample, args: Args, plan: Plan) -> FoundJacobian:
    """One row per example: m small backward passes at the price of one."""
    plan = plan._replace(examples=True)
    params, *batch = args
    leaves, structure = floating_leaves(params)
    m = losses.count(tuple(batch))
    factors = row_scales(plan, m, leaves[0])
    if not torch.compiler.is_compiling():  # which never evaluates twice
        plan = plan._replace(journal=StateJournal())

    def one(inputs: list[Tensor], factor: Tensor, *example: Any) -> tuple[list[Tensor], Any, Any]:
        def f(inputs: list[Tensor]) -> tuple[list[Tensor], Any]:
            loss = losses.loss if torch.compiler.is_compiling() else losses.of_one
            return evaluate_losses(loss, (tree_unflatten(structure, inputs), *example), plan)

        point = vjp(f, inputs, plan, example=True)
        check_example_losses(point.outputs)
        with autocast_disabled():
            gradient = point.pullback([factor.to(point.outputs[0].dtype)])
        return dense(gradient, inputs), *point.extra

    def together() -> tuple[list[Tensor], Any, Any]:
        dims = (None, 0, *losses.dims(tuple(batch)))
        return torch.vmap(one, dims, randomness="different", chunk_size=plan.chunk_size)(leaves, factors, *batch)

    def one_by_one() -> tuple[list[Tensor], Any, Any]:
        results = [one(leaves, factors[i], *example) for i, example in enumerate(losses.examples(tuple(batch)))]
        return stacked(results)

    found = by_mode(plan.mode, together, one_by_one, plan)
    # Parameters that only a closure captures may require grad.
    rows, values, aux = found if plan.differentiable else detach_tree(found)
    del found
    rows = rows if plan.scale is None else unscaled_rows(rows, plan.scale)
    return tree_unflatten(structure, rows), values, aux


def gramian(losses: PerExample, args: Args, plan: Plan) -> FoundGramian:
    """The Gramian of all examples, layer by layer. No loss depends on another example: one backward pass from all of
    them keeps the rows apart.
    """
    plan = plan._replace(examples=True)
    params, *batch = args
    leaves, structure = floating_leaves(params)
    m, dims = losses.count(tuple(batch)), losses.dims(tuple(batch))

    def f(points: list[Tensor], record: Callable[..., Any]) -> tuple[list[Tensor], Any]:
        def one(own: list[Tensor], *example: Any) -> tuple[list[Tensor], Any]:
            return evaluate_losses(losses.loss, (tree_unflatten(structure, own), *example), plan, record(own))

        return torch.vmap(one, (0, *dims), randomness="different")(points, *batch)

    # Under a transform, attention by plain products: torch does not batch the derivative of its fused kernels.
    with sdpa_kernel(SDPBackend.MATH) if plan.differentiable else nullcontext():
        point, recording = recorded(f, leaves, plan, m)
    check_example_losses(point.outputs, m)
    scales = row_scales(plan, m, point.outputs[0]).to(point.outputs[0].dtype)
    if torch.compiler.is_compiling():  # tells gradients that are zero only under vmap
        rows = [g if g is None else g[0] for g in vjp_rows(point, [scales[None]], plan)]
    else:
        with autocast_disabled():
            rows = point.pullback([scales], last=True)
    products, pullback = gramian_of_uses(recording, rows, leaves, structure, m, plan)
    return products, *point.extra, pullback


def weighted(losses: PerExample | ExampleSets, args: Args, plan: Plan) -> FoundWeighted:
    """One backward pass through the graph of the batch, not m small ones."""
    plan = plan._replace(examples=True)
    params, *batch = args
    leaves, structure = floating_leaves(params)
    compiling = torch.compiler.is_compiling()

    def evaluated(losses: Any) -> Vjp:
        def f(inputs: list[Tensor]) -> tuple[list[Tensor], Any]:
            return evaluate_losses(losses, (tree_unflatten(structure, inputs), *batch), plan)

        return vjp(f, leaves, plan)

    around = nullcontext if compiling else autocast_as_now()
    before = [] if compiling else random_state()
    point = evaluated(losses)
    after = [] if compiling else random_state()
    check_example_losses(point.outputs, *losses.counts(tuple(batch)).values())

    def pullback(cotangent: Cotangent, *, last: bool = False) -> list[Tensor | None]:
        batched = partial(point.pullback, cotangent, last=last)

        def again() -> list[Tensor | None]:
            # What recomputes in the backward pass, as checkpoints do, is then no longer inside vmap.
            if not all(map(torch.equal, before, after)):
                raise RuntimeError(
                    f"{here()}: expected losses of examples that vmap can differentiate, or that draw no random "
                    "numbers, found neither (activation checkpointing with dropout?). Take rows, step(..., "
                    "engine='jacobian'), which evaluates and differentiates one example after the other."
                )
            journal, now = StateJournal(), random_state()
            with around(), journal.watch():
                gradient = evaluated(losses.one_by_one).pullback(cotangent, last=last)
            journal.undo()
            set_random_state(now)
            return gradient

        instead = "evaluates the losses again, example by example, and differentiates that"
        return batched() if compiling else attempt(batched, again, instead=instead)

    return *point.extra, partial(pulled, point._replace(pullback=pullback), leaves, structure, plan)


def _carrying(losses: PerExample, batch: Args, extras: Extras) -> CarryingLosses:
    """Every example receives the same buffers, and keys of its own."""

    def without_examples(params: Params, *_: Any) -> tuple[Any, Any]:
        values = cast("Any", losses.without_examples)(params, *batch)
        return values, (tree_map(lambda x: x.unsqueeze(0), extras.buffers) if extras.takes_buffers else (), ())

    empty = None if losses.without_examples is None else without_examples
    if not extras.takes_buffers:
        alone = lambda params, *example: with_carried(losses.loss(params, *example), extras)
        return CarryingLosses(
            PerExample(alone, losses.in_dims, empty, losses.name), batch, partial(checked_buffers, extras)
        )
    leaves, structure = tree_flatten(extras.buffers)
    names, m = tree_names(extras.buffers), losses.count(batch)
    # As many as there are examples on all ranks: each draws by its place in the whole batch.
    keys = {i: split(x, extras.ranks * m + 1) for i, x in enumerate(leaves) if is_key(names[i], x, extras.buffers)}

    def loss(params: Params, own_keys: list[Tensor], shared: Tree, *example: Any) -> Any:
        filled = list(tree_leaves(shared))
        for index, own in zip(keys, own_keys, strict=True):
            filled[index] = own
        return with_carried(losses.loss(params, tree_unflatten(structure, filled), *example), extras)

    def next_buffers(found: Tree) -> Tree:
        checked_buffers(extras, found, rows=True)
        # Running means over the examples are the mean of each example's; counters are equal in all examples.
        moved = [x.mean(0) if x.is_floating_point() else x[0] for x in tree_leaves(found)]
        for index, rows in keys.items():
            moved[index] = rows[0]
        return tree_unflatten(structure, moved)

    start = 1 + extras.rank * m
    own_keys = [rows[start : start + m] for rows in keys.values()]
    dims = (0 if keys else None, None, *losses.dims(batch))
    return CarryingLosses(PerExample(loss, dims, empty), (own_keys, extras.buffers, *batch), next_buffers)


def _sample(losses: PerExample, args: Args) -> tuple[Any, Args]:
    """The first example stands for all: they have one graph."""
    params, *batch = args
    return losses.of_one, (params, *losses.examples(tuple(batch))[0])


def _unless_empty(of_examples: Callable[..., Any], of_others: Callable[..., Any]) -> Callable[..., Any]:
    """How an engine differentiates examples, or, where there are none, what the losses return instead."""

    def differentiated(losses: PerExample, args: Args, plan: Plan) -> Any:
        empty = losses.without_examples is not None and not losses.count(args[1:])
        return (of_others if empty else of_examples)(losses, args, plan)

    return differentiated


PER_EXAMPLE = Kind(
    _unless_empty(jacobian, jacobian_of_plain),
    _unless_empty(gramian, gramian_of_plain),
    _unless_empty(weighted, weighted_of_plain),
    expected_m=lambda losses, batch, _others: max(1, losses.count(batch)),
    carrying=_carrying,
    sample=_sample,
    rows_are_examples=True,
)
