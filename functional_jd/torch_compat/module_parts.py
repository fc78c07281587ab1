"""The parts of a module: where they hold tensors, and whether they are still the same."""

from collections import OrderedDict, defaultdict, deque
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn


class Place(NamedTuple):
    """The place of a tensor in a module."""

    home: dict[Any, Any]  # the parameters, or the buffers, of one part of the module
    name: str  # in `home`
    path: str  # the dotted name
    key: str  # the first of the dotted names of this tensor
    slot: tuple[int, str]  # what identifies the place


class ModuleParts:
    """The parts of a module, read once: places of tensors, embeddings, recurrent layers, and the ids of all parts."""

    def __init__(self, module: nn.Module):
        self.param_names = dict.fromkeys(name for name, _ in module.named_parameters())
        self.trained = [(name, x) for name, x in module.named_parameters() if x.requires_grad]
        self.buffer_names = [name for name, _ in module.named_buffers()]
        named = {id(x): name for name, x in (*module.named_parameters(), *module.named_buffers())}
        parts = dict(module.named_modules())
        self.ids = set(map(id, parts.values()))
        self.places = [
            Place(home, name, f"{path}.{name}" if path else name, named[id(x)], (id(home), name))
            for path, part in parts.items()
            for home in (part._parameters, part._buffers)  # pyright: ignore[reportPrivateUsage]
            for name, x in home.items()
            if x is not None
        ]
        self.embeddings = [
            (part, named[id(part.weight)])
            for part in parts.values()
            if isinstance(part, nn.Embedding | nn.EmbeddingBag) and id(part.weight) in named  # else it is computed
        ]
        self.recurrent = {
            named[id(x)] for part in parts.values() if isinstance(part, nn.RNNBase) for x in part.parameters(False)
        }
        ordinary = [part for part in parts.values() if not isinstance(part, torch.jit.ScriptModule)]
        self.attributes = [vars(part) for part in ordinary]
        are_torchs = [type(part).__module__.startswith("torch.nn.modules.") for part in ordinary]
        self.known = [own and _has_settings(x) and len(vars(x)) for own, x in zip(are_torchs, ordinary, strict=True)]
        self.ordinary = [
            (part, _contents(part), {name: x is not None for name, x in part._buffers.items()})  # pyright: ignore[reportPrivateUsage]
            for part in ordinary
        ]
        functions = [str(x.__module__) for part in parts.values() for x in vars(part).values() if callable(x)]
        whole = len(ordinary) == len(parts) and all(are_torchs)
        self.are_torchs = whole and all(name.startswith("torch.") for name in functions)

    def check(self, given: dict[str, Tensor]) -> None:
        """Raise if a part was changed or frozen, which what is given is not; or saves a new buffer: others go."""
        for name in [name for name, x in self.trained if not x.requires_grad and given[name].requires_grad]:
            found = f"functional: requires_grad of the module must stay as it was, found {name!r} frozen"
            raise ValueError(f"{found}, which does not freeze what is passed. Detach that, or freeze it before.")
        for part, contents, before in self.ordinary:
            home = part._buffers  # pyright: ignore[reportPrivateUsage]
            if _contents(part) != contents or not before.keys() <= home.keys():
                raise ValueError(
                    "functional: expected the module as it was when functional(module) was called, found other parts, "
                    f"parameters or buffers in its {type(part).__name__}. Call functional again."
                )
            for name in [name for name, x in home.items() if x is not None and not before.get(name)]:
                saved = name in part.state_dict()
                del home[name]
                if name in before:
                    home[name] = None
                if saved:
                    raise ValueError(
                        f"functional: forward must make no buffer, found a new one, {name!r} of {type(part).__name__}. "
                        "Register it with its shape, or call the module once before functional(module) and "
                        "dict(module.named_buffers()); if it can be computed again, with persistent=False."
                    )

    def run_once(self) -> bool:
        """Whether all parts are layers of torch without hooks: nothing runs again in a backward pass."""
        return self.are_torchs and not any(any(map(x.get, _HOOKS)) for x in self.attributes)

    def own_parameters(self) -> dict[str, Tensor]:
        """The parameters that the module has now, by name."""
        return {p.key: p.home[p.name] for p in self.places if p.key in self.param_names and p.name in p.home}

    def left_tensors(self) -> list[Tensor]:
        """The tensors in attributes of the parts, and in containers there."""
        changed = (x for x, known in zip(self.attributes, self.known, strict=True) if len(x) != known)
        return _tensors_in(x[name] for x in changed for name in {*x} - _STANDARD)


def _has_settings(part: nn.Module) -> bool:
    """Whether a layer of torch has only attributes that its class declares, without tensors: new ones hold those."""
    declared = {x for kind in type(part).__mro__ for at in _DECLARED for x in vars(kind).get(at, ())}
    own = {*vars(part)} - _STANDARD
    return own <= declared and not _tensors_in(map(vars(part).get, own))


def _contents(part: nn.Module) -> tuple[Any, ...]:
    return *part._parameters, *part._modules.values()  # pyright: ignore[reportPrivateUsage]


def _tensors_in(values: Iterable[Any]) -> list[Tensor]:
    """The tensors among values, and in containers. Long ones hold data, and take too long to search in every call."""
    found: list[Tensor] = []
    for x in values:
        if isinstance(x, Tensor) and x.__class__ is not nn.Parameter:  # tracers have classes of their own
            found.append(x)
        elif x.__class__ in _CONTAINERS and 0 < len(x) <= _LONG:
            found += _tensors_in(x.values() if isinstance(x, dict) else x)
    return found


_LONG, _DECLARED = 1000, ("__annotations__", "__constants__")
_CONTAINERS = frozenset((list, tuple, dict, OrderedDict, defaultdict, deque))
_STANDARD = frozenset(vars(nn.Module()))  # attributes of every module, which hold no tensors of the forward pass
_HOOKS = ["forward", *(name for name in _STANDARD if "forward" in name and name.endswith("hooks"))]
