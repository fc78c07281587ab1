"""Losses of sharded parameters: shards go in, and rows and directions come out, sharded as the parameters are."""

import warnings
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import Tensor

from functional_jd.core.heads import split_heads, with_heads
from functional_jd.core.sharding import agreed, over_dimension, place_in
from functional_jd.core.tree import floating_leaves, shards_of, tree_leaves, tree_map, tree_sharded_as
from functional_jd.core.types import Params, Tree
from functional_jd.engines.evaluate import Options, select_arguments
from functional_jd.engines.kinds.kind import Args, FoundJacobian, FoundWeighted, Kind, PulledBack
from functional_jd.engines.kinds.multitask import MULTITASK
from functional_jd.engines.kinds.plain import PLAIN
from functional_jd.objectives import Multitask
from functional_jd.objectives.buffers import CarryingLosses, Extras
from functional_jd.objectives.gathering import Gathers
from functional_jd.objectives.over_shards import Sharded
from functional_jd.torch_compat.slow_path import SlowPathWarning, user_level
from functional_jd.torch_compat.torch_internals import under_transform


def jacobian(losses: Sharded, args: Args, argnums: int | Sequence[int], options: Options) -> FoundJacobian:
    """The rows of the shards."""
    chosen, _ = select_arguments(argnums, args, options.where)
    if argnums != 0 and _inner(losses) is not PLAIN:
        raise ValueError(
            f"{options.where}: sharded multitask losses are differentiated by argument 0, found {argnums}."
        )
    asked = options.mode
    inner, args, options, gathers = _opened(losses, args, argnums, options)
    if losses.mesh is None and asked == "auto":
        warnings.warn(
            f"{options.where}: differentiates one row after the other, which takes m backward passes, because the "
            "losses compute with DTensors themselves.",
            SlowPathWarning,
            stacklevel=user_level(),
        )
    found, values, aux = _inner(losses).jacobian(inner, args, argnums, options)
    gathers.announce("has all rows", tree_leaves(values)[0].device)
    rows, heads = split_heads(found)
    if heads:
        shared, own = chosen["shared"], chosen["heads"]
        return with_heads(tree_sharded_as(rows, shared, 1), (tree_sharded_as(heads[0], own),)), values, aux
    return tree_sharded_as(rows, chosen, 1), values, aux


def weighted(losses: Sharded, args: Args, options: Options) -> FoundWeighted:
    """One backward pass on the shards."""
    params = args[0]
    leaves, _ = floating_leaves(params, options.where)
    inner, args, options, _ = _opened(losses, args, 0, options)
    in_one_pass = cast("Callable[..., FoundWeighted]", _inner(losses).weighted)  # both kinds have it
    values, aux, pull = in_one_pass(inner, args, options)

    def pullback(weights: Tensor, *, last: bool = False) -> PulledBack:
        direction, heads, finite = pull(weights, last=last)
        everywhere = None if finite is None else agreed(finite, leaves)
        if everywhere is not None:  # a rank whose own shard is finite does not know that another's is not
            direction, heads = tree_map(lambda d: torch.where(everywhere.all(), d, 0), (direction, heads))
        rows = _row_params(losses, params)
        return tree_sharded_as(direction, rows), tree_sharded_as(heads, (params["heads"],) if heads else ()), everywhere

    return values, aux, pullback


def _inner(losses: Sharded) -> Kind:
    """The kind of the losses of whole parameters: those of `of_shards`."""
    return MULTITASK if issubclass(type(losses.losses), Multitask) else PLAIN


def _opened(
    losses: Sharded, args: Args, argnums: int | Sequence[int], options: Options
) -> tuple[Any, Args, Options, Gathers]:
    """The losses as a function of shards, the arguments with shards in them, how to differentiate, and what notes the
    names of what is gathered.
    """
    if under_transform():
        raise ValueError(
            f"{options.where}: expected no transform around a function of sharded parameters, found one of torch.func "
            "or torch.compile. Call it outside."
        )
    if options.mode == "forward" or (losses.mesh is None and options.mode == "vmap"):
        modes = "'auto', 'vmap' or 'loop'" if losses.mesh is not None else "'auto' or 'loop'"
        raise ValueError(f"{options.where}: sharded parameters need mode {modes}, found {options.mode!r}. Use 'auto'.")
    at = [argnums] if isinstance(argnums, int) else list(argnums)
    at = [position % len(args) for position in at]
    for position in at:
        floating_leaves(args[position], options.where)
    reshard = losses.reshard and not options.differentiable
    gathers = Gathers(options.where, losses.mesh, options.starting and losses.mesh is not None)
    inner = losses.of_shards(
        [args[position] for position in at], gathers, has_aux=options.has_aux, reshard=reshard, at=at
    )
    opened = tuple(shards_of(arg) if k in at else arg for k, arg in enumerate(args))
    alone = options.mode == "auto" and losses.mesh is None
    return inner, opened, options._replace(mode="loop" if alone else options.mode, on_shards=True), gathers


def _row_params(losses: Sharded, params: Params) -> Tree:
    return _inner(losses).row_params(losses.losses, params)


def _expected_m(losses: Sharded, batch: Args, others: int) -> int:
    return _inner(losses).expected_m(losses.losses, batch, others)


def _carrying(losses: Sharded, batch: Args, extras: Extras) -> CarryingLosses:
    """Buffers that are floating-point are averaged over the mesh, others are those of its first rank."""
    if losses.mesh is not None:
        extras = extras._replace(rank=place_in(losses.mesh), ranks=losses.mesh.size())
    inner = _inner(losses).carrying(losses.losses, batch, extras)
    if losses.mesh is None:
        return inner._replace(losses=Sharded(inner.losses, None))

    def pooled(leaf: Tensor) -> Tensor:
        for dim in range(losses.mesh.ndim):
            leaf = over_dimension("mean" if leaf.is_floating_point() else "first", leaf, losses.mesh, dim)
        return leaf

    def next_buffers(found: Tree) -> Tree:
        buffers = inner.next_buffers(found)
        return tree_map(pooled, buffers) if tree_leaves(buffers) else buffers

    return CarryingLosses(Sharded(inner.losses, losses.mesh, losses.reshard), inner.args, next_buffers)


def _sample(losses: Sharded, args: Args) -> tuple[Any, Args]:
    gathers = Gathers("train_state", losses.mesh, losses.mesh is not None)
    inner = losses.of_shards([args[0]], gathers, has_aux=True, reshard=losses.reshard)
    return inner, (shards_of(args[0]), *args[1:])


SHARDED = Kind(
    jacobian, weighted=weighted, row_params=_row_params, expected_m=_expected_m, carrying=_carrying, sample=_sample
)
