"""Modules as pure functions of their parameters and buffers."""

from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Mapping, Set
from functools import partial
from types import MethodType
from typing import Any, NamedTuple, cast
from weakref import ref

import torch
from torch import Tensor, nn

from functional_jd.torch_compat.torch_internals import converts_as_usual, module_tensors

State = dict[str, Tensor]
"""Parameters or buffers by dotted name, as `named_parameters()` and `named_buffers()` name them."""


def functional(module: nn.Module) -> Callable[..., tuple[Any, State]]:
    """Turn a module into a pure function of its parameters and buffers.

    `output, buffers = apply(params, buffers, *args, **kwargs)`

    Args:
        module: the module. It is read when `functional` is called and when `apply` is called (its mode, its hooks), and
            never changed. Shared parameters and buffers have one name, the first.

    Returns:
        `apply(params, buffers, *args, **kwargs) -> (output, buffers)`. `params` and `buffers`: dicts of tensors like
        `dict(module.named_parameters())` and `dict(module.named_buffers())`; any shapes and dtypes that the module
        takes. The buffers that come back are new tensors: those of a normalisation layer have moved, others are copies.

    Raises:
        TypeError: `module` is not an `nn.Module`; `params` or `buffers` is not a dict of tensors.
        ValueError: names are missing or unknown.

    Laws:
        Pure: neither the module nor `params` and `buffers` change, not even during the call. Right where something runs
        the module again in the backward pass (`torch.utils.checkpoint`, adjoints). Composes with vmap, grad, jvp and
        compile, as far as the module does.

    Differs:
        From `torch.func.functional_call`, which puts tensors into the module for the time of the call: what runs again
        in the backward pass finds the module's own parameters there, and gradients are silently wrong. Here a shallow
        copy of the tree of modules, whose parameters are the arguments, is called; values that a module sets on itself
        while it runs stay in the copy, hooks and entries of its dicts and lists too. So do conversions (`to`, `float`)
        and the rows that an embedding with `max_norm` shortens.

    Example:
        >>> net = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
        >>> params, buffers = dict(net.named_parameters()), dict(net.named_buffers())
        >>> output, moved = functional(net)(params, buffers, torch.ones(5, 3))
        >>> int(moved["1.num_batches_tracked"]), int(net[1].num_batches_tracked)
        (1, 0)
    """
    if not isinstance(module, nn.Module):
        raise TypeError(f"functional: expected an nn.Module, found {type(module).__name__}. Pass the module itself.")
    param_names = [name for name, _ in module.named_parameters()]
    buffer_names = [name for name, _ in module.named_buffers()]
    parts, places, ids = list(module.modules()), _places(module), {id(p) for p in module.parameters()}

    def apply(params: State, buffers: State, *args: Any, **kwargs: Any) -> tuple[Any, State]:
        _check_names("params", params, param_names, "named_parameters")
        _check_names("buffers", buffers, buffer_names, "named_buffers")
        # Losses may change buffers in place; a module that runs again in the backward pass changes them once more.
        own = {name: buffers[name].detach().clone() for name in buffer_names}
        given = {name: params[name] for name in param_names} | own
        tensors = {place: given[name] for place, name in places.items()}
        pairs = [
            (x, tensors[id(part), name])
            for part in parts
            for kind in _KINDS
            for name, x in part.__dict__[kind].items()
            if (id(part), name) in tensors
        ]
        copy = _copy(module, _Copying(tensors, pairs, ids, {}))
        output = copy(*args, **kwargs)
        moved = {name: b.detach().clone() for name, b in copy.named_buffers() if name in own}
        return output, moved

    return apply


_KINDS = ("_parameters", "_buffers")


class _Copying(NamedTuple):
    """A tree of modules that is being copied.

    Attributes:
        tensors: those of the copy, by the id of the module that they stand in, and their name there.
        pairs: each tensor of the tree with that of the copy.
        ids: those of the parameters of the tree.
        copies: the modules copied so far, by id.
    """

    tensors: dict[tuple[int, str], Tensor]
    pairs: list[tuple[Tensor, Tensor]]
    ids: Set[int]
    copies: dict[int, nn.Module]


def _places(module: nn.Module) -> dict[tuple[int, str], str]:
    """The dotted name of every tensor of a tree, by the id of the module that it stands in, and its name there. The
    tensor itself may become another one: conversions and assignments replace buffers.
    """
    named = {id(x): name for name, x in (*module.named_parameters(), *module.named_buffers())}
    return {
        (id(part), name): named[id(x)]
        for part in module.modules()
        for tensors in module_tensors(part)
        for name, x in tensors.items()
        if x is not None
    }


def _copy(module: nn.Module, copying: _Copying) -> nn.Module:
    """A shallow copy of a tree of modules, with other tensors in the place of its parameters and buffers."""
    if id(module) in copying.copies:
        return copying.copies[id(module)]
    copy = copying.copies[id(module)] = module.__class__.__new__(module.__class__)
    state = copy.__dict__
    state.update(module.__dict__)
    for kind in _KINDS:
        tensors = module.__dict__[kind].items()
        state[kind] = {name: None if x is None else _replaced_at(module, name, x, copying) for name, x in tensors}
    if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.max_norm is not None:
        state["_parameters"]["weight"] = state["_parameters"]["weight"].clone()  # rows are shortened in place
    state["_modules"] = {
        name: None if child is None else _copy(child, copying) for name, child in module.__dict__["_modules"].items()
    }
    for name, value in module.__dict__.items():
        if name not in (*_KINDS, "_modules"):
            state[name] = _replaced(value, copying)
    if converts_as_usual(module) and not torch.compiler.is_compiling():
        state["_apply"] = partial(_convert, ref(copy))
    return copy


def _convert(copy: Any, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
    """What `to`, `float` and the like do to a copy while it runs: nn.Module's own would change the arguments."""
    module = copy()
    for child in module.children() if recurse else ():
        child._apply(fn)  # pyright: ignore[reportPrivateUsage]
    for tensors in module_tensors(module):
        tensors.update({name: fn(x) for name, x in tensors.items() if x is not None})
    return module


def _replaced_at(module: nn.Module, name: str, x: Tensor, copying: _Copying) -> Tensor:
    place = (id(module), name)
    return copying.tensors[place] if place in copying.tensors else _replaced(x, copying)


def _replaced(value: Any, copying: _Copying) -> Any:
    """What refers to the module's own tensors, or to modules of the tree, refers to those of the copy."""
    if isinstance(value, Tensor):
        # Not by id: torch.compile guards on ids, and a module may set a new tensor on itself whenever it runs.
        return next((new for old, new in copying.pairs if old is value), value)
    if isinstance(value, nn.Module):
        return _copy(value, copying) if all(id(p) in copying.ids for p in value.parameters()) else value
    if isinstance(value, MethodType) and isinstance(value.__self__, nn.Module):
        return partial(value.__func__, _replaced(value.__self__, copying))
    if isinstance(value, partial):
        return partial(
            _replaced(value.func, copying),
            *(_replaced(x, copying) for x in value.args),
            **{name: _replaced(x, copying) for name, x in value.keywords.items()},
        )
    if type(value) in (list, tuple):  # such as the flat weights of recurrent layers
        elements: Any = cast(Any, value)
        return type(elements)([_replaced(x, copying) for x in elements])
    if type(value) in _MUTABLE:  # such as hooks, which a module may add when it first runs
        container: Any = cast(Any, value)
        own = container.copy()
        if isinstance(own, dict):
            own.update({name: _replaced(x, copying) for name, x in container.items()})
        return own
    return value


_MUTABLE = (OrderedDict, dict, defaultdict, set, deque)


def _check_names(what: str, given: Any, names: Any, method: str) -> None:
    if not isinstance(given, Mapping) or not all(isinstance(x, Tensor) for x in given.values()):
        found = type(given).__name__ if not isinstance(given, Mapping) else "a dict with other values"
        raise TypeError(
            f"functional: {what} must be a dict of tensors by name, found {found}. Start with dict(module.{method}())."
        )
    missing, unknown = sorted(set(names) - set(given)), sorted(set(given) - set(names))
    if missing or unknown:
        raise ValueError(
            f"functional: {what} must have the names of module.{method}(), found {missing[:5]} missing and "
            f"{unknown[:5]} unknown. If some parameters are constants, pass merge(trained, constant)."
        )
