"""Sharded leaves that are gathered where the losses use them, and again where the backward pass does."""

from collections.abc import Callable, Generator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.multiprocessing.reductions import StorageWeakRef

from functional_jd.core.agreement import check_alike, description, means_if_alike
from functional_jd.core.sharding import gathered, is_sharded, over_mesh, scattered
from functional_jd.core.tree import tree_map
from functional_jd.torch_compat.subclasses import without_memory
from functional_jd.torch_compat.torch_internals import version

Keep = Callable[[Tensor, Tensor, Any, str], None]
"""`keep(whole, shard, like, name)`: autograd may save the shard in the place of the whole leaf."""


class Gathers:
    """The names of the leaves that one evaluation of the losses has gathered on this rank, so far.

    Where training starts, ranks tell one another what comes next before each gather, and before each gradient is
    scattered. Later a digest of all names travels with the losses. Otherwise shards of different leaves would be mixed,
    or messages of different sizes would end the processes.

    Args:
        where: the function that the user called.
        mesh: over which leaves are gathered.
        starting: whether training starts.
        rule: the rule that is to weigh the losses, which must be alike on all ranks; None if there is none.
    """

    def __init__(self, where: str, mesh: Any, starting: bool, rule: Any = None):
        self.where, self.mesh, self.starting, self.rule = where, mesh, starting, rule
        self.names: list[str] = []

    def gathered(self, shard: Tensor, like: Any, name: str) -> Tensor:
        """The whole leaf of this name."""
        self.names.append(name)
        self.announce(f"gathers {name!r}, number {len(self.names)}", shard.device)
        whole = gathered(shard, like, self.mesh)
        if self.starting and whole.requires_grad:
            whole.register_hook(lambda gradient: self.announce(f"has a gradient of {name!r}", gradient.device))
        return whole

    def announce(self, doing: Any, device: Any) -> None:
        """Raise ValueError on all ranks, where training starts, unless all do the same."""
        if self.starting:
            check_alike(self.where, {_ALIKE: doing}, partial(over_mesh, "least", mesh=self.mesh), device, _CURE)

    def mean(self, values: list[Tensor], described: list[str]) -> list[Tensor]:
        """The means over the ranks of losses, with which digests of the names, their own too, and of the rule go."""
        used = f"{', '.join(self.names)}; {', '.join(described)}"
        parts = {_ALIKE: used, "the same rule": repr(description(self.rule, keys=False, waiting=False))}
        mean = partial(over_mesh, "mean", mesh=self.mesh)
        some = values or [torch.zeros(0, device=self.mesh.device_type)]  # a rank without losses is told so, too
        return means_if_alike(self.where, some, parts, mean, self.mesh.size(), _CURE)[: len(values)]


_ALIKE = "the same leaves, used in the same order, and the same losses"
_CURE = "Let all ranks compute their losses alike, whatever their batches hold, and weigh them by the same rule."


class GatheredWhereUsed(Tensor):
    """A leaf as the losses see it: every function that takes it gets the whole leaf, which is gathered just before.

    So a leaf is whole for the time of one function, and in the backward pass its gradient is reduced and scattered as
    soon as it is known: autograd runs what was recorded last first, and a leaf that is gathered before all others would
    wait for all of them. What it tells of itself (shape, dtype, device) needs no gathering.

    A `torch.autograd.Function` takes the leaf itself, and returns a gradient of the whole, which goes back to the
    shard. What looks for memory that is not there, below Python, is refused.
    """

    shape_of: Tensor
    shard: Tensor
    whole: Callable[[], Tensor]

    @staticmethod
    def of(shard: Tensor, like: Any, name: str, gathers: Gathers, keep: Keep) -> "GatheredWhereUsed":
        """The leaf `like` of this name, of which this rank holds the shard."""
        leaf: GatheredWhereUsed = _Entered.apply(shard, like, name, gathers)  # pyright: ignore[reportAssignmentType]
        partly = is_sharded(like) and any(p.is_shard() for p in like.placements)

        def whole_leaf() -> Tensor:
            whole = gathers.gathered(shard, like, name)
            if partly:
                keep(whole, shard.detach(), like, name)
            return whole

        leaf.shape_of = torch.empty(like.shape, dtype=shard.dtype, device="meta")
        leaf.shard, leaf.whole = shard, whole_leaf
        return leaf

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _OF_SHAPE:
            return func(args[0].shape_of, *args[1:], **kwargs)
        if func in _OF_KIND:
            return func(args[0].shard, *args[1:], **kwargs)
        if func in _DERIVATIVES:
            raise not_gathered_here("one that asks autograd for a derivative by a parameter")
        opened: list[tuple[Tensor, int]] = []

        def whole_of(x: Any) -> Any:
            if not isinstance(x, cls):
                return x
            whole = x.whole()
            opened.append((whole, version(whole)))
            return whole

        args, kwargs = tree_map(whole_of, (args, kwargs))
        result = func(*args, **kwargs)
        # The next function would gather the leaf again, without the change.
        if any(version(whole) != before for whole, before in opened):
            raise RuntimeError(
                "sharded: expected losses that leave their parameters as they are, found one that "
                f"{getattr(func, '__name__', func)} changes in place. Use a form that returns a new tensor."
            )
        return result

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.detach.default:  # autograd saves it: the argument of a Function, or of a checkpoint
            leaf = args[0]
            saved = without_memory(cls, leaf.shape_of.shape, leaf.shard)
            saved.shape_of, saved.shard, saved.whole = leaf.shape_of, leaf.shard, leaf.whole
            return saved
        raise not_gathered_here(f"{func} in torch.vmap or in a scripted function")


class _Entered(Function):
    """A leaf without memory, in whose place every function gets the whole, made of this rank's shard."""

    @staticmethod
    def forward(ctx: Any, shard: Tensor, like: Any, name: str, gathers: Gathers) -> Tensor:
        ctx.entered = like, name, gathers
        return without_memory(GatheredWhereUsed, like.shape, shard)

    @staticmethod
    def backward(ctx: Any, *cotangents: Any) -> Any:
        like, name, gathers = ctx.entered
        gathers.announce(f"has a gradient of {name!r}", cotangents[0].device)
        return scattered(cotangents[0], like, gathers.mesh), None, None, None


def not_gathered_here(found: str) -> ValueError:
    """The error of losses that need a leaf whole for longer than one function takes."""
    return ValueError(
        f"sharded: expected losses in which functions of torch take the parameters, found {found}: no function gathers "
        "it there. Pass sharded(losses, mesh, reshard=False), which gathers each parameter once."
    )


_DERIVATIVES = {torch.autograd.grad, torch.autograd.backward, Tensor.backward}
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
def saved_shards(gathers: Gathers) -> Generator[Keep]:
    """Let autograd save shards in the place of gathered leaves and their views, and gather them again when needed."""
    known: dict[int, tuple[StorageWeakRef, int, tuple[Tensor, Any, str]]] = {}

    def keep(whole: Tensor, shard: Tensor, like: Any, name: str) -> None:
        storage = whole.untyped_storage()
        known[storage.data_ptr()] = (StorageWeakRef(storage), version(whole), (shard, like, name))

    def source_of(x: Tensor) -> tuple[Tensor, Any, str] | None:
        if x.layout != torch.strided or not x.numel() or x.untyped_storage().data_ptr() not in known:
            return None
        reference, before, source = known[x.untyped_storage().data_ptr()]
        if x.dtype != source[0].dtype or x.is_neg() or x.is_conj():  # sizes and strides do not say all of such a view
            return None
        # The memory of a leaf that is gone may be another tensor's now, and what was changed in place is no longer
        # what would be gathered.
        return None if reference.expired() or version(x) != before else source

    def pack(x: Tensor) -> Any:
        if isinstance(x, GatheredWhereUsed):  # an argument of a checkpoint: what runs again gathers it
            return (x, None)
        source = source_of(x)
        # What is returned as it is would keep its own graph alive.
        return (x.detach(), version(x)) if source is None else (source, x.size(), x.stride(), x.storage_offset())

    def unpack(packed: Any) -> Tensor:
        if isinstance(packed[0], Tensor):
            saved, before = packed
            if before is not None and version(saved) != before:  # under hooks, autograd itself does not ask
                raise RuntimeError(
                    "sharded: a tensor that the backward pass needs was changed in place after it was saved: shape "
                    f"{list(saved.shape)}, expected version {before}, found {version(saved)}. Change a clone of it."
                )
            return saved
        (shard, like, name), *view = packed
        gathers.announce(f"gathers {name!r} again", shard.device)
        with torch.no_grad():
            return gathered(shard, like, like.device_mesh).as_strided(*view)

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        yield keep
