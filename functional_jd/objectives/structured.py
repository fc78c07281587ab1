"""Losses with a declared structure: one objective per example, or several tasks on a shared trunk."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, overload

import torch
from torch import Tensor

from functional_jd.core.arguments import check_function, check_mapping, described, refuse
from functional_jd.core.tree import tree_leaves, tree_map
from functional_jd.core.types import Declared, Losses, Params, Tree
from functional_jd.precision.autocast import autocast_disabled
from functional_jd.torch_compat.slow_path import attempt
from functional_jd.torch_compat.watching import StateJournal, watched

Dims = int | None | Sequence[int | None]
"""The dimension of the examples: one for all arguments, or one per argument; `None` marks a shared argument."""

_CURE = "Mark what the examples share with None in in_dims, or close over it; leave out a loss that has no examples."


@dataclass(frozen=True, eq=False)
class PerExample(Declared):
    """The function that `per_example` returns. The engines read the loss of one example from it."""

    loss: Callable[..., Any]
    in_dims: Dims
    without_examples: Callable[..., Any] | None = None  # the losses of a batch without examples; None: it raises
    name: str | None = None  # of the loss among losses by name

    def __call__(self, params: Params, *batch: Tree) -> Losses:
        if self.without_examples is not None and not self.count(batch):
            return self.without_examples(params, *batch)
        dims = (None, *self.dims(batch))
        if torch.compiler.is_compiling():
            return torch.vmap(self.loss, in_dims=dims, randomness="different")(params, *batch)
        journal = StateJournal()
        together = torch.vmap(watched(self.loss, journal, examples=True), in_dims=dims, randomness="different")
        one_by_one = watched(self.one_by_one, journal, examples=True)
        ways = partial(together, params, *batch), partial(one_by_one, params, *batch)
        return attempt(*ways, instead="evaluates one example after the other", journal=journal)

    def one_by_one(self, params: Params, *batch: Tree) -> Losses:
        return stacked([self.of_one(params, *example) for example in self.examples(batch)])

    def of_one(self, params: Params, *example: Tree) -> Any:
        flags = [(x, x.requires_grad) for x in tree_leaves(params) if isinstance(x, Tensor)]  # pyright: ignore[reportUnnecessaryIsInstance]
        try:
            return self.loss(params, *example)
        except Exception as error:
            shapes = ", ".join(str(list(x.shape)) for x in tree_leaves(example) if isinstance(x, Tensor))  # pyright: ignore[reportUnnecessaryIsInstance]
            by_name = "" if self.name is None else " Its name must be in the dict of each argument that it takes."
            error.add_note(
                f"{self.where}: the loss receives one example without the dimension of examples, here {shapes}. For "
                f"modules that expect a batch, make it one: x.unsqueeze(0).{by_name}"
            )
            raise
        finally:  # a loss may freeze what the next example moves
            for x, flag in flags:
                if x.requires_grad != flag:
                    x.requires_grad_(flag)

    @property
    def where(self) -> str:
        return "per_example" if self.name is None else f"per_example (loss {self.name!r})"

    def dims(self, batch: tuple[Tree, ...]) -> tuple[int | None, ...]:
        """Return the dimension of the examples in each argument of the batch."""
        dims = self.in_dims if isinstance(self.in_dims, Sequence) else (self.in_dims,) * len(batch)
        if len(dims) != len(batch):
            raise ValueError(
                f"per_example: in_dims names {len(dims)} arguments, found {len(batch)} after the parameters. "
                "Give one dimension per argument, or a single one for all."
            )
        if all(dim is None for dim in dims):
            raise ValueError(
                "per_example: expected at least one argument with a dimension of examples, found none. "
                "Call it as (params, *batch), with in_dims=0 if the examples are along the first dimension."
            )
        return tuple(dims)

    def count(self, batch: tuple[Tree, ...]) -> int:
        """Return the number of examples."""
        pairs = zip(batch, self.dims(batch), strict=True)
        batched = [(leaf, dim) for argument, dim in pairs if dim is not None for leaf in tree_leaves(argument)]
        for leaf, dim in batched:
            if not isinstance(leaf, Tensor) or not -leaf.ndim <= dim < leaf.ndim:  # pyright: ignore[reportUnnecessaryIsInstance]
                found = f"shape {list(leaf.shape)}" if isinstance(leaf, Tensor) else type(leaf).__name__  # pyright: ignore[reportUnnecessaryIsInstance]
                raise ValueError(
                    f"{self.where}: expected tensors with examples along dimension {dim}, found {found}. {_CURE}"
                )
        sizes = [leaf.shape[dim] for leaf, dim in batched]
        empty = len(sizes) > 0 and sizes[0] == 0 and self.without_examples is None
        if not sizes or empty or any(size != sizes[0] for size in sizes):  # a set would fix a traced size
            raise ValueError(
                f"{self.where}: all batched arguments must have the same number of examples, at least one, found "
                f"{sorted(set(sizes))}. {_CURE}"
            )
        return sizes[0]

    def examples(self, batch: tuple[Tree, ...]) -> list[tuple[Tree, ...]]:
        pairs = list(zip(batch, self.dims(batch), strict=True))
        return [
            tuple(x if dim is None else tree_map(partial(Tensor.select, dim=dim, index=k), x) for x, dim in pairs)
            for k in range(self.count(batch))
        ]


@dataclass(frozen=True, eq=False)
class Multitask(Declared):
    """The function that `multitask` returns. The engines read the trunk and the heads from it."""

    features: Callable[..., Tree]
    heads: Callable[..., Any]

    def __call__(self, params: Params, *args: Any) -> Losses:
        shared, heads = self.split(params)
        return self.heads(heads, self.features(shared, *args), *args)

    def shared(self, params: Params) -> Tree:
        return self.split(params)[0]

    def split(self, params: Params) -> tuple[Tree, Tree]:
        if not isinstance(params, dict) or params.keys() != {"shared", "heads"}:
            found = sorted(params) if isinstance(params, dict) else type(params).__name__
            cure = "Put the trunk's parameters under 'shared' and those of all tasks under 'heads'."
            raise ValueError(f"multitask: params must be a dict with keys 'shared' and 'heads', found {found}. {cure}")
        return params["shared"], params["heads"]


def _join(found: dict[str, Any]) -> Any:
    if all(isinstance(result, tuple) for result in found.values()):
        values, aux = ({name: result[at] for name, result in found.items()} for at in (0, 1))
        return values, aux
    return found


@dataclass(frozen=True, eq=False)
class ExampleSets(Declared):
    """The function that `per_example` returns for losses by name: several sets of examples, each with its own loss."""

    parts: Mapping[str, PerExample]
    join: Callable[[dict[str, Any]], Any] = _join  # makes what the losses return of the results by name

    def each(self, wrap: Callable[[Callable[..., Any]], Callable[..., Any]]) -> Any:
        return replace(self, parts={name: part.each(wrap) for name, part in self.parts.items()})

    def __call__(self, params: Params, *batch: Tree) -> Losses:
        return self.join({name: self.parts[name](params, *own) for name, own in self.batches(batch).items()})

    def one_by_one(self, params: Params, *batch: Tree) -> Losses:
        return self.join({name: self.parts[name].one_by_one(params, *own) for name, own in self.batches(batch).items()})

    def batches(self, batch: tuple[Tree, ...]) -> dict[str, tuple[Tree, ...]]:
        """Return the arguments of each set, in the order of the rows."""
        names = sorted(self.parts)
        for argument in batch:
            if not isinstance(argument, Mapping):
                found = described(argument)
                raise TypeError(
                    f"per_example: arguments must be a dict by names, found {found}. Use those of the losses."
                )
        given = {name for argument in batch for name in argument}
        if given != set(names):
            raise ValueError(
                f"per_example: expected examples for each of the losses {names}, found {sorted(given)}. Pass dicts by "
                "these names; a name may be missing in those arguments that its loss does not take."
            )
        return {name: tuple(argument[name] for argument in batch if name in argument) for name in names}

    def counts(self, batch: tuple[Tree, ...]) -> dict[str, int]:
        """Return the number of examples in each set."""
        return {name: self.parts[name].count(own) for name, own in self.batches(batch).items()}


@overload
def per_example(loss: Callable[..., Any], in_dims: Dims = 0) -> PerExample: ...
@overload
def per_example(loss: Mapping[str, Callable[..., Any]], in_dims: Dims = 0) -> ExampleSets: ...
def per_example(
    loss: Callable[..., Any] | Mapping[str, Callable[..., Any]], in_dims: Dims = 0
) -> PerExample | ExampleSets:
    """Make every example of a batch a separate objective.

    `losses_i = loss(params, *example_i)`

    Args:
        loss: `loss(params, *example) -> scalar`, for one example without the batch dimension. Or a dict of such losses
            by name, for sets of examples of different sizes, such as points inside and at the boundary.
        in_dims: the dimension of the examples: one for all arguments after `params`, or one per argument; `None` marks
            an argument that all examples share. For losses by name, one for all.

    Returns:
        A function `(params, *batch) -> losses [batch]`. Random layers draw separately for every example. For losses by
        name, every argument of the batch is a dict by name, and the losses are a dict `{name: [examples]}`; a name that
        is missing in an argument is that of a loss that does not take it.

    Raises:
        TypeError: `loss` is not callable, or `in_dims` names no dimensions.
        ValueError: when called, `in_dims` does not match the arguments, or the numbers of examples differ; `loss` calls
            BatchNorm in training mode on a batch of one.

    Guarantees:
        The losses equal those of a loop over the examples. Rows take m small backward passes at the cost of one. If
        vmap raises, examples are evaluated one by one, with a `SlowPathWarning`. Losses by name give the rows of each
        set, in the order of the sorted names; they take no buffers.

    Example:
        >>> losses = per_example(lambda params, x, y: (x @ params["w"] - y).square())
        >>> x, y = torch.eye(3), torch.tensor([1.0, 2.0, 3.0])
        >>> jacobian, values = jacobian_fn(losses)({"w": torch.zeros(3)}, x, y)
        >>> values, jacobian["w"].diagonal()
        (tensor([1., 4., 9.]), tensor([-2., -4., -6.]))
    """
    if isinstance(loss, Mapping):
        return _by_name(loss, in_dims)
    check_function("loss", loss, "Pass the function itself.")
    for dim in in_dims if isinstance(in_dims, list | tuple) else [in_dims]:
        if dim is not None and (isinstance(dim, bool) or not isinstance(dim, int)):  # pyright: ignore[reportUnnecessaryIsInstance]
            cure = "0 if the examples are along the first dimension of all arguments."
            refuse("in_dims", "a dimension, None, or a tuple of these", dim, cure)
    return PerExample(loss, in_dims)


def multitask(features: Callable[..., Tree], heads: Callable[..., Any]) -> Multitask:
    """Declare several tasks on one trunk: the trunk follows the rule, every head follows its own loss.

    `losses = heads(params["heads"], features(params["shared"], *args), *args)`: both receive the whole batch.

    Args:
        features: the trunk, `features(shared, *args) -> pytree`. It returns all that the heads use of it.
        heads: `heads(heads, features, *args) -> pytree` of m scalars. Tasks may share parameters of the heads; their
            gradients are added.

    Returns:
        A function `(params, *args) -> losses`, with `params = {"shared": ..., "heads": ...}`.

    Raises:
        TypeError: `features` or `heads` is not callable.
        ValueError: when called, `params` is not such a dict; in an engine, a loss that depends on the trunk other than
            by its features. Under a transform or torch.compile that is not noticed.

    Guarantees:
        The rows of the trunk equal those of the plain function; the gradient of the heads is the unweighted sum of
        their rows. To apply the weights of a rule to the heads as well, pass a plain function.

    Example:
        >>> tasks = multitask(
        ...     lambda shared, x: x @ shared["w"],
        ...     lambda heads, h, x: {"size": h.square().mean(), "fit": (h @ heads["v"] - 1).square().mean()},
        ... )
        >>> params = {"shared": {"w": torch.ones(3, 2)}, "heads": {"v": torch.ones(2)}}
        >>> jacobian, values = jacobian_fn(tasks)(params, torch.ones(4, 3))
        >>> jacobian.shared["w"].shape, jacobian.heads["v"].shape
        (torch.Size([2, 3, 2]), torch.Size([2]))
    """
    check_function("features", features, "Pass the function itself.")
    check_function("heads", heads, "Pass the function itself.")
    return Multitask(features, heads)


def stacked(trees: Sequence[Tree]) -> Tree:
    """Stack pytrees of the same structure, one per row, leaf by leaf."""
    for leaf in tree_leaves(trees[0]):
        if not isinstance(leaf, Tensor):  # pyright: ignore[reportUnnecessaryIsInstance]
            refuse("losses and aux of per_example", "tensors", leaf, "For numbers return torch.as_tensor(...).")
    with autocast_disabled():  # under native autocast, torch.stack refuses some dtypes
        return tree_map(lambda *rows: torch.stack(rows), trees[0], *trees[1:])


def _by_name(losses: Mapping[str, Callable[..., Any]], in_dims: Dims) -> ExampleSets:
    check_mapping("loss", losses, 'Pass for instance {"inside": residual, "edge": value}.')
    if not losses:
        raise ValueError("per_example: expected at least one loss, found an empty dict. Pass a function, or a dict.")
    if isinstance(in_dims, Sequence):
        refuse("in_dims", "one dimension, as the losses have names", in_dims, "Close over what is shared.")
    parts = {name: per_example(loss, in_dims) for name, loss in losses.items()}
    return ExampleSets({name: replace(part, name=name) for name, part in parts.items()})
