"""Losses of sharded parameters: each leaf is opened to this rank's shard, and gathered where the losses use it."""

from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from torch import Tensor

from functional_jd.core.rows import at_least_float32
from functional_jd.core.sharding import is_sharded, shard_of, sharded_as
from functional_jd.core.tree import (
    any_sharded,
    described_leaves,
    floating_leaves,
    shards_of,
    tree_flatten,
    tree_leaves,
    tree_map,
    tree_names,
)
from functional_jd.core.types import Declared, Losses, Params, Tree
from functional_jd.objectives.structured import ExampleSets, PerExample
from functional_jd.torch_compat.callers import here


class Leaf(NamedTuple):
    """A leaf of the parameters: this rank's shard of it, the leaf that tells its layout, and its name."""

    shard: Tensor
    like: Any
    name: str


@dataclass(frozen=True)
class Sharded(Declared):
    """The function that `distributed.sharded` returns. The engines read from it how leaves are gathered."""

    losses: Callable[..., Any]  # of whole parameters
    mesh: Any  # over which the batch is split; None if the losses compute with `DTensor` leaves themselves
    reshard: bool = False  # whether what the backward pass needs of gathered leaves is gathered again
    gathering: Callable[..., Any] | None = None  # the `Gathers` of a mesh

    def each(self, wrap: Callable[[Callable[..., Any]], Callable[..., Any]]) -> Any:
        inner = self.losses.each(wrap) if isinstance(self.losses, Declared) else wrap(self.losses)
        return replace(self, losses=inner)

    def gathers(self, starting: bool = False, rule: Any = None, reshard: bool = False) -> Any:
        """The `Gathers` of the leaves of one evaluation; None without a mesh."""
        if self.gathering is None and self.mesh is not None:
            raise ValueError(
                "sharded: losses must be made by distributed.sharded(losses, mesh), found a Sharded alone. Call it."
            )
        return None if self.gathering is None else self.gathering(self.mesh, starting, rule, reshard)

    def __call__(self, params: Params, *batch: Any) -> Losses:
        floating_leaves(params)
        if isinstance(self.losses, PerExample | ExampleSets):
            raise no_sharded_form("per_example losses")
        of_shards = self.of_shards(lambda losses, chosen, enter: enter(losses, chosen), [params], self.gathers())
        return of_shards(shards_of(params), *batch)

    def of_shards(
        self,
        over_shards: Callable[..., Any],
        likes: Sequence[Tree],
        gathers: Any,
        *,
        has_aux: bool = False,
        at: Sequence[int] = (0,),
    ) -> Any:
        """The losses as a function of shards, of the kind of the losses themselves: see `Kind.over_shards`. `likes` are
        the arguments that may be sharded, with their layouts, and `at` their positions.
        """

        def enter(
            f: Callable[..., Any], likes: Sequence[Tree], prefix: str = "", *, returns_losses: bool = True
        ) -> Callable[..., Any]:
            if self.mesh is None and not returns_losses:
                raise no_sharded_form("multitask losses", ", or sharded(multitask(...), mesh)")
            given = dict(zip(at, likes, strict=True))

            def of_shards(*args: Any) -> Any:
                hooks = gathers.saving_shards() if gathers is not None and gathers.reshard else nullcontext()
                with hooks, _told_of_mixed_leaves():
                    whole = [
                        self.entered(arg, given.get(k), prefix if k in given else f"argument {k}.", gathers)
                        for k, arg in enumerate(args)
                    ]
                    found = f(*whole)
                    if not returns_losses:
                        return found
                    if has_aux and isinstance(found, tuple) and len(found) == 2:
                        return self.common(found[0], gathers), found[1]
                    return self.common(found, gathers)

            return of_shards

        return over_shards(self.losses, likes, enter)

    def entered(self, tree: Tree, likes: Tree | None, prefix: str, gathers: Any) -> Tree:
        """An argument as the losses take it, from this rank's shards and the leaves with their layouts; `likes` is None
        for a constant, such as a frozen base. A prefix comes before the names of the leaves.
        """
        constant = likes is None
        if constant and (self.mesh is None or not any_sharded(tree_leaves(tree))):
            return tree
        likes = tree if constant else likes
        names = iter(tree_names(likes))

        def enter(like: Any, shard: Any) -> Any:
            name = prefix + next(names)
            if self.mesh is None:
                return sharded_as(shard, like, differentiable=True)
            if constant and not is_sharded(like):  # a count, for instance
                return shard
            if is_sharded(like) and like.device_mesh != self.mesh:
                raise ValueError(
                    f"{here()}: expected parameters on the mesh of sharded(losses, mesh), {self.mesh}, found "
                    f"{like.device_mesh}. Distribute them with the same mesh."
                )
            return gathers.entered(Leaf(shard_of(shard).detach() if constant else shard, like, name))

        return tree_map(enter, likes, tree)

    def common(self, values: Losses, gathers: Any) -> Losses:
        """The losses that all ranks have in common: their mean over the mesh, or those of a `DTensor`."""
        leaves, structure = tree_flatten(values)
        if self.mesh is None:
            return structure.unflatten([_whole(x) if is_sharded(x) else x for x in leaves])
        places = [k for k, x in enumerate(leaves) if isinstance(x, Tensor) and x.is_floating_point()]
        if places or not leaves:
            described = described_leaves(values)
            gathers.announce(described, self.mesh.device_type)
            means = gathers.mean([at_least_float32(leaves[k]) for k in places], described)
            for k, mean in zip(places, means, strict=True):
                leaves[k] = mean
        gathers.names.clear()
        return structure.unflatten(leaves)


def mesh_of(losses: Any) -> Any:
    """The mesh over which the batch of losses is split; None of losses that know of no ranks."""
    return losses.mesh if isinstance(losses, Sharded) else None


def no_sharded_form(found: str, cure: str = "") -> ValueError:
    """The error of losses that are not differentiated where parameters are sharded."""
    return ValueError(
        f"{here()}: expected losses whose rows are equal objectives on all ranks, for sharded parameters, found "
        f"{found}. Pass a plain function{cure}."
    )


def not_gathered_here(found: str) -> ValueError:
    """The error of losses that need a leaf whole for longer than one function takes."""
    return ValueError(
        f"sharded: expected losses in which functions of torch take the parameters, found {found}: no function gathers "
        "it there. Pass sharded(losses, mesh, reshard=False), which gathers each parameter once."
    )


@contextmanager
def _told_of_mixed_leaves() -> Generator[None]:
    """Say how what a closure captures, or a transform takes, gets to the losses whole."""
    try:
        yield
    except RuntimeError as error:
        if "support saved tensor hooks" in str(error) or "storage of TensorWrapper" in str(error):
            raise not_gathered_here("a transform of torch.func") from error
        if "mixed torch.Tensor and DTensor" not in str(error):
            raise
        raise ValueError(
            f"{here()}: expected sharded(losses, mesh) whose losses take every DTensor as an argument and get it "
            "whole, found that they compute with one that they capture. Pass it with the batch: "
            "losses(params, base, *batch)."
        ) from error


def _whole(value: Any) -> Tensor:
    if any(p.is_partial() and p.reduce_op != "sum" for p in value.placements):
        raise ValueError(
            f"{here()}: expected losses that are placed Shard, Replicate or Partial('sum'), found "
            f"{list(value.placements)}. Redistribute what is averaged before the loss averages it."
        )
    from torch.distributed.tensor import Replicate  # takes a second to import: not before there is a DTensor

    return value.full_tensor(grad_placements=[Replicate()] * value.device_mesh.ndim)
