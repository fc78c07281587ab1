"""The modules of a tree with other tensors in their places, for a time: however a layer is reached, it finds them."""

from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable
from functools import partial
from itertools import chain
from threading import RLock, _DummyThread, current_thread  # pyright: ignore[reportPrivateUsage]
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor, nn

from functional_jd.torch_compat.noticing import RunsAgain
from functional_jd.torch_compat.private_names import missing
from functional_jd.torch_compat.torch_internals import module_tensors, untraced


class _Part(NamedTuple):
    """A module of a tree, as it was read.

    Attributes:
        module: the module.
        params, buffers: the names of its own tensors, each with that in the tree.
        blank: the names of parameters that it does not have.
        children: its children, None included.
        attributes: the names of what it holds beside what every module holds.
        size: how many attributes it has in all.
        convert: what takes the place of its `_apply`, which would change the tensors that it is given; or None.
    """

    module: nn.Module
    params: list[tuple[str, str]]
    buffers: list[tuple[str, str]]
    blank: list[str]
    children: tuple[Any, ...]
    attributes: list[str]
    size: int
    convert: Callable[..., Any] | None


class Contents(NamedTuple):
    """What the modules of a tree hold.

    Attributes:
        states: each module with its attributes, in the order of the parts, and with those that it has otherwise.
        held: each list, dict, set and deque in them with what is in it.
        slots: of scripted modules: the tensors by name, the name, and the tensor.
    """

    states: list[tuple[nn.Module, dict[str, Any], dict[str, Any]]]
    held: list[tuple[Any, Any]]
    slots: list[tuple[Any, str, Tensor]]


class ModuleTree:
    """A module and all its parts, read once.

    Modules that are not registered count as parts where all their parameters are those of the tree.
    """

    @untraced  # where a graph breaks
    def __init__(self, module: nn.Module):
        named = {id(x): name for name, x in (*module.named_parameters(), *module.named_buffers())}
        modules = _with_hidden(module)
        self.ids = {id(part) for part in modules}
        self.parts = [_part(x, named) for x in modules if not isinstance(x, torch.jit.ScriptModule)]
        # The tensors of scripted modules are not among their attributes: by name, the name, that in the tree, and
        # whether it is a buffer.
        self.scripted = [
            (tensors, name, named[id(tensors[name])], bool(kind))
            for x in modules
            if isinstance(x, torch.jit.ScriptModule)
            for kind, tensors in enumerate(module_tensors(x))
            for name in tensors.keys()  # noqa: SIM118 - not a dict
            if tensors[name] is not None
        ]
        # Hooks are added to dicts that are mostly empty, and remain the same ones.
        self.hooks = [
            part.module.__dict__[name] for part in self.parts for name in _HOOKS if name in part.module.__dict__
        ]
        self.embeddings = [
            (part.module, part.params[0][1])
            for part in self.parts
            if isinstance(part.module, (nn.Embedding, nn.EmbeddingBag)) and part.params
        ]
        self.recurrent = {name for part in self.parts if isinstance(part.module, nn.RNNBase) for _, name in part.params}
        self.lock = RLock()

    def holding(self, given: dict[str, Tensor]) -> Contents:
        """What the tree holds, with these tensors by name in all of their places."""
        contents = Contents([], [(hooks, hooks.copy()) for hooks in filter(None, self.hooks)], [])
        reading = _Reading(self.parts, given, contents.held)
        for part in self.parts:
            module, params, buffers, blank, children, attributes, size, convert = part
            own = module.__dict__
            state = own.copy()
            tensors = state["_parameters"] = own["_parameters"].copy()
            modules = state["_modules"] = own["_modules"].copy()
            if len(tensors) != len(params) or blank or tuple(modules.values()) != children:
                check_part(part, own)
            for name, key in params:
                tensors[name] = given[key]
            others = state["_buffers"] = own["_buffers"].copy()
            for name, key in buffers:
                others[name] = given[key]
            if convert is not None:
                state["_apply"] = convert
            if len(own) != size:  # it has set something on itself since
                attributes = _attributes(own)
            for name in attributes:
                if state[name].__class__ in HOLDERS:
                    state[name] = reading.read(state[name])
            contents.states.append((module, state, own))
        for tensors, name, key, _ in self.scripted:
            contents.slots.append((tensors, name, given[key]))
        return contents

    def held_now(self) -> Contents:
        """What the tree holds, apart from later changes."""
        contents = Contents([], [(hooks, hooks.copy()) for hooks in filter(None, self.hooks)], [])
        reading = _Reading(self.parts, None, contents.held)
        for part in self.parts:
            state = part.module.__dict__
            for name in _attributes(state):
                if state[name].__class__ in HOLDERS:
                    reading.read(state[name])
            contents.states.append((part.module, _copied(state), {}))  # `state` itself may come to hold the graph
        contents.slots.extend((tensors, name, tensors[name]) for tensors, name, *_ in self.scripted)
        return contents

    def after(self, contents: Contents, given: dict[str, Tensor]) -> tuple[str | None, dict[str, Tensor]]:
        """Once the module has run: the name of a parameter that it has replaced, and its buffers."""
        buffers: dict[str, Tensor] = {}
        for part, (_, state, _) in zip(self.parts, contents.states, strict=True):
            tensors = state["_parameters"]
            for name, key in part.params:
                # A conversion puts another tensor there, which is no Parameter.
                if (x := tensors.get(name)) is not given[key] and (x is None or isinstance(x, nn.Parameter)):
                    return key, buffers
            for name, key in part.buffers:
                if key not in buffers and (x := state["_buffers"].get(name)) is not None:
                    buffers[key] = x
            if len(state["_buffers"]) > len(part.buffers):
                _refuse_new_buffers(part, state)
        buffers |= {key: tensors[name] for tensors, name, key, is_buffer in self.scripted if is_buffer}
        return None, buffers

    def replaced(self, given: dict[str, Tensor]) -> dict[str, Tensor]:
        """The modules' own parameters, by name, that are not those which were given."""
        own = {key: module_tensors(part.module)[0][name] for part in self.parts for name, key in part.params}
        return {key: x for key, x in own.items() if x is not given[key]}


class Filled(RunsAgain):
    """A context in which the modules of a tree hold something else. Whatever runs again in a backward pass finds what
    they held when it began. Threads wait for one another.

    Args:
        tree: the modules.
        contents: what they hold meanwhile.
    """

    def __init__(self, tree: ModuleTree, contents: Contents):
        self.tree, self.contents = tree, contents
        self.runs_again = False

    def again(self) -> Callable[[], "Filled"]:
        """What makes the context of what begins now, when it runs again."""
        self.runs_again = True
        return partial(FilledAgain, self.tree, self.tree.held_now())

    def __enter__(self) -> Self:
        self.tree.lock.acquire()
        try:
            self.fill()
        except BaseException:
            self.put_back()
            self.tree.lock.release()
            raise
        return super().__enter__()

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)
        self.put_back()
        self.tree.lock.release()

    def fill(self) -> None:
        """Give the modules what they hold meanwhile."""
        states, held, slots = self.contents
        self.held = [(container, container.copy()) for container, _ in held]
        self.slots = [(tensors, name, tensors[name]) for tensors, name, _ in slots]
        for module, state, _ in states:
            _set(module, "__dict__", state)
        _refill(held, slots)

    def put_back(self) -> None:
        """Give the modules back what they held."""
        added = [*filter(None, self.tree.hooks)]
        for module, _, own in self.contents.states:
            _set(module, "__dict__", own)
        _refill(self.held, self.slots)
        if added:
            known = {id(container) for container, _ in self.held}
            for hooks in added:
                if id(hooks) not in known:
                    hooks.clear()


class FilledAgain(Filled):
    """The same in a backward pass."""

    def __enter__(self) -> Self:
        # With a copy: what runs again may change it, and runs again once more.
        states = [(module, _copied(state), module.__dict__) for module, state, _ in self.contents.states]
        self.contents = self.contents._replace(states=states)
        # Threads of autograd have no name here. Those that wait for them may hold the lock.
        if not (unnamed := isinstance(current_thread(), _DummyThread)):
            self.tree.lock.acquire()
        self.unnamed = unnamed
        self.fill()
        return RunsAgain.__enter__(self)

    def __exit__(self, *error: object) -> None:
        RunsAgain.__exit__(self, *error)
        self.put_back()
        if not self.unnamed:
            self.tree.lock.release()


def _copied(state: dict[str, Any]) -> dict[str, Any]:
    return {name: value.copy() if name in _OWN else value for name, value in state.items()}


def _refill(held: list[tuple[Any, Any]], slots: list[tuple[Any, str, Tensor]]) -> None:
    for container, content in held:
        container.clear()
        (container.extend if isinstance(container, (list, deque)) else container.update)(content)
    for tensors, name, tensor in slots:
        tensors[name] = tensor


def check_part(part: _Part, state: dict[str, Any]) -> None:
    """Refuse a module that has other parameters or other children than when it was read."""
    tensors, children = state["_parameters"], [*state["_modules"].values()]
    same = len(tensors) == len(part.params) + len(part.blank) and len(children) == len(part.children)
    if same and part.blank:
        same = all(tensors[name] is None for name in part.blank)
    if same and children:
        same = all(x is y for x, y in zip(children, part.children, strict=True))
    if not same:
        raise ValueError(
            "functional: expected the module as it was when functional(module) was called, found other parts or "
            f"parameters in its {type(part.module).__name__}. Call functional again."
        )


def _refuse_new_buffers(part: _Part, state: dict[str, Any]) -> None:
    """Refuse a buffer that got its first value: no call would find it. What is not saved is a cache, made anew."""
    known = {name for name, _ in part.buffers} | state["_non_persistent_buffers_set"]
    for name, x in state["_buffers"].items():
        if x is not None and name not in known:
            raise ValueError(
                "functional: expected a forward that leaves the module with the buffers that it had, found a new one, "
                f"{name!r} of {type(part.module).__name__}, which the next call would not find. Register it with its "
                "shape, or call the module once before functional(module) and dict(module.named_buffers()); what can "
                "be made anew, with persistent=False."
            )


def _with_hidden(module: nn.Module) -> list[nn.Module]:
    """The modules of a tree, and those in attributes of theirs that hold only parameters of the tree."""
    modules, ids = list(module.modules()), {id(x) for x in module.parameters()}
    found = {id(part) for part in modules}
    for part in modules:  # which grows
        for value in _modules_in(part.__dict__, set()):
            if id(value) not in found and (own := list(value.parameters())) and ids.issuperset(map(id, own)):
                new = [x for x in value.modules() if id(x) not in found]
                modules += new
                found |= set(map(id, new))
    return modules


class _Reading:
    """Reads containers that modules hold: what is in them, with the tensors of the tree replaced."""

    def __init__(self, parts: list[_Part], given: dict[str, Tensor] | None, held: list[tuple[Any, Any]]):
        self.parts, self.given, self.held = parts, given, held
        self.known: set[int] = set()
        self.replacing: dict[int, Tensor] | None = None

    def read(self, value: Any) -> Any:
        """The same container, or another tuple."""
        if value.__class__ is not tuple:
            if id(value) in self.known:
                return value
            self.known.add(id(value))
        values = value.values() if isinstance(value, dict) else value
        kinds: set[Any] = {*map(type, values)}
        if kinds.isdisjoint(HOLDERS) and not any(issubclass(kind, Tensor) for kind in kinds):
            if value.__class__ is not tuple:
                self.held.append((value, value.copy()))
            return value
        if isinstance(value, dict):
            content: Any = value.copy()
            content.update({name: self.element(x) for name, x in value.items()})
        else:
            content = [self.element(x) for x in value]
        if value.__class__ is tuple:
            return value if all(x is y for x, y in zip(value, content, strict=True)) else tuple(content)
        self.held.append((value, content))
        return value

    def element(self, x: Any) -> Any:
        """A tensor, a container, or anything else in a container."""
        if isinstance(x, Tensor):
            if self.given is None:
                return x
            if self.replacing is None:
                self.replacing = dict(_replacing(self.parts, self.given))
            return self.replacing.get(id(x), x)
        return self.read(x) if x.__class__ in HOLDERS else x


def _replacing(parts: list[_Part], given: dict[str, Tensor]) -> Any:
    """The tensors of the tree, by id, with those that take their places."""
    for part in parts:
        for own, places in zip(module_tensors(part.module), part[1:3], strict=True):
            yield from ((id(own[name]), given[key]) for name, key in places)


def converts_as_usual(module: nn.Module) -> bool:
    """Whether `to`, `float` and the like do to a module what they do to every `nn.Module`."""
    if not hasattr(nn.Module, "_apply"):
        raise missing("nn.Module._apply", "functional modules")
    return type(module)._apply is nn.Module._apply  # pyright: ignore[reportPrivateUsage]


def _part(module: nn.Module, named: dict[int, str]) -> _Part:
    own = module_tensors(module)
    params, buffers = ([(name, named[id(x)]) for name, x in each.items() if x is not None] for each in own)
    blank = [name for name, x in own[0].items() if x is None]
    state = module.__dict__
    convert = partial(_convert, module) if converts_as_usual(module) else None
    return _Part(
        module, params, buffers, blank, tuple(state["_modules"].values()), _attributes(state), len(state), convert
    )


def _attributes(state: dict[str, Any]) -> list[str]:
    return [name for name in state if name not in STANDARD]


def _convert(module: Any, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
    """What `to`, `float` and the like do to a module meanwhile: nn.Module's own would change what it was given."""
    for child in module.children() if recurse else ():
        child._apply(fn)  # pyright: ignore[reportPrivateUsage]
    for tensors in module_tensors(module):
        tensors.update({name: fn(x) for name, x in tensors.items() if x is not None})
    return module


def _modules_in(value: Any, known: set[int]) -> list[nn.Module]:
    """The modules in a container, and in the containers in it."""
    if isinstance(value, nn.Module):
        return [value]
    if value.__class__ not in HOLDERS or id(value) in known:
        return []
    known.add(id(value))
    values = value.values() if isinstance(value, dict) else value
    return list(chain.from_iterable(_modules_in(x, known) for x in values))


_OWN = frozenset(("_parameters", "_buffers", "_modules"))
STANDARD = frozenset(nn.Module().__dict__) | {"_apply"}
HOLDERS = frozenset((list, tuple, dict, OrderedDict, defaultdict, set, deque))
_HOOKS = [name for name, value in nn.Module().__dict__.items() if value.__class__ in HOLDERS and name not in _OWN]
_set = object.__setattr__
