"""Sharded leaves that are gathered where the losses use them, and again where the backward pass does."""

from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from functional_jd.core.sharding import gathered, is_sharded
from functional_jd.core.tree import tree_map

Keep = Callable[[Tensor, Tensor, Any], None]
"""`keep(whole, shard, like)`: autograd may save the shard in the place of the whole leaf."""


class GatheredWhereUsed(Tensor):
    """A leaf as the losses see it: every function that takes it gets the whole leaf, which is gathered just before.

    So a leaf is whole for the time of one function, and in the backward pass its gradient is reduced and scattered as
    soon as it is known: autograd runs what was recorded last first, and a leaf that is gathered before all others would
    wait for all of them. What it tells of itself (shape, dtype, device) needs no gathering.
    """

    shape_of: Tensor
    shard: Tensor
    whole: Callable[[], Tensor]

    @staticmethod
    def of(shard: Tensor, like: Any, mesh: Any, keep: Keep) -> "GatheredWhereUsed":
        """The leaf `like`, of which this rank holds the shard."""
        shape_of = torch.empty(like.shape, dtype=shard.dtype, device="meta")
        leaf = shape_of.as_subclass(GatheredWhereUsed)
        partly = is_sharded(like) and any(p.is_shard() for p in like.placements)

        def whole_leaf() -> Tensor:
            whole = gathered(shard, like, mesh)
            if partly:
                keep(whole, shard.detach(), like)
            return whole

        leaf.shape_of, leaf.shard, leaf.whole = shape_of, shard, whole_leaf
        return leaf

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _OF_SHAPE:
            return func(args[0].shape_of, *args[1:], **kwargs)
        if func in _OF_KIND:
            return func(args[0].shard, *args[1:], **kwargs)
        args, kwargs = tree_map(lambda x: x.whole() if isinstance(x, cls) else x, (args, kwargs))
        return func(*args, **kwargs)


_OF_SHAPE = {
    Tensor.shape.__get__,  # pyright: ignore[reportAttributeAccessIssue]
    Tensor.ndim.__get__,  # pyright: ignore[reportAttributeAccessIssue]
    Tensor.__len__,
    Tensor.dim,
    Tensor.numel,
    Tensor.size,
    Tensor.stride,
    torch.numel,
}
_OF_KIND = {
    Tensor.device.__get__,  # pyright: ignore[reportAttributeAccessIssue]
    Tensor.dtype.__get__,  # pyright: ignore[reportAttributeAccessIssue]
    Tensor.is_cpu.__get__,  # pyright: ignore[reportAttributeAccessIssue]
    Tensor.is_cuda.__get__,  # pyright: ignore[reportAttributeAccessIssue]
    Tensor.layout.__get__,  # pyright: ignore[reportAttributeAccessIssue]
    Tensor.requires_grad.__get__,  # pyright: ignore[reportAttributeAccessIssue]
    Tensor.is_complex,
    Tensor.is_floating_point,
    torch.is_complex,
    torch.is_floating_point,
}


@contextmanager
def saved_shards() -> Generator[Keep]:
    """Let autograd save shards in the place of gathered leaves and their views, and gather them again when needed."""
    known: dict[int, tuple[StorageWeakRef, Tensor, Any]] = {}

    def keep(whole: Tensor, shard: Tensor, like: Any) -> None:
        storage = whole.untyped_storage()
        known[storage.data_ptr()] = (StorageWeakRef(storage), shard, like)

    def source_of(x: Tensor) -> tuple[Tensor, Any] | None:
        if x.layout != torch.strided or not x.numel():
            return None
        reference, *source = known.get(x.untyped_storage().data_ptr(), (None, None, None))
        # The memory of a leaf that is gone may be another tensor's now.
        return None if reference is None or reference.expired() else tuple(source)  # pyright: ignore[reportReturnType]

    def pack(x: Tensor) -> Any:
        source = source_of(x)
        # What is returned as it is would keep its own graph alive.
        return x.detach() if source is None else (source, x.size(), x.stride(), x.storage_offset())

    def unpack(packed: Any) -> Tensor:
        if isinstance(packed, Tensor):
            return packed
        (shard, like), *view = packed
        with torch.no_grad():
            return gathered(shard, like, like.device_mesh).as_strided(*view)

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        yield keep
