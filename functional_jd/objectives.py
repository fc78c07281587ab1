"""Objectives: the structure of the losses, declared once, where the losses are."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from functional_jd.core.slow_path import StateJournal, attempt
from functional_jd.core.tree import tree_leaves, tree_map
from functional_jd.core.types import Losses, Params, Tree
from functional_jd.precision.autocast import autocast_disabled

Dims = int | None | Sequence[int | None]
"""Where the examples lie in each argument: one dimension for all arguments, or one per argument; `None` is shared."""


@dataclass(frozen=True)
class PerExample:
    """What `per_example` returns: the losses of a batch, and the loss of one example for the engines to read."""

    loss: Callable[..., Any]
    in_dims: Dims

    def __call__(self, params: Params, *batch: Tree) -> Losses:
        vmapped = torch.vmap(self.loss, in_dims=(None, *self.dims(batch)), randomness="different")
        if torch.compiler.is_compiling():
            return vmapped(params, *batch)
        journal = StateJournal()

        def together() -> Losses:
            with journal.watch():
                return vmapped(params, *batch)

        def one_by_one() -> Losses:
            return stacked([self.loss(params, *example) for example in self.examples(batch)])

        instead = "evaluates one example after the other"
        return attempt(together, one_by_one, where="per_example", instead=instead, journal=journal)

    def dims(self, batch: tuple[Tree, ...]) -> tuple[int | None, ...]:
        """The dimension of the examples in each argument of the batch."""
        dims = self.in_dims if isinstance(self.in_dims, Sequence) else (self.in_dims,) * len(batch)
        if len(dims) != len(batch):
            raise ValueError(
                f"per_example: in_dims names {len(dims)} arguments, found {len(batch)} besides the parameters. "
                "Give one dimension per argument, or a single one for all."
            )
        if all(dim is None for dim in dims):
            raise ValueError(
                "per_example: expected at least one argument with a dimension of examples, found none. "
                "Call it as (params, *batch), with in_dims=0 where the examples lie along the first dimension."
            )
        return tuple(dims)

    def count(self, batch: tuple[Tree, ...]) -> int:
        """The number of examples."""
        pairs = zip(batch, self.dims(batch), strict=True)
        batched = [(leaf, dim) for argument, dim in pairs if dim is not None for leaf in tree_leaves(argument)]
        for leaf, dim in batched:
            if not isinstance(leaf, Tensor) or not -leaf.ndim <= dim < leaf.ndim:  # pyright: ignore[reportUnnecessaryIsInstance]
                found = f"shape {list(leaf.shape)}" if isinstance(leaf, Tensor) else type(leaf).__name__  # pyright: ignore[reportUnnecessaryIsInstance]
                raise ValueError(
                    f"per_example: expected tensors with examples along dimension {dim}, found {found}. "
                    "Mark what the examples share with None in in_dims."
                )
        sizes = {leaf.shape[dim] for leaf, dim in batched}
        if len(sizes) != 1 or 0 in sizes:
            raise ValueError(
                "per_example: all batched arguments need the same number of examples, at least one, "
                f"found {sorted(sizes)}. Mark what the examples share with None in in_dims."
            )
        return sizes.pop()

    def examples(self, batch: tuple[Tree, ...]) -> list[tuple[Tree, ...]]:
        """The arguments of each example, one after the other."""
        pairs = list(zip(batch, self.dims(batch), strict=True))
        return [
            tuple(argument if dim is None else _select(argument, dim, index) for argument, dim in pairs)
            for index in range(self.count(batch))
        ]


@dataclass(frozen=True)
class Multitask:
    """What `multitask` returns: the losses of all tasks, and trunk and heads apart for the engines to read."""

    features: Callable[..., Tree]
    heads: Callable[..., Any]

    def __call__(self, params: Params, *args: Any) -> Losses:
        shared, heads = self.split(params)
        return self.heads(heads, self.features(shared, *args), *args)

    def split(self, params: Params) -> tuple[Tree, Tree]:
        """The parameters of the trunk and of the heads."""
        if not isinstance(params, dict) or params.keys() != {"shared", "heads"}:
            found = sorted(params) if isinstance(params, dict) else type(params).__name__
            raise ValueError(
                f"multitask: params must be a dict with the keys 'shared' and 'heads', found {found}. "
                "Put the trunk's parameters under 'shared' and those of all tasks under 'heads'."
            )
        return params["shared"], params["heads"]


def per_example(loss: Callable[..., Any], in_dims: Dims = 0) -> PerExample:
    """Make every example of a batch an objective of its own.

    `losses_i = loss(params, *example_i)`

    Args:
        loss: `loss(params, *example) -> scalar`. It sees one example, without the dimension of the batch.
        in_dims: the dimension of the examples: one for all arguments after `params`, or one per argument; `None` marks
            an argument that all examples share.

    Returns:
        A function `(params, *batch) -> losses [batch]`. Random layers draw anew for every example.

    Raises:
        TypeError: `loss` is not callable.
        ValueError: when called, `in_dims` that do not fit the arguments, or examples that disagree in number.

    Laws:
        The numbers are those of a loop over the examples. `jacobian_fn` takes the gradient of each example alone:
        m small backward passes at the price of one, not m passes through the batch. Where vmap refuses the loss it is
        evaluated again, example by example, with a `SlowPathWarning`; buffers then move once, as without vmap.
    """
    _check_callable("per_example", "loss", loss)
    return PerExample(loss, in_dims)


def multitask(features: Callable[..., Tree], heads: Callable[..., Any]) -> Multitask:
    """Declare several tasks on one trunk: the trunk follows the rule, every head follows its own loss.

    `losses = heads(params["heads"], features(params["shared"], *args), *args)`: both receive the whole batch.

    Args:
        features: `features(shared, *args) -> pytree`: the trunk.
        heads: `heads(heads, features, *args) -> pytree` of m scalars. Tasks may share parameters of the heads: their
            gradients add up.

    Returns:
        A function `(params, *args) -> losses`, with `params = {"shared": ..., "heads": ...}`.

    Raises:
        TypeError: `features` or `heads` is not callable.
        ValueError: when called, params that are not such a dict.

    Laws:
        The trunk's rows are those of the plain function; the heads' gradient is the sum of its rows, unweighted, with
        every rule and every engine. Who wants a rule's weights on the heads too passes a plain function.
    """
    _check_callable("multitask", "features", features)
    _check_callable("multitask", "heads", heads)
    return Multitask(features, heads)


def stacked(trees: Sequence[Tree]) -> Tree:
    """Pytrees of the same structure, one per row, leaf by leaf; native autocast around it would refuse some dtypes."""
    with autocast_disabled(trees[0]):
        return tree_map(lambda *rows: torch.stack(rows), trees[0], *trees[1:])


def _select(argument: Tree, dim: int, index: int) -> Tree:
    return tree_map(lambda leaf: leaf.select(dim, index), argument)


def _check_callable(where: str, name: str, value: Any) -> None:
    if not callable(value):
        raise TypeError(f"{where}: {name} must be a function, found {type(value).__name__}. Pass the function itself.")
