"""Losses of sharded parameters: each leaf is opened to this rank's shard, and gathered where the losses use it."""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from functional_jd.core.declared import Declared
from functional_jd.core.rows import at_least_float32
from functional_jd.core.sharding import gathered, is_sharded, over_dimension, sharded_as
from functional_jd.core.tree import floating_leaves, shards_of, tree_map
from functional_jd.core.types import Losses, Params, Tree
from functional_jd.objectives.gathering import GatheredWhereUsed, Keep, saved_shards
from functional_jd.objectives.structured import ExampleSets, Multitask, PerExample


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
        return self.of_shards([params], "sharded")(shards_of(params), *batch)

    def of_shards(
        self,
        likes: Sequence[Tree],
        where: str,
        *,
        has_aux: bool = False,
        reshard: bool = False,
        at: Sequence[int] = (0,),
    ) -> Any:
        """The losses as a function of shards, of the kind of the losses themselves.

        Args:
            likes: the arguments that may be sharded, as they were given: their layouts count.
            where: the function that the user called.
            has_aux: whether the losses return `(losses, aux)`.
            reshard: whether to gather again in the backward pass.
            at: the positions of these arguments.
        """
        examples = isinstance(self.losses, PerExample | ExampleSets)
        if examples or (self.mesh is None and isinstance(self.losses, Multitask)):
            found = "per_example" if examples else "multitask"
            cure = "" if found == "per_example" else ", or sharded(multitask(...), mesh)"
            raise ValueError(
                f"{where}: expected losses whose rows are equal objectives on all ranks, for sharded parameters, found "
                f"{found} losses. Pass a plain function{cure}."
            )

        def entered(f: Callable[..., Any], likes: Sequence[Tree], leave: Callable[[Any], Any]) -> Callable[..., Any]:
            def of_shards(*args: Any) -> Any:
                with saved_shards() if reshard else nullcontext() as keep:
                    whole = list(args)
                    for position, like in zip(at, likes, strict=True):
                        whole[position] = tree_map(lambda old, x: self.enter(x, old, where, keep), like, args[position])
                    return leave(f(*whole))

            return of_shards

        def leave(result: Any) -> Any:
            if has_aux and isinstance(result, tuple) and len(result) == 2:
                return self.common(result[0], where), result[1]
            return self.common(result, where)

        if isinstance(self.losses, Multitask):
            shared, heads = self.losses.split(likes[0])
            features = entered(self.losses.features, [shared], lambda found: found)
            return Multitask(features, entered(self.losses.heads, [heads], leave))
        return entered(self.losses, likes, leave)

    def enter(self, shard: Tensor, like: Any, where: str, keep: Keep | None) -> Any:
        """What the losses compute with, from this rank's shard of a leaf."""
        if self.mesh is None:
            return sharded_as(shard, like, differentiable=True)
        if is_sharded(like) and like.device_mesh != self.mesh:
            raise ValueError(
                f"{where}: expected parameters on the mesh of sharded(losses, mesh), {self.mesh}, found "
                f"{like.device_mesh}. Distribute them with the same mesh."
            )
        if keep is None:
            return gathered(shard, like, self.mesh)
        return GatheredWhereUsed.of(shard, like, self.mesh, keep)

    def common(self, values: Losses, where: str) -> Losses:
        """The losses that all ranks have in common: their mean over the mesh, or those of a `DTensor`."""
        return tree_map(lambda value: self._common(value, where) if isinstance(value, Tensor) else value, values)

    def _common(self, value: Any, where: str) -> Tensor:
        if self.mesh is None:
            if is_sharded(value) and any(p.is_partial() and p.reduce_op != "sum" for p in value.placements):
                raise ValueError(
                    f"{where}: expected losses that are placed Shard, Replicate or Partial('sum'), found "
                    f"{list(value.placements)}. Redistribute what is averaged before the loss averages it."
                )
            return _replicated(value) if is_sharded(value) else value
        if value.is_floating_point():
            value = at_least_float32(value)
            for dim in range(self.mesh.ndim):
                value = over_dimension("mean", value, self.mesh, dim)
        return value


def _replicated(value: Any) -> Tensor:
    from torch.distributed.tensor import Replicate  # takes a second to import: not before there is a DTensor

    return value.full_tensor(grad_placements=[Replicate()] * value.device_mesh.ndim)
