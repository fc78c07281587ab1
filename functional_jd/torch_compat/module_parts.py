"""The parts of a module: where they hold tensors, and whether they are still the same."""

from collections import OrderedDict, defaultdict, deque
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from functional_jd.torch_compat.torch_internals import module_tensors


class Place(NamedTuple):
    """The place of a tensor in a module."""

    home: dict[str, Any]  # the parameters, or the buffers, of one part of the module
    name: str  # in `home`
    path: str  # the dotted name
    key: str  # the first of the dotted names of this tensor
    slot: tuple[int, str]  # what identifies the place


class ModuleParts:
    """The parts of a module, read once: where its tensors stand, at several places if they are shared; its embeddings,
    with the names of their weights; the names of the parameters of recurrent layers; and the ids of all parts.
    """

    def __init__(self, module: nn.Module):
        self.param_names = [name for name, _ in module.named_parameters()]
        self.buffer_names = [name for name, _ in module.named_buffers()]
        named = {id(x): name for name, x in (*module.named_parameters(), *module.named_buffers())}
        parts = dict(module.named_modules())
        self.ids = set(map(id, parts.values()))
        self.places = [
            Place(home, name, f"{path}.{name}" if path else name, named[id(x)], (id(home), name))
            for path, part in parts.items()
            for home in module_tensors(part)
            for name, x in home.items()
            if x is not None
        ]
        self.embeddings = [
            (part, named[id(part.weight)])
            for part in parts.values()
            if isinstance(part, nn.Embedding | nn.EmbeddingBag)
        ]
        self.recurrent = {
            named[id(x)] for part in parts.values() if isinstance(part, nn.RNNBase) for x in part.parameters(False)
        }
        ordinary = [part for part in parts.values() if not isinstance(part, torch.jit.ScriptModule)]
        self.attributes = [vars(part) for part in ordinary]
        self.contents = [(part, _contents(part)) for part in ordinary]
        functions = [x.__module__ for part in parts.values() for x in vars(part).values() if callable(x)]
        layers = all(type(part).__module__.startswith("torch.nn.modules.") for part in parts.values())
        self.are_torchs = layers and all(str(name).startswith("torch.") for name in functions)
        self.buffers = [
            (part, home, set(home), {name for name, x in home.items() if x is not None})
            for part in ordinary
            for home in module_tensors(part)[1:]
        ]

    def check(self) -> None:
        """Raise if a part has other parameters or children than when it was read, or new buffers."""
        for part, contents in self.contents:
            if _contents(part) != contents:
                raise ValueError(
                    "functional: expected the module as it was when functional(module) was called, found other parts "
                    f"or parameters in its {type(part).__name__}. Call functional again."
                )
        for part, home, registered, known in self.buffers:
            if len(home) > len(known):
                for name in [name for name, x in home.items() if x is not None and name not in known]:
                    _take_back(part, name, name in registered)

    def run_once(self) -> bool:
        """Whether all parts are layers of torch without hooks: nothing runs again in a backward pass."""
        return self.are_torchs and not any(any(map(x.get, _HOOKS)) for x in self.attributes)

    def own_parameters(self) -> dict[str, Tensor]:
        """The parameters that the module has now, by name."""
        names = set(self.param_names)
        return {place.key: place.home[place.name] for place in self.places if place.key in names}

    def left_tensors(self) -> list[Tensor]:
        """The tensors in attributes of the parts, and in containers there."""
        found: list[Tensor] = []
        for attributes in self.attributes:
            for name in attributes.keys() - _STANDARD:  # what every module has holds no tensors of the forward pass
                value = attributes[name]
                if value.__class__ is Tensor:
                    found.append(value)
                elif value.__class__ in _CONTAINERS and value:
                    found += _tensors_in(value)
        return found


def _contents(part: nn.Module) -> tuple[int, tuple[Any, ...]]:
    parameters, _ = module_tensors(part)
    return len(parameters), tuple(part._modules.values())  # pyright: ignore[reportPrivateUsage]


def _take_back(part: nn.Module, name: str, registered: bool) -> None:
    """Take a new buffer from a part, as no call would find it. One that is not saved is computed again in each call."""
    saved = name in part.state_dict()
    if registered:
        setattr(part, name, None)
    else:
        delattr(part, name)
    if saved:
        raise ValueError(
            "functional: expected a forward that leaves the module with the buffers that it had, found a new one, "
            f"{name!r} of {type(part).__name__}, which the next call would not find. Register it with its "
            "shape, or call the module once before functional(module) and dict(module.named_buffers()); if it can "
            "be computed again, with persistent=False."
        )


def _tensors_in(container: Any) -> list[Tensor]:
    """The tensors in a container. Long ones hold data, and take too long to search in every call."""
    found: list[Tensor] = []
    for each in () if len(container) > _LONG else container.values() if isinstance(container, dict) else container:
        if each.__class__ is Tensor:
            found.append(each)
        elif each.__class__ in _CONTAINERS:
            found += _tensors_in(each)
    return found


_LONG = 1000
_CONTAINERS = frozenset((list, tuple, dict, OrderedDict, defaultdict, deque))
_STANDARD = frozenset(vars(nn.Module()))
_HOOKS = ["forward", *(name for name in _STANDARD if "forward" in name and name.endswith("hooks"))]
