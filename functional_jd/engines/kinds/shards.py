"""Losses of sharded parameters: shards go in, and rows and directions come out, sharded as the parameters are."""

import warnings
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from torch import Tensor

from functional_jd.core.arguments import refuse
from functional_jd.core.heads import split_heads, with_heads
from functional_jd.core.sharding import agreed, over_mesh
from functional_jd.core.tree import floating_leaves, shards_of, tree_leaves, tree_map, tree_sharded_as
from functional_jd.core.types import Direction
from functional_jd.engines.evaluate import select_arguments
from functional_jd.engines.kinds.kind import Args, FoundJacobian, FoundWeighted, Kind
from functional_jd.engines.kinds.plain import PLAIN
from functional_jd.engines.plan import Plan
from functional_jd.objectives.buffers import CarryingLosses, Extras
from functional_jd.objectives.over_shards import Sharded, no_sharded_form
from functional_jd.torch_compat.callers import SlowPathWarning, here, user_level
from functional_jd.torch_compat.torch_internals import under_transform


def sharded(inner: Kind) -> Kind:
    """The kind of losses of sharded parameters, whose own kind is another: how that differentiates shards."""
    return Kind(
        partial(_jacobian, inner),
        in_one_pass=partial(_weighted, inner),
        row_params=lambda losses, params: inner.row_params(losses.losses, params),
        expected_m=lambda losses, batch, others: inner.expected_m(losses.losses, batch, others),
        carrying=partial(_carrying, inner),
        sample=partial(_sample, inner),
    )


def _form(inner: Kind, losses: Sharded) -> Callable[..., Any]:
    """How losses of this kind become those of shards. Raises ValueError for a kind that does not say it."""
    if inner.over_shards is None:
        of = "per_example losses" if inner.rows_are_examples else f"those of {type(losses.losses).__name__}"
        raise no_sharded_form(of)
    return inner.over_shards


def _jacobian(inner: Kind, losses: Sharded, args: Args, plan: Plan) -> FoundJacobian:
    """The rows of the shards."""
    chosen, _ = select_arguments(plan.argnums, args)
    if plan.argnums != 0 and inner is not PLAIN:
        expected = "0, for sharded parameters of losses with a structure"
        refuse("argnums", expected, plan.argnums, "Pass a plain function.", ValueError)
    asked = plan.mode
    opened, args, plan, gathers = _opened(inner, losses, args, plan)
    if losses.mesh is None and asked == "auto":
        warnings.warn(
            f"{here()}: differentiates one row after the other, which takes m backward passes, because the "
            "losses compute with DTensors themselves.",
            SlowPathWarning,
            stacklevel=user_level(),
        )
    found, values, aux = inner.jacobian(opened, args, plan)
    if gathers is not None:
        gathers.announce("has all rows", tree_leaves(values)[0].device)
    rows, heads = split_heads(found)
    own = tree_sharded_as(heads, (chosen["heads"],) if heads else ())
    return with_heads(tree_sharded_as(rows, inner.row_params(losses.losses, chosen), 1), own), values, aux


def _weighted(inner: Kind, losses: Sharded, args: Args, plan: Plan) -> FoundWeighted:
    """One backward pass on the shards."""
    params = args[0]
    leaves, _ = floating_leaves(params)
    opened, args, plan, _ = _opened(inner, losses, args, plan._replace(groups=None))
    values, aux, pull = inner.weighted(opened, args, plan)

    def pullback(weights: Tensor, *, last: bool = False) -> tuple[Direction, Tensor | None]:
        direction, finite = pull(weights, last=last)
        # A rank whose own shard is finite does not know that another's is not.
        return tree_sharded_as(direction, params), None if finite is None else agreed(finite, leaves)

    return values, aux, pullback


def _opened(inner: Kind, losses: Sharded, args: Args, plan: Plan) -> tuple[Any, Args, Plan, Any]:
    """The losses and arguments in shards, how to differentiate, and the notes of gathered names."""
    if under_transform():
        raise ValueError(
            f"{here()}: a function of sharded parameters must be outside of transforms, found torch.func or "
            "torch.compile around it. Call it outside."
        )
    if losses.mesh is None and plan.mode == "vmap":
        refuse("mode", "'auto' or 'loop', for sharded parameters", plan.mode, "Use 'auto'.", ValueError)
    argnums = plan.argnums
    at = [position % len(args) for position in ([argnums] if isinstance(argnums, int) else argnums)]
    for position in at:
        floating_leaves(args[position])
    gathers = losses.gathers(plan.starting, plan.rule, losses.reshard and not plan.differentiable)
    likes = [args[position] for position in at]
    found = losses.of_shards(_form(inner, losses), likes, gathers, has_aux=plan.has_aux, at=at)
    opened = tuple(shards_of(arg) if k in at else arg for k, arg in enumerate(args))
    alone = plan.mode == "auto" and losses.mesh is None
    return found, opened, plan._replace(mode="loop" if alone else plan.mode, on_shards=True), gathers


def _carrying(inner: Kind, losses: Sharded, batch: Args, extras: Extras) -> CarryingLosses:
    """Buffers that are floating-point are averaged over the mesh, others are those of its first rank."""
    if losses.mesh is not None:
        place = losses.mesh.mesh.flatten().tolist().index(losses.mesh.get_rank())
        extras = extras._replace(rank=place, ranks=losses.mesh.size())
    own = inner.carrying(losses.losses, batch, extras)
    if losses.mesh is None:
        return own._replace(losses=replace(losses, losses=own.losses))

    def pooled(leaf: Tensor) -> Tensor:
        return over_mesh("mean" if leaf.is_floating_point() else "first", leaf, losses.mesh)

    next_buffers = lambda found: tree_map(pooled, own.next_buffers(found))
    return CarryingLosses(replace(losses, losses=own.losses), own.args, next_buffers)


def _sample(inner: Kind, losses: Sharded, args: Args) -> tuple[Any, Args]:
    gathers = losses.gathers(starting=True, reshard=losses.reshard)
    return losses.of_shards(_form(inner, losses), [args[0]], gathers, has_aux=True), (shards_of(args[0]), *args[1:])
