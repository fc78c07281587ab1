"""Adapters that turn optimizers of other libraries into an `Optimizer`: classes of `torch.optim`, optax-style pairs."""

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
    """The state of `from_torch`.

    Attributes:
        started: bool `[]`, whether a step was taken.
        entries: one dict of tensors per leaf of params, as in `torch.optim.Optimizer.state`.
    """

    started: Tensor
    entries: Tree


def from_torch(cls: type[torch.optim.Optimizer], **hyper: Any) -> Optimizer:
    """Turn a class of `torch.optim` into a pair of pure functions; every step equals that of the class.

    A class of `torch.optim` creates its state in the first step, which may differ from later ones (momentum with
    dampening). To keep the structure constant without reading values from the device, `update` computes both a first
    and a later step on copies and selects one with `where`. It costs two steps; `sgd` and `adamw` cost one.

    Args:
        cls: a class such as `torch.optim.Adam`; all tensors that it changes must be in its `state`.
        hyper: its keyword arguments, the same for all leaves. On an accelerator, `capturable=True` keeps the step count
            on the device, for classes that support it.

    Returns:
        An `Optimizer` with `TorchState`. Its results do not require grad.

    Raises:
        TypeError: the class needs a closure (LBFGS), keeps state that is not a tensor, or changes its param groups.
        ValueError: called under a `torch.func` transform.

    Laws:
        Pure. Refuses vmap, grad and jvp, because `torch.optim` works in place. Compiles with a graph break.

    Example:
        >>> optimizer = from_torch(torch.optim.Adam, lr=1e-3)
    """
    name = cls.__name__
    closure = inspect.signature(cls.step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise TypeError(
            f"from_torch: expected a class whose step needs no closure, found {name}, which evaluates the losses in "
            "its step. Use a class such as torch.optim.Adam."
        )

    def init(params: Params) -> TorchState:
        leaves, _ = floating_leaves(params, "from_torch")
        optimizer = _instance(cls, hyper, leaves, [torch.zeros_like(leaf) for leaf in leaves], [{} for _ in leaves])
        before = [_settings(group) for group in optimizer.param_groups]
        optimizer.step()
        entries = _entries(optimizer)
        unsupported = {key for entry in entries for key, value in entry.items() if not isinstance(value, Tensor)}
        if before != [_settings(group) for group in optimizer.param_groups]:
            unsupported.add("param_groups")
        if unsupported or len(optimizer.state) > len(leaves):
            raise TypeError(
                f"from_torch: the state of {name} must be one dict of tensors per parameter, found other values or "
                f"changes in {sorted(unsupported) or 'its state'}. Use another class, or write init and update."
            )
        return TorchState(torch.zeros((), dtype=torch.bool, device=leaves[0].device), tuple(entries))

    def update(direction: Direction, state: TorchState, params: Params) -> tuple[Params, TorchState]:
        leaves, structure = floating_leaves(params, "from_torch")
        gradients = tree_leaves(in_dtypes_of(direction, params))
        results: list[Any] = []
        for entries in ([{} for _ in leaves], state.entries):
            optimizer = _instance(cls, hyper, leaves, gradients, entries)
            optimizer.step()
            results.append((optimizer.param_groups[0]["params"], tuple(_entries(optimizer))))

        def select(first: Tensor, later: Tensor) -> Tensor:
            return torch.where(state.started.to(later.device), later, first)

        new_leaves, entries = tree_map(select, *results)
        return tree_unflatten(structure, new_leaves), TorchState(torch.ones_like(state.started), entries)

    eager: Any = torch.compiler.disable(update, reason="torch.optim creates its state in its first step")
    return Optimizer(init, eager)


def from_transformation(transformation: Any) -> Optimizer:
    """Turn an optax-style pair of pure functions, such as one of TorchOpt, into an `Optimizer`.

    `updates, state = transformation.update(direction, state, params=params)`, `params + updates`.

    Args:
        transformation: has `init(params) -> state` and `update(updates, state, params) -> (updates, state)`; if
            `update` has an argument `inplace`, it is False. An update of `None` leaves its parameter unchanged.

    Returns:
        An `Optimizer` with the state of the transformation.

    Raises:
        TypeError: there is no `init` or no `update`.

    Laws:
        Pure, and composes with vmap, grad, jvp and compile, if the transformation does.

    Example:
        >>> optimizer = from_transformation(torchopt.adam(lr=1e-3))
    """
    if not (callable(getattr(transformation, "init", None)) and callable(getattr(transformation, "update", None))):
        raise TypeError(
            "from_transformation: expected an object with functions init and update, found "
            f"{type(transformation).__name__}. Pass classes of torch.optim to from_torch."
        )
    keywords = inspect.signature(transformation.update).parameters
    options = {"inplace": False} if "inplace" in keywords else {}

    def update(direction: Direction, state: Tree, params: Params) -> tuple[Params, Tree]:
        updates, state = transformation.update(direction, state, params=params, **options)
        return tree_map(lambda p, u: p if u is None else (p + u).to(p.dtype), params, updates), state

    return Optimizer(transformation.init, update)


def _instance(cls: Any, hyper: dict[str, Any], params: list[Tensor], gradients: list[Tensor], entries: Any) -> Any:
    """Return an instance of the class with copies of the parameters, gradients and state."""
    if under_functorch():
        raise ValueError(
            "from_torch: expected no transform, since torch.optim works in place, found one of torch.func (vmap, grad, "
            "jvp, ...). Use sgd, adamw or from_transformation, which compose with all of them."
        )
    copies = [leaf.detach().clone() for leaf in params]
    optimizer = cls(copies, **hyper)
    for copy, gradient, entry in zip(copies, gradients, entries, strict=True):
        copy.grad = copy_with_strides(gradient.detach(), copy)
        optimizer.state[copy] = {key: copy_with_strides(value.detach(), copy) for key, value in entry.items()}
    return optimizer


def _entries(optimizer: Any) -> list[dict[str, Any]]:
    return [dict(optimizer.state[leaf]) for leaf in optimizer.param_groups[0]["params"]]


def _settings(group: dict[str, Any]) -> dict[str, Any]:
    return {key: repr(value) for key, value in group.items() if key != "params"}
