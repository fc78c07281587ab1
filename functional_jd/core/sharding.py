"""Sharded leaves: a function opens `DTensor`s to this rank's shards where it begins, and closes them where it ends.

Between, all is local, except sums over all entries and flags, which every rank needs. A leaf that is not a `DTensor`
passes through all of this unchanged. `torch.distributed.tensor`, which takes a second to import, is imported late.
"""

import sys
from collections.abc import Sequence
from functools import reduce
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from functional_jd.torch_compat.torch_internals import private

if torch.distributed.is_available():
    # DTensor imports it late, and defaults of its functions then keep a group for ever: see `distributed.leave`.
    import torch.distributed.nn.functional  # pyright: ignore[reportUnusedImport]

# Collectives as operators, which torch.compile and make_fx trace.
_ops: Any = private("ops._c10d_functional", "replicas")

_ADJOINT = {"sum": "sum", "scatter": "gather", "gather": "scatter", "same": "sum", "mean": "share", "share": "mean"}
_REDUCTIONS = {"sum": "sum", "mean": "sum", "least": "min", "most": "max"}
# NCCL takes no others of 16 bits than floating ones, and none of 32 bits without a sign.
_SENT_AS = {torch.int16: torch.int32, torch.uint16: torch.int32, torch.uint32: torch.int64}
# Rows of more elements are scattered one by one: together they would be copied, as ranks come before rows.
_LARGE = 1 << 20


class _Collective(Function):
    """A functional collective with derivatives and a vmap rule. A `"mean"` counts once, as a value of all ranks."""

    @staticmethod
    def forward(value: Tensor, kind: str, name: str, replicas: int) -> Tensor:
        if kind == "same":
            return value.view_as(value)
        if kind == "share":
            return value / replicas
        dtype, value = value.dtype, value.to(_SENT_AS.get(value.dtype, value.dtype)).contiguous()
        if kind in _REDUCTIONS:
            result = _ops.all_reduce(value / replicas if kind == "mean" else value, _REDUCTIONS[kind], name)
        elif kind == "first":
            result = _ops.broadcast(value, 0, name)
        elif kind == "scatter":
            result = _ops.reduce_scatter_tensor(value, "sum", replicas, name).squeeze(0)
        else:
            result = _ops.all_gather_into_tensor(value.unsqueeze(0), replicas, name)
        return _ops.wait_tensor(result).to(dtype)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:  # noqa: ARG004
        _, *ctx.collective_args = inputs

    @staticmethod
    def backward(ctx: Any, *cotangents: Any) -> Any:
        kind, *group = ctx.collective_args
        if kind not in _ADJOINT:
            raise RuntimeError(
                "distributed: expected no derivative in reverse mode by values of all ranks, found one by "
                f"the {kind!r} of all. Start from the state that train_state returned, take forward mode, or detach it."
            )
        return _Collective.apply(cotangents[0], _ADJOINT[kind], *group), None, None, None

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        if ctx.collective_args[0] in ("least", "most"):
            raise RuntimeError("distributed: expected no derivative by the largest entry of all ranks. Detach it.")
        return _Collective.apply(tangents[0], *ctx.collective_args)

    @staticmethod
    def vmap(info: Any, in_dims: Any, *args: Any) -> Any:
        value, *collective_args = args
        if args[1] == "scatter" and value.numel() > _LARGE * info.batch_size:
            rows = [_Collective.apply(row, *collective_args) for row in value.unbind(in_dims[0])]
            return torch.stack(rows), 0
        return _Collective.apply(value.movedim(in_dims[0], -1), *collective_args), -1


def collective(kind: str, value: Tensor, group: str, size: int) -> Tensor:
    """A collective on tensors of one shape and dtype, that all ranks of a group, by its name, pass at the same time.
    `"sum"`, `"mean"`, `"least"`, `"most"` and `"first"` keep the shape; `"scatter"` adds up `[R, ...]` and returns this
    rank's part `[...]`, `"gather"` is the reverse. `"same"` and `"share"` send nothing: the derivatives of `"sum"` and
    `"mean"` are adjoint to the value itself, and to 1/R of it.
    """
    result: Any = _Collective.apply(value, kind, group, size)
    return result


def is_sharded(leaf: Any) -> bool:
    """Whether a leaf is a `DTensor`, on whatever placements."""
    if type(leaf) is Tensor or torch.compiler.is_compiling():
        return False
    tensor = sys.modules.get("torch.distributed.tensor")  # without it there are none
    return tensor is not None and isinstance(leaf, tensor.DTensor)


def shard_of(leaf: Any) -> Any:
    """The shard of a leaf that this rank holds."""
    return leaf if type(leaf) is Tensor or not is_sharded(leaf) else leaf.to_local()


def sharded_as(shard: Tensor, like: Any, rows: int = 0, *, differentiable: bool = False) -> Any:
    """A shard as a leaf with the layout of another.
    `rows` is 1 if the shard has a dimension of rows before those of `like`, -1 if it lacks the first one of `like`;
    `differentiable`: a gradient must go back to the shard.
    """
    if type(like) is Tensor or not is_sharded(like):
        return shard
    if not (rows or differentiable or shard.requires_grad) and shard.dtype == like.dtype and hasattr(like, "_spec"):
        return type(like)(shard, like._spec, requires_grad=False)  # a tenth of the time of what follows
    from torch.distributed.tensor import DTensor, Shard

    shape = torch.Size((len(shard), *like.shape) if rows > 0 else like.shape[-rows:])
    stride = tuple(shape[k + 1 :].numel() for k in range(len(shape))) if rows else like.stride()
    placements = [Shard(p.dim + rows) if p.is_shard() else p for p in like.placements]
    return DTensor.from_local(shard, like.device_mesh, placements, run_check=False, shape=shape, stride=stride)


def same_layout(leaf: Any, other: Any) -> bool:
    """Whether two leaves lie on the ranks in the same way, so that their shards fit."""
    own, others = ((x.device_mesh, x.placements) if is_sharded(x) else None for x in (leaf, other))
    return own == others


def by_shards(leaves: Sequence[Any]) -> dict[tuple[tuple[Any, int], ...], list[int]]:
    """The places of leaves that are sharded over the same dimensions of meshes: pairs of a mesh and a dimension."""
    groups: dict[Any, list[int]] = {}
    for index, leaf in enumerate(leaves):
        placements = leaf.placements if is_sharded(leaf) else ()
        key = tuple((leaf.device_mesh, dim) for dim, placement in enumerate(placements) if placement.is_shard())
        groups.setdefault(key, []).append(index)
    return groups


def sum_over_shards(parts: Sequence[Tensor], leaves: Sequence[Any]) -> Tensor:
    """Add up parts made of each leaf's shard, over the ranks that hold other entries of it: not over replicas."""
    groups = [(reduce(torch.add, [parts[k] for k in own]), dims) for dims, own in by_shards(leaves).items()]
    return reduce(torch.add, [over_dimensions("sum", part, dims) for part, dims in groups])


def meshes_of(leaves: Sequence[Any]) -> list[Any]:
    """The meshes of the leaves that are `DTensor`s."""
    return list(dict.fromkeys(leaf.device_mesh for leaf in leaves if is_sharded(leaf)))


def over_all_ranks(kind: str, value: Tensor, leaves: Sequence[Any]) -> Tensor:
    """The `"least"` or `"most"` of all ranks that hold shards of some leaf; the value itself where there are none."""
    return over_dimensions(kind, value, [(mesh, dim) for mesh in meshes_of(leaves) for dim in range(mesh.ndim)])


def over_mesh(kind: str, value: Tensor, mesh: Any) -> Tensor:
    """A collective that keeps shapes, over all ranks of a mesh."""
    return over_dimensions(kind, value, [(mesh, dim) for dim in range(mesh.ndim)])


def over_dimensions(kind: str, value: Tensor, dims: Sequence[tuple[Any, int]]) -> Tensor:
    """The same over the ranks along some dimensions of meshes."""
    for mesh, dim in dims:
        value = over_dimension(kind, value, mesh, dim)
    return value


def agreed(flags: Tensor, leaves: Sequence[Any]) -> Tensor:
    """Flags that hold on all ranks that hold shards of some leaf."""
    return over_all_ranks("least", flags.int(), leaves).bool() if meshes_of(leaves) else flags


def over_dimension(kind: str, value: Tensor, mesh: Any, dim: int) -> Tensor:
    """A collective over the ranks along one dimension of a mesh."""
    group = mesh.get_group(dim)
    return collective(kind, value, group.group_name, group.size())


def laid_out_as(found: Any, like: Any) -> Any:
    """A tensor with the layout of another of its shape, whichever of the two are sharded; all ranks do it together."""
    if same_layout(found, like):
        return found
    found = found.full_tensor() if is_sharded(found) else found
    if not is_sharded(like):
        return found
    from torch.distributed.tensor import distribute_tensor

    own = found.to(shard_of(like).device)
    return distribute_tensor(own, like.device_mesh, like.placements, src_data_rank=None)  # every rank has the whole


def shard_range(size: int, mesh: Any, dims: Sequence[int]) -> tuple[int, int]:
    """Begin and length of this rank's part of a dimension: chunks of `torch.chunk`, by some dimensions of the mesh."""
    start = 0
    for dim in dims:
        chunk = -(-size // mesh.size(dim))
        begin = min(mesh.get_local_rank(dim) * chunk, size)
        start, size = start + begin, max(0, min(chunk, size - begin))
    return start, size


def positions(leaf: Any, rows: int = 0) -> Tensor:
    """The places of this rank's entries in the whole leaf, flattened: int64, like the shard; `rows=1`: in one row."""
    places = torch.zeros((), dtype=torch.int64, device=leaf.device)
    for index, size in list(enumerate(leaf.shape))[rows:]:
        start, length = 0, size
        if is_sharded(leaf):
            dims = [i for i, p in enumerate(leaf.placements) if p.is_shard(index)]
            start, length = shard_range(size, leaf.device_mesh, dims)
        places = places[..., None] * size + torch.arange(start, start + length, device=leaf.device)
    return places
