"""Adapters that turn optimizers of other libraries into an `Optimizer`: classes of `torch.optim`, optax-style pairs."""

import inspect
from itertools import starmap
from typing import Any, NamedTuple

import torch
from torch import Tensor

from functional_jd.core.arguments import refuse
from functional_jd.core.record_display import displayed_as, outline
from functional_jd.core.sharding import shard_of, sharded_as
from functional_jd.core.tree import any_sharded, floating_leaves, tree_leaves, tree_map
from functional_jd.core.types import Direction, Params, Tree
from functional_jd.optimizers.base import (
    Optimizer,
    check_settings,
    copy_with_strides,
    current_rate,
    in_dtypes_of,
    no_steps,
    on_shards,
)
from functional_jd.torch_compat.torch_internals import has_values, under_functorch, version

_ENTRYWISE = "SGD", "Adam", "AdamW", "NAdam", "RAdam", "Adamax", "Adagrad", "Adadelta", "RMSprop", "Rprop", "ASGD"
"""The classes of torch.optim that update every entry by itself, so that shards may be updated one by one."""

_COUNTS_ON_HOST = ("cpu", "mps", "meta")
"""The types of devices on which classes of torch.optim do not take `capturable=True`."""


@displayed_as(outline)
class TorchState(NamedTuple):
    """The state of `from_torch`.

    Attributes:
        steps: int64 `[]`, the number of steps taken.
        entries: one dict of tensors per leaf of params, as in `torch.optim.Optimizer.state`.
    """

    steps: Tensor
    entries: Tree


def from_torch(cls: type[torch.optim.Optimizer], **hyper: Any) -> Optimizer:
    """Turn a class of `torch.optim` into a pair of pure functions; every step equals that of the class.

    The first step of a class may differ from later ones (momentum with dampening). So `update` computes both on copies,
    and selects one with `where`. It costs two steps; `sgd` and `adamw` cost one.

    Args:
        cls: a class such as `torch.optim.Adam`; all tensors that it changes must be in its `state`.
        hyper: its keyword arguments, the same for all leaves; `by_label` makes groups. `lr` is a number, a tensor `[]`,
            or a schedule of the number of steps taken so far; no other is a tensor. On an accelerator,
            `capturable=True` keeps step count and rate on the device; classes without it read a rate that is a tensor.

    Returns:
        An `Optimizer` with `TorchState`. Its results do not require grad.

    Raises:
        TypeError: in `init`, a class that keeps other state than tensors, or changes its param groups; what it raises.
        ValueError: under a `torch.func` transform; with sharded parameters, a class that looks at whole tensors, such
            as Adafactor; float16 parameters of Adam, whose eps is zero there.

    Guarantees:
        Compiles with a graph break.

    Example:
        >>> warmed_up = from_torch(torch.optim.RAdam, lr=lambda steps: 1e-3 * ((steps + 1) / 100).clamp(max=1))
    """
    given: Any = cls
    if not (isinstance(given, type) and issubclass(given, torch.optim.Optimizer)):
        cure = "Pass the class and its settings: from_torch(torch.optim.Adam, lr=1e-3)."
        refuse("cls", "a class of torch.optim", given, cure)
    schedule: Any = hyper.get("lr", 0.0)
    check_settings(lr=schedule)
    for setting, value in hyper.items():
        if setting != "lr" and any(isinstance(part, Tensor) for part in tree_leaves(value)):  # pyright: ignore[reportUnnecessaryIsInstance]
            refuse(setting, "without tensors", value, "A tensor may stand for lr only.")
    scheduled = isinstance(schedule, Tensor) or callable(schedule)
    if scheduled:
        hyper = hyper | {"lr": 1.0}  # the constructors compare the rate with zero, which would wait for the device

    def init(params: Params) -> TorchState:
        whole, _ = floating_leaves(params)
        if any_sharded(whole) and cls not in [getattr(torch.optim, name) for name in _ENTRYWISE]:
            expected = "a class that updates every entry by itself, for sharded parameters"
            refuse("cls", expected, cls, f"Use one of {', '.join(_ENTRYWISE)}, or adamw and sgd.", ValueError)
        leaves = list(map(shard_of, whole))
        steps, zeros = no_steps(params), [torch.zeros_like(leaf) for leaf in leaves]
        rate = _rate(schedule, steps) if scheduled else None
        optimizer = _instance(cls, hyper, rate, leaves, zeros, [{} for _ in leaves])
        entries = _stepped(optimizer)
        for x in optimizer.param_groups[0]["params"]:  # of a direction of zero
            if x.dtype == torch.float16 and has_values(x) and not x.isfinite().all():
                refuse("params", "of a dtype in which eps is not zero", x, "Keep them in float32.", ValueError)
        return TorchState(steps, tuple(starmap(_sharded_entry, zip(entries, whole, strict=True))))

    def update(direction: Direction, state: TorchState, params: Params) -> tuple[Params, TorchState]:
        leaves, structure = floating_leaves(params)
        if any_sharded(leaves):
            return on_shards(update, direction, state, params)
        gradients = tree_leaves(in_dtypes_of(direction, params))
        rate = _rate(schedule, state.steps) if scheduled else None
        results: list[Any] = []
        for entries in ([{} for _ in leaves], state.entries):
            optimizer = _instance(cls, hyper, rate, leaves, gradients, entries)
            results.append((optimizer.param_groups[0]["params"], tuple(_stepped(optimizer))))

        def select(first: Tensor, later: Tensor) -> Tensor:
            return torch.where((state.steps > 0).to(later.device), later, first)

        new_leaves, entries = tree_map(select, *results)
        return structure.unflatten(new_leaves), TorchState(state.steps + 1, entries)

    eager: Any = torch.compiler.disable(update, reason="torch.optim creates its state in its first step")
    return Optimizer(init, eager)


def from_transformation(transformation: Any) -> Optimizer:
    """Turn an optax-style pair of pure functions, such as one of TorchOpt, into an `Optimizer`.

    `updates, state = transformation.update(direction, state, params=params)`, `params + updates`.

    Args:
        transformation: has `init(params) -> state`, of tensors, and `update(updates, state, params)`, which returns
            updates and state; its argument `inplace` is False. An update of `None` leaves its parameter unchanged.

    Returns:
        An `Optimizer` with the state of the transformation. It composes with what the transformation composes with.

    Example:
        >>> import torchopt
        >>> optimizer = from_transformation(torchopt.adam(lr=1e-3))
    """
    if not (callable(getattr(transformation, "init", None)) and callable(getattr(transformation, "update", None))):
        expected, cure = "an object with functions init and update", "Pass classes of torch.optim to from_torch."
        refuse("transformation", expected, transformation, cure)
    options = {"inplace": False} if "inplace" in inspect.signature(transformation.update).parameters else {}

    def update(direction: Direction, state: Tree, params: Params) -> tuple[Params, Tree]:
        updates, state = transformation.update(direction, state, params=params, **options)
        return tree_map(lambda p, u: p if u is None else (p + u).to(p.dtype), params, updates), state

    return Optimizer(transformation.init, update)


def _rate(lr: Any, steps: Tensor) -> Any:
    """Return the learning rate of this step: a number, if no device has to be waited for."""
    rate = current_rate(lr, steps)
    if isinstance(rate, Tensor) and not under_functorch():
        return rate.item() if rate.is_cpu else rate.float()  # fused kernels take no other dtype
    return rate


def _instance(
    cls: Any, hyper: dict[str, Any], rate: Any, params: list[Tensor], gradients: list[Tensor], entries: Any
) -> Any:
    """Return an instance of the class with copies of the parameters, gradients and state, at this learning rate."""
    if under_functorch():
        raise ValueError("from_torch: torch.optim must be outside of transforms, found torch.func. Take sgd or adamw.")
    copies = [leaf.detach().clone() for leaf in params]
    # Else the count of steps is a number of the host, which waits for it. But its powers are then of float32.
    may = params[0].device.type not in _COUNTS_ON_HOST and params[0].dtype != torch.float64
    if may and "capturable" in inspect.signature(cls).parameters:
        hyper = {"capturable": True} | hyper
    optimizer = cls(copies, **hyper)
    if rate is not None:
        optimizer.param_groups[0]["lr"] = rate  # as a scheduler of torch does
    for copy, gradient, entry in zip(copies, gradients, entries, strict=True):
        copy.grad = copy_with_strides(gradient.detach(), copy)
        if entry:  # without one, that of the class: some create it at once, most in their first step
            optimizer.state[copy] = {key: copy_with_strides(value.detach(), copy) for key, value in entry.items()}
    return optimizer


def _sharded_entry(entry: dict[str, Any], leaf: Tensor) -> dict[str, Any]:
    """The state of one leaf: a tensor with the shape of its shard is sharded like it."""
    return {key: sharded_as(x, leaf) if x.shape == shard_of(leaf).shape else x for key, x in entry.items()}


def _stepped(optimizer: Any) -> list[dict[str, Any]]:
    """The state of each parameter after a step, which may change nothing else; raise if it does."""
    before = _settings(optimizer)
    optimizer.step()
    entries = [dict(optimizer.state[leaf]) for leaf in optimizer.param_groups[0]["params"]]
    unsupported = {key for entry in entries for key, value in entry.items() if not isinstance(value, Tensor)}
    unsupported |= {key for key, _ in before ^ _settings(optimizer)}
    if unsupported or len(optimizer.state) > len(entries):
        raise TypeError(
            f"from_torch: the state of {type(optimizer).__name__} must be one dict of tensors per parameter, found "
            f"other values or changes in {sorted(unsupported) or 'its state'}. Use another class, or write your own."
        )
    return entries


def _settings(optimizer: Any) -> set[tuple[str, Any]]:
    """The settings of the groups, tensors by their changes in place, and the numbers of the optimizer itself."""
    numbers = {key: x for key, x in vars(optimizer).items() if key[0] != "_" and isinstance(x, int | float | tuple)}
    parts = [*({**group, "params": None} for group in optimizer.param_groups), numbers]
    return {(key, repr((id(x), version(x)) if isinstance(x, Tensor) else x)) for own in parts for key, x in own.items()}
