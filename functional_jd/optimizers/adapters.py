"""Optimizers of others as pairs of pure functions: any class of `torch.optim`, any optax-style pair."""

import inspect
from typing import Any, NamedTuple

import torch
from torch import Tensor

from functional_jd.core.record_display import displayed_as, outline
from functional_jd.core.torch_internals import under_functorch
from functional_jd.core.tree import floating_leaves, tree_leaves, tree_map, tree_unflatten
from functional_jd.core.types import Direction, Params, Tree
from functional_jd.optimizers.base import Optimizer, copy_with_strides, in_dtypes_of


@displayed_as(outline)
class TorchState(NamedTuple):
    """What `from_torch` remembers.

    Attributes:
        started: bool `[]`, whether a step was taken.
        entries: one dict of tensors per leaf of params, as `torch.optim.Optimizer.state` holds it.
    """

    started: Tensor
    entries: Tree


def from_torch(cls: type[torch.optim.Optimizer], **hyper: Any) -> Optimizer:
    """Any class of `torch.optim` as a pair of pure functions, step by step what the class does.

    Torch makes the state in the first step, which may differ from all others (momentum with dampening). So that the
    structure never changes and nothing is read back from the device, `update` takes both a first and a later step on
    copies and picks one by `where`: it costs two steps of the class. `sgd` and `adamw` cost one.

    Args:
        cls: a class such as `torch.optim.Adam`; all its tensors that change must be in its `state`.
        hyper: its keyword arguments, for all leaves alike. On an accelerator, `capturable=True` keeps the step count
            there, for the classes that know the word.

    Returns:
        An `Optimizer` with `TorchState`. What it returns does not require grad.

    Raises:
        TypeError: the class needs a closure (LBFGS), or it keeps something other than tensors, or changes its groups.
        ValueError: called under a `torch.func` transform.

    Laws:
        Pure. Refuses vmap, grad and jvp, since `torch.optim` works in place; compiles with a graph break.

    Example:
        >>> optimizer = from_torch(torch.optim.Adam, lr=1e-3)
    """
    name = cls.__name__
    closure = inspect.signature(cls.step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise TypeError(
            f"from_torch: expected a class that steps along a given direction, found {name}, which evaluates the "
            "losses in its step. Take one without a closure, such as torch.optim.Adam."
        )

    def init(params: Params) -> TorchState:
        leaves, _ = floating_leaves(params, "from_torch")
        optimizer = _loaded(cls, hyper, leaves, [torch.zeros_like(leaf) for leaf in leaves], [{} for _ in leaves])
        before = [_settings(group) for group in optimizer.param_groups]
        optimizer.step()
        entries = _entries(optimizer)
        strangers = {key for entry in entries for key, value in entry.items() if not isinstance(value, Tensor)}
        if before != [_settings(group) for group in optimizer.param_groups]:
            strangers.add("param_groups")
        if strangers or len(optimizer.state) > len(leaves):
            raise TypeError(
                f"from_torch: all that {name} remembers must be tensors in its state, one dict per parameter, found "
                f"other things in {sorted(strangers) or 'its state'}. Take another class, or write init and update."
            )
        return TorchState(torch.zeros((), dtype=torch.bool, device=leaves[0].device), tuple(entries))

    def update(direction: Direction, state: TorchState, params: Params) -> tuple[Params, TorchState]:
        leaves, structure = floating_leaves(params, "from_torch")
        towards = tree_leaves(in_dtypes_of(direction, params))
        outcomes: list[Any] = []
        for entries in ([{} for _ in leaves], state.entries):
            optimizer = _loaded(cls, hyper, leaves, towards, entries)
            optimizer.step()
            outcomes.append((optimizer.param_groups[0]["params"], tuple(_entries(optimizer))))

        def pick(first: Tensor, later: Tensor) -> Tensor:
            return torch.where(state.started.to(later.device), later, first)

        moved, entries = tree_map(pick, *outcomes)
        return tree_unflatten(structure, moved), TorchState(torch.ones_like(state.started), entries)

    eager: Any = torch.compiler.disable(update, reason="torch.optim makes its state while it runs")
    return Optimizer(init, eager)


def from_transformation(transformation: Any) -> Optimizer:
    """Any optax-style pair of pure functions, such as TorchOpt's, as an `Optimizer`.

    `updates, state = transformation.update(direction, state, params=params)`, `params + updates`.

    Args:
        transformation: has `init(params) -> state` and `update(updates, state, params) -> (updates, state)`; where
            `update` knows the word `inplace`, it is False. An update that is `None` leaves its parameter.

    Returns:
        An `Optimizer` with the state of the transformation.

    Raises:
        TypeError: there is no `init` or no `update`.

    Laws:
        Pure, and composes with vmap, grad, jvp and compile, as far as the transformation does.

    Example:
        >>> optimizer = from_transformation(torchopt.adam(lr=1e-3))
    """
    if not (callable(getattr(transformation, "init", None)) and callable(getattr(transformation, "update", None))):
        raise TypeError(
            "from_transformation: expected an object with functions init and update, found "
            f"{type(transformation).__name__}. Classes of torch.optim go into from_torch."
        )
    keywords = inspect.signature(transformation.update).parameters
    options = {"inplace": False} if "inplace" in keywords else {}

    def update(direction: Direction, state: Tree, params: Params) -> tuple[Params, Tree]:
        updates, state = transformation.update(direction, state, params=params, **options)
        return tree_map(lambda p, u: p if u is None else (p + u).to(p.dtype), params, updates), state

    return Optimizer(transformation.init, update)


def _loaded(cls: Any, hyper: dict[str, Any], params: list[Tensor], direction: list[Tensor], entries: Any) -> Any:
    """An instance of the class that holds copies of everything."""
    if under_functorch():
        raise ValueError(
            "from_torch: expected no transform, since torch.optim works in place, found one of torch.func (vmap, grad, "
            "jvp, ...). Take sgd, adamw or from_transformation, which compose with all of them."
        )
    copies = [leaf.detach().clone() for leaf in params]
    optimizer = cls(copies, **hyper)
    for copy, towards, entry in zip(copies, direction, entries, strict=True):
        copy.grad = copy_with_strides(towards.detach(), copy)
        optimizer.state[copy] = {key: copy_with_strides(value.detach(), copy) for key, value in entry.items()}
    return optimizer


def _entries(optimizer: Any) -> list[dict[str, Any]]:
    return [dict(optimizer.state[leaf]) for leaf in optimizer.param_groups[0]["params"]]


def _settings(group: dict[str, Any]) -> dict[str, Any]:
    return {key: repr(value) for key, value in group.items() if key != "params"}
