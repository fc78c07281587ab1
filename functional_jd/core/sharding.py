"""Sharded leaves: a function opens `DTensor`s to this rank's shards where it begins, and closes them where it ends.

Between, all is local, except sums over all entries and flags, which every rank needs. A leaf that is not a `DTensor`
passes through all of this unchanged.

`torch.distributed.tensor` takes a second to import: functions import it once there is a `DTensor`.
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

_OPERATORS: Any = private("ops._c10d_functional", "replicas")
"""Collectives as operators, which torch.compile and make_fx trace."""


def collective(kind: str, value: Tensor, group: str, size: int) -> Tensor:
    """Apply a collective to the tensors that all ranks of a group pass at the same time.

    Args:
        kind: `"sum"`, `"mean"`, `"least"`, `"most"` and `"first"` keep the shape; `"scatter"` adds up `[R, ...]` and
            returns this rank's part `[...]`, `"gather"` is the reverse. `"same"` and `"share"` send nothing: they are
            what the derivatives of `"sum"` and `"mean"` are adjoint to, the value itself and a share 1/R of it.
        value: the same shape and dtype on all ranks.
        group, size: the name of the process group, and its number of ranks R.
    """
    result: Any = _Collective.apply(value, kind, group, size)
    return result


_ADJOINT = {"sum": "sum", "scatter": "gather", "gather": "scatter", "same": "sum", "mean": "share", "share": "mean"}

_REDUCTIONS = {"sum": "sum", "mean": "sum", "least": "min", "most": "max"}

# NCCL takes no others of 16 bits than floating ones, and none of 32 bits without a sign.
_SENT_AS = {torch.int16: torch.int32, torch.uint16: torch.int32, torch.uint32: torch.int64}

_LARGE = 1 << 20
"""Rows of more elements are scattered one by one: together they would be copied, as ranks come before rows."""


class _Collective(Function):
    """A functional collective with derivatives and a vmap rule.

    The derivative of `"mean"` is that of a value which all ranks have in common and which counts once.
    """

    @staticmethod
    def forward(value: Tensor, kind: str, name: str, replicas: int) -> Tensor:
        if kind == "same":
            return value.view_as(value)
        if kind == "share":
            return value / replicas
        dtype, value = value.dtype, value.to(_SENT_AS.get(value.dtype, value.dtype)).contiguous()
        ops, wait = _OPERATORS, _OPERATORS.wait_tensor
        try:
            if kind in _REDUCTIONS:
                result = ops.all_reduce(value / replicas if kind == "mean" else value, _REDUCTIONS[kind], name)
            elif kind == "first":
                result = ops.broadcast(value, 0, name)
            elif kind == "scatter":
                result = ops.reduce_scatter_tensor(value, "sum", replicas, name).squeeze(0)
            else:
                result = ops.all_gather_into_tensor(value.unsqueeze(0), replicas, name)
            return wait(result).to(dtype)
        except RuntimeError as error:
            found = str(error).partition("\n")[0]
            raise RuntimeError(
                f"distributed: expected an answer of all {replicas} replicas, found {found!r}. "
                "A replica stopped, fell out of step or hangs: read the first error of all processes, and restart from "
                "the last checkpoint."
            ) from error

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
        return _Collective.apply(tangents[0], *ctx.collective_args)

    @staticmethod
    def vmap(info: Any, in_dims: Any, *args: Any) -> Any:
        value, *collective_args = args
        if args[1] == "scatter" and value.numel() > _LARGE * info.batch_size:
            rows = [_Collective.apply(row, *collective_args) for row in value.unbind(in_dims[0])]
            return torch.stack(rows), 0
        return _Collective.apply(value.movedim(in_dims[0], -1), *collective_args), -1


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
    if not (is_sharded(leaf) and is_sharded(other)):
        return is_sharded(leaf) == is_sharded(other)
    return leaf.device_mesh == other.device_mesh and leaf.placements == other.placements


def shard_dims(leaf: Any) -> tuple[tuple[Any, int], ...]:
    """The dimensions of meshes over which a leaf is sharded: pairs of a mesh and a dimension."""
    placements = leaf.placements if is_sharded(leaf) else ()
    return tuple((leaf.device_mesh, dim) for dim, placement in enumerate(placements) if placement.is_shard())


def sum_over_shards(parts: Sequence[Tensor], leaves: Sequence[Any]) -> Tensor:
    """Add up what was made of each leaf's shard, over the ranks that hold other entries of it.

    A dimension of the mesh that replicates a leaf adds nothing: its ranks hold the same entries.
    """
    groups: dict[Any, list[Tensor]] = {}
    for part, leaf in zip(parts, leaves, strict=True):
        groups.setdefault(shard_dims(leaf), []).append(part)
    sums: list[Tensor] = []
    for key, members in groups.items():
        total = reduce(torch.add, members)
        for mesh, dim in key:
            total = over_dimension("sum", total, mesh, dim)
        sums.append(total)
    return reduce(torch.add, sums)


def meshes_of(leaves: Sequence[Any]) -> list[Any]:
    """The meshes of the leaves that are `DTensor`s."""
    return list(dict.fromkeys(leaf.device_mesh for leaf in leaves if is_sharded(leaf)))


def over_all_ranks(kind: str, value: Tensor, leaves: Sequence[Any]) -> Tensor:
    """The `"least"` or `"most"` of all ranks that hold shards of some leaf; the value itself where there are none."""
    for mesh in meshes_of(leaves):
        value = over_mesh(kind, value, mesh)
    return value


def over_mesh(kind: str, value: Tensor, mesh: Any) -> Tensor:
    """A collective that keeps shapes, over all ranks of a mesh."""
    for dim in range(mesh.ndim):
        value = over_dimension(kind, value, mesh, dim)
    return value


def agreed(flags: Tensor, leaves: Sequence[Any]) -> Tensor:
    """Flags that hold on all ranks that hold shards of some leaf."""
    return over_all_ranks("least", flags.int(), leaves).bool() if meshes_of(leaves) else flags


def over_dimension(kind: str, value: Tensor, mesh: Any, dim: int) -> Tensor:
    """A collective over the ranks along one dimension of a mesh."""
    group = mesh.get_group(dim)
    return collective(kind, value, group.group_name, group.size())


def gathered(shard: Tensor, like: Any, mesh: Any) -> Tensor:
    """The whole leaf from the shards of all ranks, contiguous, differentiable and with a vmap rule.

    Its gradient is the sum over the ranks, scattered; also where the leaf is replicated, or no `DTensor`: then the sum
    is on every rank.
    """
    for dim in reversed(range(mesh.ndim)):
        cut = _cut(like, mesh, dim)
        if cut is None:
            shard = over_dimension("same", shard, mesh, dim)
            continue
        along, size, _ = cut
        chunk = _padded(shard.movedim(along, 0), -(-size // mesh.size(dim)))
        shard = over_dimension("gather", chunk, mesh, dim).flatten(0, 1)[:size].movedim(0, along)
    return shard.contiguous()  # as views and products of a whole leaf find it, whichever dimension is sharded


def scattered(gradient: Tensor, like: Any, mesh: Any) -> Tensor:
    """The adjoint of `gathered`: the sum over the ranks of gradients of a whole leaf, this rank's shard of it."""
    for dim in range(mesh.ndim):
        cut, ranks = _cut(like, mesh, dim), mesh.size(dim)
        if cut is None:
            gradient = over_dimension("sum", gradient, mesh, dim)
            continue
        along, size, length = cut
        chunks = _padded(gradient.movedim(along, 0), -(-size // ranks) * ranks).unflatten(0, (ranks, -1))
        gradient = over_dimension("scatter", chunks, mesh, dim)[:length].movedim(0, along)
    return gradient


def _cut(like: Any, mesh: Any, dim: int) -> tuple[int, int, int] | None:
    """How this dimension of the mesh cuts a leaf: its dimension, the size there before, and this rank's length."""
    placement = like.placements[dim] if is_sharded(like) else None
    if placement is None or not placement.is_shard():
        return None
    before = [i for i in range(dim) if like.placements[i].is_shard(placement.dim)]
    size = shard_range(like.shape[placement.dim], mesh, before)[1]
    return placement.dim, size, shard_range(size, mesh, [dim])[1]


def _padded(x: Tensor, length: int) -> Tensor:
    """The tensor with zeros behind it, up to this length."""
    return torch.cat([x, x.new_zeros(length - len(x), *x.shape[1:])]) if len(x) < length else x


def gathered_leaf(leaf: Any) -> Tensor:
    """The whole of a leaf: all ranks that hold shards of it must ask at the same time."""
    return leaf.full_tensor() if is_sharded(leaf) else leaf


def laid_out_as(found: Any, like: Any) -> Any:
    """A tensor with the layout of another of its shape, whichever of the two are sharded."""
    if same_layout(found, like):
        return found
    found = gathered_leaf(found)
    if not is_sharded(like):
        return found
    from torch.distributed.tensor import distribute_tensor

    own = found.to(shard_of(like).device)
    return distribute_tensor(own, like.device_mesh, like.placements, src_data_rank=None)  # every rank has the whole


def shard_range(size: int, mesh: Any, dims: Sequence[int]) -> tuple[int, int]:
    """The begin and the length of this rank's part of a dimension that is sharded over some dimensions of the mesh.

    As `torch.chunk` does it, from the first of these on.
    """
    start = 0
    for dim in dims:
        chunk = -(-size // mesh.size(dim))
        begin = min(mesh.get_local_rank(dim) * chunk, size)
        start, size = start + begin, max(0, min(chunk, size - begin))
    return start, size


def positions(leaf: Any, rows: int = 0) -> Tensor:
    """The places of this rank's entries in the whole leaf, flattened: int64, like the shard. `rows=1` leaves
    out the first dimension, of rows, and counts within one row.
    """
    places = torch.zeros((), dtype=torch.int64, device=leaf.device)
    for index, size in list(enumerate(leaf.shape))[rows:]:
        start, length = 0, size
        if is_sharded(leaf):
            dims = [i for i, p in enumerate(leaf.placements) if p.is_shard(index)]
            start, length = shard_range(size, leaf.device_mesh, dims)
        places = places[..., None] * size + torch.arange(start, start + length, device=leaf.device)
    return places
