"""Buffers: tensors that losses carry from step to step, as an argument and a result."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from functional_jd.core.arguments import described, here
from functional_jd.core.tree import tree_flatten, tree_leaves, tree_names
from functional_jd.core.types import Declared, Losses, Tree
from functional_jd.random.keys import fold_in

Carried = tuple[Tree, Tree]
"""`(buffers, aux)`; `()` in the place of what the losses do not return."""


class Extras(NamedTuple):
    """The other arguments and results of losses: not parameters, batch or values."""

    buffers: Tree  # what the losses take after the parameters; `()` if nothing, `{}` of a module without buffers
    has_aux: bool  # whether they return aux, last
    rank: int = 0  # the place of this rank's part in the batch
    ranks: int = 1  # how many parts there are

    @property
    def takes_buffers(self) -> bool:
        return not (isinstance(self.buffers, tuple) and not self.buffers)


class CarryingLosses(NamedTuple):
    """Losses that return `(losses, (buffers, aux))`, whatever the user's return."""

    losses: Callable[..., Any]  # of the kind of the user's losses
    args: tuple[Any, ...]  # what they take after the parameters
    next_buffers: Callable[[Tree], Tree]  # the buffers for the next step, from those that the engine returns


class FeaturesAndBuffers(NamedTuple):
    """The result of a trunk with buffers: no row goes through the buffers, but derivatives of steps do."""

    features: Tree
    buffers: Tree


def with_carried(result: Any, extras: Extras) -> tuple[Losses, Carried]:
    """`(losses, (buffers, aux))` from the result of losses with these extras."""
    parts = ["losses", *(["buffers"] if extras.takes_buffers else []), *(["aux"] if extras.has_aux else [])]
    if len(parts) == 1:
        return result, ((), ())
    if not (isinstance(result, tuple) and len(cast("tuple[Any, ...]", result)) == len(parts)):
        found = f"a tuple of {len(cast(Any, result))}" if isinstance(result, tuple) else type(result).__name__
        given = (["buffers"] if extras.takes_buffers else []) + (["has_aux=True"] if extras.has_aux else [])
        raise TypeError(
            f"{here()}: with {' and '.join(given)} the losses must return ({', '.join(parts)}), found "
            f"{found}. Return a tuple of these {len(parts)}."
        )
    values, *rest = cast("tuple[Any, ...]", result)
    return values, (rest[0] if extras.takes_buffers else (), rest[-1] if extras.has_aux else ())


def carrying_losses(losses: Any, batch: tuple[Any, ...], extras: Extras) -> CarryingLosses:
    """Losses that are called with these extras, for a kind that has no way of its own."""

    def adapted(f: Callable[..., Any]) -> Callable[..., Any]:
        return lambda params, *args: with_carried(f(params, *args), extras)

    found = losses.each(adapted) if isinstance(losses, Declared) else adapted(losses)
    args = (own_buffers(extras), *batch) if extras.takes_buffers else batch
    return CarryingLosses(found, args, partial(checked_buffers, extras))


def checked_buffers(extras: Extras, found: Tree, *, rows: bool = False) -> Tree:
    """The buffers. Raises for others than the losses received; `rows`: each has a first dimension of examples."""
    if not extras.takes_buffers:
        return found
    old, structure = tree_flatten(extras.buffers)
    try:
        new = structure.flatten_up_to(found)
    except ValueError as error:
        names = sorted(set(tree_names(found)) ^ set(tree_names(extras.buffers)))
        raise ValueError(
            f"{here()}: the losses must return buffers with the structure of those that they received, found "
            f"another, which differs in {names[:5]}. Return all buffers, also those that did not change."
        ) from error
    for index, (x, y) in enumerate(zip(old, new, strict=True)):
        tensors = isinstance(x, Tensor) and isinstance(y, Tensor)
        if not (tensors and x.dtype == y.dtype and x.shape == (y.shape[1:] if rows else y.shape)):
            found = described(y[0] if rows and isinstance(y, Tensor) else y)
            raise ValueError(
                f"{here()}: the losses must return buffers with the shapes and dtypes of those that they received, "
                f"found {found} in {tree_names(extras.buffers)[index]!r}, expected {described(x)}. Call a module "
                "whose first forward pass shapes its buffers once before dict(module.named_buffers())."
            )
    return found


def is_key(name: str, leaf: Any, buffers: Tree) -> bool:
    """Whether a leaf of the buffers is a key of `functional_jd.random`: int64 `[2]`, with a name that ends in `key`."""
    is_like_one = isinstance(leaf, Tensor) and leaf.dtype == torch.int64 and leaf.shape == (2,)
    return is_like_one and (name.endswith("key") or leaf is buffers)


def own_buffers(extras: Extras) -> Tree:
    """The buffers of this rank's part of the batch: the rank is folded into keys, except the first one's."""
    if not extras.rank or not tree_leaves(extras.buffers):
        return extras.buffers
    leaves, structure = tree_flatten(extras.buffers)
    pairs = zip(tree_names(extras.buffers), leaves, strict=True)
    own = [fold_in(x, extras.rank) if is_key(name, x, extras.buffers) else x for name, x in pairs]
    return structure.unflatten(own)
