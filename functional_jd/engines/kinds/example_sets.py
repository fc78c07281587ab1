"""Several sets of examples, each with its own loss: the rows of all, one set after the other."""

from collections.abc import Mapping, Sequence
from functools import partial, reduce
from itertools import combinations
from typing import Any

import torch
from torch import Tensor

from functional_jd.core.tree import floating_leaves, tree_map, tree_unflatten
from functional_jd.core.types import Direction, Losses, Params
from functional_jd.engines.evaluate import row_scales
from functional_jd.engines.gramian.assemble import like_direction
from functional_jd.engines.gramian.products import crossed_leaf, products_of_leaves
from functional_jd.engines.kinds.kind import Args, FoundGramian, FoundJacobian, Kind
from functional_jd.engines.kinds.per_example import PER_EXAMPLE, weighted
from functional_jd.engines.kinds.per_example import gramian as examples_gramian
from functional_jd.engines.plan import Plan, RowsNeededError
from functional_jd.objectives import ExampleSets
from functional_jd.objectives.buffers import CarryingLosses, Extras, checked_buffers
from functional_jd.precision.autocast import autocast_disabled
from functional_jd.torch_compat.callers import here


def jacobian(losses: ExampleSets, args: Args, plan: Plan) -> FoundJacobian:
    """The rows of each set, one set after the other."""
    given = _by_set(losses, args, plan)
    found = {name: PER_EXAMPLE.jacobian(losses.parts[name], own, one) for name, (own, one) in given.items()}
    rows = [jacobian for jacobian, _, _ in found.values()]
    with autocast_disabled():
        joined = tree_map(lambda *leaves: torch.cat(leaves), rows[0], *rows[1:])
    return joined, *_joined(losses, found, plan)


def gramian(losses: ExampleSets, args: Args, plan: Plan) -> FoundGramian:
    """The blocks of each set, and those of all pairs of sets, layer by layer."""
    if plan.products == "factors" or plan.groups is not None:
        raise RowsNeededError("sets of examples have factors of different forms")
    given = _by_set(losses, args, plan._replace(products="factors"))
    found = {name: examples_gramian(losses.parts[name], own, one) for name, (own, one) in given.items()}
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
        return tree_unflatten(structure, [reduce(torch.add, own) for own in directions])

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


def _carrying(losses: ExampleSets, batch: Args, extras: Extras) -> CarryingLosses:
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


def _sample(losses: ExampleSets, args: Args) -> tuple[Any, Args]:
    """The first example of each set."""
    params, *batch = args
    own = {name: losses.parts[name].examples(given)[0] for name, given in losses.batches(tuple(batch)).items()}

    def first(params: Params, own: dict[str, Args]) -> Any:
        return losses.join({name: losses.parts[name].of_one(params, *example) for name, example in own.items()})

    return first, (params, own)


EXAMPLE_SETS = Kind(
    jacobian,
    gramian,
    weighted,
    expected_m=lambda losses, batch, _others: sum(losses.counts(batch).values()),
    carrying=_carrying,
    sample=_sample,
    rows_are_examples=True,
    several_sets=True,
)
