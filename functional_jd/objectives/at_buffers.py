"""Losses at given buffers, as losses that carry none: to evaluate and differentiate by hand what a step trains."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, cast

from torch import Tensor

from functional_jd.core.arguments import check_function, refuse
from functional_jd.core.declared import Declared
from functional_jd.core.tree import tree_leaves, tree_map, tree_names
from functional_jd.core.types import LossFunction, Tree
from functional_jd.objectives.buffers import FeaturesAndBuffers, is_key
from functional_jd.objectives.structured import Multitask, PerExample


def at_buffers(losses: LossFunction, buffers: Tree) -> LossFunction:
    """Hold the buffers of losses: the same kind of losses, of the parameters and the batch alone.

    `at_buffers(losses, buffers)(params, *batch)` is the first of what `losses(params, buffers, *batch)` returns; what
    becomes of the buffers is dropped. So `jacobian_fn`, `gramian_fn` and the rules see what the next step sees, of
    `multitask` losses too, whose trunk and heads take the buffers one after the other.

    Args:
        losses: a function `(params, buffers, *batch) -> (losses, buffers)`, or what `multitask` or `per_example` made
            of such functions.
        buffers: those of a state, `state.buffers`. They are copied in every call.

    Returns:
        Losses without buffers and of the same kind. A key among the buffers draws the same numbers in every call.

    Raises:
        TypeError: losses that take no buffers: sets of examples by name, or shards; no tensors as buffers.
        ValueError: a key among the buffers of `per_example` losses, of which every example has its own in a step.

    Laws:
        Values, rows and Gramian are those of the step, bit for bit. The buffers do not change.

    Example:
        >>> net = nn.BatchNorm1d(2)
        >>> apply = functional(net)
        >>> def losses(params, buffers, x):
        ...     out, buffers = apply(params, buffers, x)
        ...     return (out - 1).square().mean(0), buffers
        >>> held = objectives.at_buffers(losses, dict(net.named_buffers()))
        >>> jacobian, values = jacobian_fn(held)(dict(net.named_parameters()), torch.eye(4)[:, :2])
        >>> jacobian["weight"].shape
        torch.Size([2, 2])
    """
    if isinstance(losses, Declared) and not isinstance(losses, Multitask | PerExample):
        cure = "Take those from which they were made."
        refuse("at_buffers", "losses", "a function, or multitask or per_example losses", losses, cure)
    check_function("at_buffers", "losses", losses, "Pass the function itself.")
    leaves = tree_leaves(buffers)
    if not all(isinstance(x, Tensor) for x in leaves):  # pyright: ignore[reportUnnecessaryIsInstance]
        refuse("at_buffers", "buffers", "a pytree of tensors", buffers, "Pass state.buffers.")
    copies = partial(tree_map, lambda x: x.clone(), buffers)
    if isinstance(losses, Multitask):
        return _of_trunk(losses, copies)
    if isinstance(losses, PerExample):
        keys = [name for name, x in zip(tree_names(buffers), leaves, strict=True) if is_key(name, x, buffers)]
        if keys:
            found = "a key and nothing else" if isinstance(buffers, Tensor) else repr(keys[0])
            raise ValueError(
                f"at_buffers: expected buffers without a key, found {found}, of which every example has its own in a "
                "step. Pass keys for each example in the batch, or, to evaluate without dropout, per_example of a loss "
                "without the key."
            )
        alone = losses.loss
        return replace(losses, loss=lambda params, *example: _first(alone(params, copies(), *example)))
    return lambda params, *batch: _first(losses(params, copies(), *batch))


def _of_trunk(losses: Multitask, copies: Callable[[], Tree]) -> Multitask:
    def features(shared: Tree, *batch: Any) -> FeaturesAndBuffers:
        found = losses.features(shared, copies(), *batch)
        return FeaturesAndBuffers(*_pair(found, "features"))

    def heads(own: Tree, found: FeaturesAndBuffers, *batch: Any) -> Any:
        return _first(losses.heads(own, found.features, found.buffers, *batch))

    return Multitask(features, heads)


def _first(found: Any) -> Any:
    return _pair(found, "losses")[0]


def _pair(found: Any, what: str) -> tuple[Any, Any]:
    if not (isinstance(found, tuple) and len(cast("tuple[Any, ...]", found)) == 2):
        raise TypeError(
            f"at_buffers: expected functions that return ({what}, buffers), found {type(found).__name__}. Losses "
            "without buffers need no at_buffers."
        )
    return cast("tuple[Any, Any]", found)
