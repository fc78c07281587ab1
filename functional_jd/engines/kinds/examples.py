"""One loss per example, of one set or of several: each is differentiated by itself, all together under vmap."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial, reduce
from itertools import combinations
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from functional_jd.core.tree import detach_tree, floating_leaves, tree_flatten, tree_leaves, tree_map, tree_names
from functional_jd.core.types import Direction, Losses, Params, Tree
from functional_jd.engines.evaluate import check_example_losses, evaluate_losses, row_scales
from functional_jd.engines.gramian.assemble import gramian_of_uses, like_direction, recorded
from functional_jd.engines.gramian.products import crossed_leaf, products_of_leaves
from functional_jd.engines.kinds.kind import Args, FoundGramian, FoundJacobian, FoundWeighted, Kind
from functional_jd.engines.kinds.plain import PLAIN
from functional_jd.engines.plan import Plan, RowsNeededError
from functional_jd.engines.row_vjps import by_mode, dense, pulled, vjp_rows
from functional_jd.engines.vjp import Cotangent, Vjp, vjp
from functional_jd.objectives import ExampleSets, PerExample, stacked
from functional_jd.objectives.buffers import CarryingLosses, Extras, checked_buffers, is_key, with_carried
from functional_jd.precision.autocast import autocast_as_now, autocast_disabled
from functional_jd.precision.loss_scale import unscaled_rows
from functional_jd.random import split
from functional_jd.torch_compat.callers import here
from functional_jd.torch_compat.slow_path import attempt, random_state
from functional_jd.torch_compat.watching import StateJournal, Watch


def jacobian(losses: PerExample, args: Args, plan: Plan) -> FoundJacobian:
    """One row per example: m small backward passes in the time of one."""
    plan = plan._replace(examples=True)
    params, *batch = args
    leaves, structure = floating_leaves(params)
    m = losses.count(tuple(batch))
    factors = row_scales(plan, m, leaves[0])
    if not torch.compiler.is_compiling():  # which never evaluates twice
        plan = plan._replace(journal=plan.journal or StateJournal())

    def one(inputs: list[Tensor], factor: Tensor, *example: Any) -> tuple[list[Tensor], Any, Any]:
        def f(inputs: list[Tensor]) -> tuple[list[Tensor], Any]:
            loss = losses.loss if torch.compiler.is_compiling() else losses.of_one
            return evaluate_losses(loss, (structure.unflatten(inputs), *example), plan)

        point = vjp(f, inputs, plan, example=True)
        check_example_losses(point.outputs)
        with autocast_disabled():
            gradient = point.pullback([factor.to(point.outputs[0].dtype)])
        return dense(gradient, inputs), *point.extra

    def together() -> tuple[list[Tensor], Any, Any]:
        dims = (None, 0, *losses.dims(tuple(batch)))
        return torch.vmap(one, dims, randomness="different", chunk_size=plan.chunk_size)(leaves, factors, *batch)

    def one_by_one() -> tuple[list[Tensor], Any, Any]:
        return stacked([one(leaves, factors[i], *example) for i, example in enumerate(losses.examples(tuple(batch)))])

    found = by_mode(plan.mode, together, one_by_one, plan)
    # Parameters that only a closure captures may require grad.
    rows, values, aux = found if plan.differentiable else detach_tree(found)
    del found
    return structure.unflatten(rows if plan.scale is None else unscaled_rows(rows, plan.scale)), values, aux


def gramian(losses: PerExample, args: Args, plan: Plan) -> FoundGramian:
    """The Gramian of all examples, layer by layer: one backward pass from all of them keeps the rows apart."""
    plan = plan._replace(examples=True)
    params, *batch = args
    leaves, structure = floating_leaves(params)
    m, dims = losses.count(tuple(batch)), losses.dims(tuple(batch))

    def f(points: list[Tensor], record: Callable[..., Any]) -> tuple[list[Tensor], Any]:
        def one(own: list[Tensor], *example: Any) -> tuple[list[Tensor], Any]:
            return evaluate_losses(losses.loss, (structure.unflatten(own), *example), plan, record(own))

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
            return evaluate_losses(losses, (structure.unflatten(inputs), *batch), plan)

        return vjp(f, leaves, plan)

    around = nullcontext if compiling else autocast_as_now()
    before = [] if compiling else random_state()
    point = evaluated(losses)
    after = [] if compiling else random_state()
    several = isinstance(losses, ExampleSets)
    counts = losses.counts(tuple(batch)).values() if several else [losses.count(tuple(batch))]
    check_example_losses(point.outputs, *counts)

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
            with around(), Watch(journal := StateJournal()):
                gradient = evaluated(losses.one_by_one).pullback(cotangent, last=last)
            journal.undo()
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
        return with_carried(losses.loss(params, structure.unflatten(filled), *example), extras)

    def next_buffers(found: Tree) -> Tree:
        checked_buffers(extras, found, rows=True)
        # Running means over the examples are the mean of each example's; counters are equal in all examples.
        moved = [x.mean(0) if x.is_floating_point() else x[0] for x in tree_leaves(found)]
        for index, rows in keys.items():
            moved[index] = rows[0]
        return structure.unflatten(moved)

    start = 1 + extras.rank * m
    own_keys = [rows[start : start + m] for rows in keys.values()]
    dims = (0 if keys else None, None, *losses.dims(batch))
    return CarryingLosses(PerExample(loss, dims, empty), (own_keys, extras.buffers, *batch), next_buffers)


def _sample(losses: PerExample, args: Args) -> tuple[Any, Args]:
    """The first example stands for all: they have one graph."""
    params, *batch = args
    if not losses.count(tuple(batch)):
        raise ValueError(f"{here()}: the first batch must have an example, found none. Start with another batch.")
    return losses.of_one, (params, *losses.examples(tuple(batch))[0])


def _unless_empty(of_examples: Callable[..., Any], of_others: Any) -> Callable[..., Any]:
    """How an engine differentiates examples, or, where there are none, what the losses return instead."""

    def differentiated(losses: PerExample, args: Args, plan: Plan) -> Any:
        empty = losses.without_examples is not None and not losses.count(args[1:])
        return (of_others if empty else of_examples)(losses, args, plan)

    return differentiated


PER_EXAMPLE = Kind(
    _unless_empty(jacobian, PLAIN.jacobian),
    _unless_empty(gramian, PLAIN.layered),
    _unless_empty(weighted, PLAIN.in_one_pass),
    expected_m=lambda losses, batch, _others: max(1, losses.count(batch)),
    carrying=_carrying,
    sample=_sample,
    rows_are_examples=True,
)


# Several sets of examples, each with its own loss: the rows of one set after the other


def _jacobian_of_sets(losses: ExampleSets, args: Args, plan: Plan) -> FoundJacobian:
    """The rows of each set, one set after the other."""
    given = _by_set(losses, args, plan)
    found = {name: PER_EXAMPLE.jacobian(losses.parts[name], own, one) for name, (own, one) in given.items()}
    rows = [jacobian for jacobian, _, _ in found.values()]
    with autocast_disabled():
        joined = tree_map(lambda *leaves: torch.cat(leaves), rows[0], *rows[1:])
    return joined, *_joined(losses, found, plan)


def _gramian_of_sets(losses: ExampleSets, args: Args, plan: Plan) -> FoundGramian:
    """The blocks of each set, and those of all pairs of sets, layer by layer."""
    if plan.products == "factors" or plan.groups is not None:
        raise RowsNeededError("sets of examples have factors of different forms")
    given = _by_set(losses, args, plan._replace(products="factors"))
    found = {name: gramian(losses.parts[name], own, one) for name, (own, one) in given.items()}
    counts = losses.counts(args[1:])
    parts: dict[str, Any] = {name: result[0] for name, result in found.items()}
    leaves, structure = floating_leaves(args[0])
    leaves = like_direction(leaves, plan)

    def across(a: str, b: str) -> Tensor:
        pairs = zip(parts[a], parts[b], leaves, strict=True)
        return reduce(torch.add, [crossed_leaf(*pair, counts[a], counts[b]) for pair in pairs])

    with autocast_disabled():
        own = {name: products_of_leaves(parts[name], leaves, m, plan.products) for name, m in counts.items()}
        if plan.products == "norms":
            products = torch.cat([squares for squares, _ in own.values()])
        else:
            blocks = {(name, name): block for name, (block, _) in own.items()}
            for a, b in combinations(counts, 2):
                blocks[a, b] = across(a, b)
                blocks[b, a] = blocks[a, b].mT
            products = torch.cat([torch.cat([blocks[a, b] for b in counts], dim=1) for a in counts])

    def pullback(weights: Tensor) -> Direction:
        pieces = zip(own.values(), weights.split(list(counts.values())), strict=True)
        directions = zip(*[pull(piece) for (_, pull), piece in pieces], strict=True)
        return structure.unflatten([reduce(torch.add, own) for own in directions])

    return products, *_joined(losses, found, plan), pullback


def _by_set(losses: ExampleSets, args: Args, plan: Plan) -> dict[str, tuple[Args, Plan]]:
    """The arguments of each set, and the plan with its scales, in the order of the rows."""
    params, *batch = args
    counts, scale = losses.counts(tuple(batch)), plan.scale
    scales = [scale] * len(counts)
    if scale is not None and scale.ndim:
        leaves, _ = floating_leaves(params)
        scales = list(row_scales(plan, sum(counts.values()), leaves[0]).split(list(counts.values())))
    own = losses.batches(tuple(batch))
    return {name: ((params, *own[name]), plan._replace(scale=mine)) for name, mine in zip(counts, scales, strict=True)}


def _joined(losses: ExampleSets, found: Mapping[str, Sequence[Any]], plan: Plan) -> tuple[Losses, Any]:
    """The losses and aux of all sets, from `(..., losses, aux)` of each."""
    if not plan.has_aux:
        return {name: result[1] for name, result in found.items()}, ()
    values, aux = losses.join({name: (result[1], result[2]) for name, result in found.items()})
    return values, aux


def _carrying_of_sets(losses: ExampleSets, batch: Args, extras: Extras) -> CarryingLosses:
    if extras.takes_buffers:
        raise ValueError(
            f"{here()}: expected per_example losses of one kind, since those by name take no buffers, found "
            f"buffers with losses {sorted(losses.parts)}. Pass them as constants, or one loss for all examples."
        )
    given = losses.batches(batch)
    parts: Any = {name: PER_EXAMPLE.carrying(part, given[name], extras).losses for name, part in losses.parts.items()}

    def join(found: Any) -> Any:
        aux = {name: carried[1] for name, (_, carried) in found.items()} if extras.has_aux else ()
        return {name: value for name, (value, _) in found.items()}, ((), aux)

    return CarryingLosses(ExampleSets(parts, join), batch, partial(checked_buffers, extras))


def _sample_of_sets(losses: ExampleSets, args: Args) -> tuple[Any, Args]:
    """The first example of each set."""
    params, *batch = args
    own = {name: losses.parts[name].examples(given)[0] for name, given in losses.batches(tuple(batch)).items()}

    def first(params: Params, own: dict[str, Args]) -> Any:
        return losses.join({name: losses.parts[name].of_one(params, *example) for name, example in own.items()})

    return first, (params, own)


EXAMPLE_SETS = Kind(
    _jacobian_of_sets,
    _gramian_of_sets,
    weighted,
    expected_m=lambda losses, batch, _others: sum(losses.counts(batch).values()),
    carrying=_carrying_of_sets,
    sample=_sample_of_sets,
    rows_are_examples=True,
    several_sets=True,
)
