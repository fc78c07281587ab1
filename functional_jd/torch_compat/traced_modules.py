"""Modules with other tensors in their places in functions that torch.compile traces: it knows no assignment to an
object's `__dict__`, and guards on ids that are asked for.
"""

from collections import deque
from typing import Any

from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from functional_jd.torch_compat.in_place import IN_PLACE_NAMES
from functional_jd.torch_compat.module_tree import HOLDERS, STANDARD, ModuleTree, check_part
from functional_jd.torch_compat.torch_internals import function_name, module_tensors, traceable, untraced

_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")


def run_traced(
    module: nn.Module, tree: ModuleTree, given: dict[str, Tensor], args: Any, kwargs: Any
) -> tuple[Any, str | None, dict[str, Tensor]]:
    """The output of a module, the name of a parameter that it has replaced, and its buffers."""
    pairs = [
        (own[name], given[key])
        for part in tree.parts
        for own, places in zip(module_tensors(part.module), (part.params, part.buffers), strict=True)
        for name, key in places
    ]
    states = [(part.module, dict(part.module.__dict__)) for part in tree.parts]
    held: list[tuple[Any, Any]] = []
    for part, (_, state) in zip(tree.parts, states, strict=True):
        check_part(part, state)
        # Asked here, as torch.compile has no guard on hooks of its own: what is added later would not be called.
        _ = [len(state[name]) for name in _HOOKS]
    for part, state in states:
        for name, value in state.items():
            if name not in STANDARD and type(value) in HOLDERS:
                new = _replaced(value, pairs, held)
                if isinstance(value, tuple):
                    setattr(part, name, new)
    own = [(tensors, dict(tensors)) for part in tree.parts for tensors in module_tensors(part.module)]
    for part in tree.parts:
        for tensors, places in zip(module_tensors(part.module), (part.params, part.buffers), strict=True):
            for name, key in places:
                tensors[name] = given[key]
    try:
        with _Parameters([(given[key], key) for part in tree.parts for _, key in part.params]):
            output = module(*args, **kwargs)
        replaced, moved = _after(tree, given)
    finally:
        for tensors, before in own:
            _refill(tensors, before)
        for container, before in held:
            _refill(container, before)
        for part, state in states:
            for name in list(part.__dict__):
                if name not in state:
                    delattr(part, name)
                elif (
                    isinstance(state[name], tuple) or part.__dict__[name] is not state[name]
                ):  # two tuples it cannot tell
                    setattr(part, name, state[name])
    return output, replaced, moved


class _Parameters(TorchFunctionMode):
    """Refuses what writes a parameter: the versions of tensors, which tell eagerly, are not known while tracing."""

    def __init__(self, given: list[tuple[Tensor, str]]):
        super().__init__()
        self.given = given

    @untraced
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        func = traceable(func)
        if args and (op := function_name(func)) in IN_PLACE_NAMES and op != "requires_grad_":
            for x, name in self.given:
                if args[0] is x:
                    raise ValueError(
                        f"functional: expected a forward that leaves its parameters, found that it changes {name!r} in "
                        "place. Make it a buffer, which comes back as a result, or compute with another tensor."
                    )
        return func(*args, **(kwargs or {}))


def _after(tree: ModuleTree, given: dict[str, Tensor]) -> tuple[str | None, dict[str, Tensor]]:
    replaced, moved = None, {}
    for part in tree.parts:
        tensors, others = module_tensors(part.module)
        for name, key in part.params:
            if tensors.get(name) is not given[key]:
                replaced = key
        for name, key in part.buffers:
            if key not in moved and others.get(name) is not None:
                moved[key] = others[name]
    return replaced, moved


def _refill(container: Any, before: Any) -> None:
    if isinstance(container, (list, deque)):
        container.clear()
        container.extend(before)
    elif isinstance(container, set):
        container.clear()
        container.update(before)
    else:
        for name in list(container):
            if name not in before:
                del container[name]
        for name, x in before.items():
            if isinstance(x, tuple) or container.get(name) is not x:
                container[name] = x


def _replaced(value: Any, pairs: list[tuple[Tensor, Tensor]], held: list[tuple[Any, Any]]) -> Any:
    """What stands for a value in a container: the same container, with other tensors in it; or another tuple."""
    if isinstance(value, Tensor):
        return next((new for old, new in pairs if old is value), value)
    if type(value) is tuple:
        return tuple([_replaced(x, pairs, held) for x in value])
    if type(value) not in HOLDERS:
        return value
    if isinstance(value, set):
        held.append((value, value.copy()))
        return value
    elements = value.items() if isinstance(value, dict) else enumerate(value)
    new = [(place, x, _replaced(x, pairs, held)) for place, x in elements]
    held.append((value, dict(value) if isinstance(value, dict) else list(value)))
    for place, old, x in new:
        if isinstance(x, tuple) or x is not old:
            value[place] = x
    return value
