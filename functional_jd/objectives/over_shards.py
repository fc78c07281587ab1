"""Losses of sharded parameters: each leaf is opened to this rank's shard, and gathered where the losses use it."""

from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from functional_jd.core.declared import Declared
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
    tree_unflatten,
)
from functional_jd.core.types import Losses, Params, Tree
from functional_jd.objectives.gathering import GatheredWhereUsed, Gathers, Keep, not_gathered_here, saved_shards
from functional_jd.objectives.structured import ExampleSets, PerExample


@dataclass(frozen=True)
class Sharded(Declared):
    """The function that `distributed.sharded` returns. The engines read from it how leaves are gathered.

    Attributes:
        losses: the losses of whole parameters.
        mesh: the mesh over which the batch is split; None where the losses compute with `DTensor` leaves themselves.
        reshard: whether what the backward pass needs of gathered leaves is gathered again.
    """

    losses: Callable[..., Any]
    mesh: Any
    reshard: bool = False

    def each(self, wrap: Callable[[Callable[..., Any]], Callable[..., Any]]) -> Any:
        inner = self.losses.each(wrap) if isinstance(self.losses, Declared) else wrap(self.losses)
        return replace(self, losses=inner)

    def __call__(self, params: Params, *batch: Any) -> Losses:
        floating_leaves(params, "sharded")
        if isinstance(self.losses, PerExample | ExampleSets):
            raise no_sharded_form("sharded", "per_example losses")
        gathers = Gathers("sharded", self.mesh, False)
        return self.of_shards(lambda losses, chosen, enter: enter(losses, chosen), [params], gathers)(
            shards_of(params), *batch
        )

    def of_shards(
        self,
        over_shards: Callable[..., Any],
        likes: Sequence[Tree],
        gathers: Gathers,
        *,
        has_aux: bool = False,
        reshard: bool = False,
        at: Sequence[int] = (0,),
    ) -> Any:
        """The losses as a function of shards, of the kind of the losses themselves.

        Args:
            over_shards: how losses of that kind become those of shards: see `Kind`.
            likes: the arguments that may be sharded, as they were given: their layouts count.
            gathers: takes the names of what is gathered.
            has_aux: whether the losses return `(losses, aux)`.
            reshard: whether to gather again in the backward pass.
            at: the positions of these arguments.
        """
        where = gathers.where

        def leave(result: Any) -> Any:
            if has_aux and isinstance(result, tuple) and len(result) == 2:
                return self.common(result[0], gathers), result[1]
            return self.common(result, gathers)

        def enter(
            f: Callable[..., Any], likes: Sequence[Tree], prefix: str = "", *, returns_losses: bool = True
        ) -> Callable[..., Any]:
            if self.mesh is None and not returns_losses:
                raise no_sharded_form(where, "multitask losses", ", or sharded(multitask(...), mesh)")

            def of_shards(*args: Any) -> Any:
                with saved_shards(gathers) if reshard else nullcontext() as keep, _told_of_mixed_leaves(where):
                    whole = list(args)
                    for k, like in zip(at, likes, strict=True):
                        names = iter([prefix + name for name in tree_names(like)])
                        enter = lambda old, x: self.enter(x, old, next(names), gathers, keep)  # noqa: B023
                        whole[k] = tree_map(enter, like, args[k])
                    for k, given in enumerate(args):
                        if k not in at and self.mesh is not None and any_sharded(tree_leaves(given)):
                            whole[k] = self.constant(given, f"argument {k}", gathers, keep)
                    return leave(f(*whole)) if returns_losses else f(*whole)

            return of_shards

        return over_shards(self.losses, likes, enter)

    def enter(self, shard: Tensor, like: Any, name: str, gathers: Gathers, keep: Keep | None) -> Any:
        """What the losses compute with, from this rank's shard of a leaf."""
        if self.mesh is None:
            return sharded_as(shard, like, differentiable=True)
        if is_sharded(like) and like.device_mesh != self.mesh:
            raise ValueError(
                f"{gathers.where}: expected parameters on the mesh of sharded(losses, mesh), {self.mesh}, found "
                f"{like.device_mesh}. Distribute them with the same mesh."
            )
        if keep is None:
            return gathers.gathered(shard, like, name)
        return GatheredWhereUsed.of(shard, like, name, gathers, keep)

    def constant(self, tree: Tree, name: str, gathers: Gathers, keep: Keep | None) -> Tree:
        """An argument that is not differentiated, such as a frozen base, with whole leaves for sharded ones."""
        names = iter([f"{name}.{leaf}" for leaf in tree_names(tree)])

        def entered(leaf: Any) -> Any:
            own = next(names)
            return self.enter(shard_of(leaf).detach(), leaf, own, gathers, keep) if is_sharded(leaf) else leaf

        return tree_map(entered, tree)

    def common(self, values: Losses, gathers: Gathers) -> Losses:
        """The losses that all ranks have in common: their mean over the mesh, or those of a `DTensor`."""
        leaves, structure = tree_flatten(values)
        if self.mesh is None:
            return tree_unflatten(structure, [_whole(x, gathers.where) if is_sharded(x) else x for x in leaves])
        places = [k for k, x in enumerate(leaves) if isinstance(x, Tensor) and x.is_floating_point()]
        if places or not leaves:
            described = described_leaves(values)
            gathers.announce(described, self.mesh.device_type)
            means = gathers.mean([at_least_float32(leaves[k]) for k in places], described)
            for k, mean in zip(places, means, strict=True):
                leaves[k] = mean
        gathers.names.clear()
        return tree_unflatten(structure, leaves)


def mesh_of(losses: Any) -> Any:
    """The mesh over which the batch of losses is split; None of losses that know of no ranks."""
    return losses.mesh if isinstance(losses, Sharded) else None


def no_sharded_form(where: str, found: str, cure: str = "") -> ValueError:
    """The error of losses that are not differentiated where parameters are sharded."""
    return ValueError(
        f"{where}: expected losses whose rows are equal objectives on all ranks, for sharded parameters, found "
        f"{found}. Pass a plain function{cure}."
    )


@contextmanager
def _told_of_mixed_leaves(where: str) -> Generator[None]:
    """Say how what a closure captures, or a transform takes, gets to the losses whole."""
    try:
        yield
    except RuntimeError as error:
        if "support saved tensor hooks" in str(error) or "storage of TensorWrapper" in str(error):
            raise not_gathered_here("a transform of torch.func") from error
        if "mixed torch.Tensor and DTensor" not in str(error):
            raise
        raise ValueError(
            f"{where}: expected sharded(losses, mesh) whose losses take every DTensor as an argument and get it whole, "
            "found that they compute with one that they capture. Pass it with the batch: "
            "losses(params, base, *batch)."
        ) from error


def _whole(value: Any, where: str) -> Tensor:
    if any(p.is_partial() and p.reduce_op != "sum" for p in value.placements):
        raise ValueError(
            f"{where}: expected losses that are placed Shard, Replicate or Partial('sum'), found "
            f"{list(value.placements)}. Redistribute what is averaged before the loss averages it."
        )
    from torch.distributed.tensor import Replicate  # takes a second to import: not before there is a DTensor

    return value.full_tensor(grad_placements=[Replicate()] * value.device_mesh.ndim)
