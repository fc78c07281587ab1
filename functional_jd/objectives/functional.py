"""Modules as pure functions of their parameters and buffers."""

import gc
import sys
from collections.abc import Callable, Collection, Generator, Iterable, Mapping
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from threading import get_ident
from types import FunctionType, ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.parameter import is_lazy
from torch.torch_version import TorchVersion

from functional_jd.core.foreach import clone_each
from functional_jd.core.tree import tree_leaves
from functional_jd.core.types import PLAIN_TENSORS
from functional_jd.torch_compat.held_tensors import Held, UsedParameters, eagerly, holder_of, nodes_of
from functional_jd.torch_compat.module_parts import ModuleParts
from functional_jd.torch_compat.torch_internals import change_count, innermost, is_concrete, torch_function_disabled
from functional_jd.torch_compat.watching import UnchangedParameters, changed_parameter

State = dict[str, Tensor]
"""Parameters or buffers by dotted name, as `named_parameters()` and `named_buffers()` name them."""


class Call(NamedTuple):
    """A call of a module: the parameters and buffers that it was given, by name, and the buffers that it returned."""

    params: dict[str, Tensor]
    buffers: dict[str, Tensor]
    returned: dict[str, Tensor]

    def moved(self) -> dict[str, Tensor]:
        """The buffers that were returned with other values, as far as no transform hides them."""
        changed = lambda x, old: x.shape != old.shape or not torch.allclose(x, old, 0, 0, equal_nan=True)
        known = lambda *pair: all(x.layout is torch.strided and is_concrete(x) for x in pair)
        return {k: x for k, x in self.returned.items() if known(x, old := self.buffers[k]) and changed(x, old)}


LOOKING: ContextVar[list[Call] | None] = ContextVar("LOOKING", default=None)
"""Where calls are noted; None if they are not."""


@contextmanager
def noting_calls() -> Generator[list[Call]]:
    """A context in which this thread notes the calls of modules as pure functions."""
    calls: list[Call] = []
    token = LOOKING.set(calls)
    try:
        yield calls
    finally:
        LOOKING.reset(token)


TRACED: list[list[tuple[nn.Module, dict[str, Any]]]] = []
"""The parts of modules that losses called, with their attributes before, while torch.compile traces them."""

READS_MODULES = TorchVersion(torch.__version__) >= "2.13"
"""Whether torch.compile traces a look at the attributes of a module."""


def functional(module: nn.Module) -> Callable[..., tuple[Any, State]]:
    """Turn a module into a pure function of its parameters and buffers.

    `output, buffers = apply(params, buffers, *args, **kwargs)`

    It calls `torch.func.functional_call`, with copies of the buffers. Values that forward stores on the module
    (`self.kl = ...`) stay there and carry gradients: losses may read them after the call.

    Args:
        module: the module. Its parts are read now, mode and hooks in every call. To freeze one, pass it detached.

    Returns:
        `apply(params, buffers, *args, **kwargs) -> (output, buffers)`. `params` and `buffers` are dicts of tensors like
        `dict(module.named_parameters())` and `dict(module.named_buffers())`. Shared tensors have one name, the first.
        The returned buffers are new tensors. A deep copy or a pickle of `apply` belongs to the copied module.

    Raises:
        TypeError: `module` is not an `nn.Module`; `params` or `buffers` is not a dict of tensors.
        ValueError: names are missing or unknown; the module has changed since it was read, is lazy, or is one of
            `fully_shard`; forward changes or replaces a parameter, makes a buffer, or returns an object that would
            compute later; forward computes with a parameter of its own that was not passed (looked at in the first
            call with others, in `train_state` and in `weights_fn`).
        RuntimeError: `functional` itself is called inside a function that is compiled in a full graph; the module is
            scripted, or an `nn.DataParallel`.

    Guarantees:
        The parameters and buffers of the module and the passed tensors are afterwards as they were.
        A function that runs again in the backward pass finds the passed tensors: `torch.utils.checkpoint`, adjoints.
        Threads that call a module wait for one another; one that reads it meanwhile finds the passed tensors.
        `apply` composes with vmap, grad, jvp and compile, as far as the module does.

    Differences:
        After `torch.func.functional_call`, what runs again in the backward pass finds the module's own parameters:
        gradients are silently wrong. Buffers that it is given move, and threads must not share its module.

    Limits:
        A registered parameter that forward takes from a list or a lambda raises; a layer that stands only there is a
        constant. A forward that writes a parameter raises after the fact; `train_state` puts it back. Threads call the
        modules that they share in one order. On an accelerator, their backward passes raise if they overlap.

    Example:
        >>> net = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
        >>> params, buffers = dict(net.named_parameters()), dict(net.named_buffers())
        >>> output, moved = functional(net)(params, buffers, torch.ones(5, 3))
        >>> int(moved["1.num_batches_tracked"]), int(net[1].num_batches_tracked)
        (1, 0)
    """
    if not isinstance(module, nn.Module):
        raise TypeError(f"functional: expected an nn.Module, found {type(module).__name__}. Pass the module itself.")
    applied = _Applied(module)
    applied.read()
    return applied


class _Applied:
    """The result of `functional`. A deep copy, alone or with its module, is that of the copied module."""

    def __init__(self, module: nn.Module):
        self.module = module
        self.parts: ModuleParts | None = None  # in a copy, read at the first call: its module may be half copied

    def __reduce__(self) -> tuple[Any, ...]:
        return _Applied, (self.module,)

    def read(self) -> ModuleParts:
        """Read the parts of the module."""
        module = self.module
        if torch.compiler.is_compiling():  # a graph break, where those are allowed
            raise RuntimeError(
                "functional: expected a call outside of functions that torch.compile traces, as it reads all parts of "
                "the module, found one inside. Write apply = functional(module) before, and compile what calls apply."
            )
        if lazy := [name for name, p in module.named_parameters() if is_lazy(p)]:
            raise ValueError(
                f"functional: expected parameters with shapes, found that {lazy[0]!r} gets its own when the module "
                "first runs. Call the module once before."
            )
        _refuse_fully_sharded(module.modules())
        self.parts = ModuleParts(module)
        return self.parts

    def __call__(self, params: State, buffers: State, *args: Any, **kwargs: Any) -> tuple[Any, State]:
        parts = self.read() if self.parts is None else self.parts
        given = _named("params", params, parts.param_names, "named_parameters")
        for embedding, name in parts.embeddings:
            if embedding.max_norm is not None:
                given[name] = given[name].clone()  # rows are shortened in place
        own = _named("buffers", buffers, parts.buffer_names, "named_buffers")
        # Losses may change buffers in place.
        tensors = given | dict(zip(own, clone_each([*own.values()]), strict=True)) if own else given
        inside = {place.path: tensors[place.key] for place in parts.places}
        if torch.compiler.is_compiling():
            if TRACED and READS_MODULES:
                TRACED[-1].extend([(part, dict(part.__dict__)) for part, *_ in parts.ordinary])
            with UnchangedParameters(given):
                output = functional_call(self.module, inside, args, kwargs, tie_weights=False)
        else:
            _refuse_fully_sharded(part for part, *_ in parts.ordinary)
            before = _marks(params.values())
            output = self._called(parts, Call(given, own, {}), inside, args, kwargs)
            if before != (marks := _marks(params.values())):
                for name, old, new in zip(params, before, marks, strict=True):
                    if old != new and name not in parts.recurrent:  # cuDNN moves weights of recurrent layers together
                        raise changed_parameter(name)
        for place in parts.places:
            if inside[place.path] is not tensors[place.key] and place.key in given:
                raise ValueError(
                    f"functional: forward must leave its parameters, found that it replaces {place.key!r}. Make it a "
                    "buffer, which comes back as a result."
                )
        returned = {name: inside[name].detach() for name in parts.buffer_names}
        if not torch.compiler.is_compiling() and (looking := LOOKING.get()) is not None:
            looking.append(Call(given, own, returned))
        return output, returned

    def _called(self, parts: ModuleParts, call: Call, inside: State, args: Any, kwargs: Any) -> Any:
        """The output, once the module was called with other tensors in it."""
        holder, one = holder_of(self.module), object()
        try:
            holder.take(one, get_ident())
            own = {} if len(holder.seen) == len(parts.param_names) else parts.own_parameters()
            unseen = {key for key, x in own.items() if x is not (p := call.params[key]) and innermost(p) is not x}
            look = not unseen <= holder.seen or LOOKING.get() is not None
            if not look and parts.run_once():
                output = functional_call(self.module, inside, args, kwargs, tie_weights=False)
                parts.check(call.params)
                return output
            inputs = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor) and x.requires_grad]
            start = [*call.params.values(), *inputs, *parts.left_tensors()]
            known = nodes_of(start)
            looking = UsedParameters(parts.own_parameters(), start) if look else None
            with eagerly() if look else nullcontext(), looking or nullcontext():
                output = functional_call(self.module, inside, args, kwargs, tie_weights=False)
            parts.check(call.params)
            outputs = [output] if output.__class__ is Tensor else _tensors_in(output, parts)
            outputs += parts.left_tensors()
        finally:
            holder.give(one)
        if looking is not None:
            for name in looking.found(outputs):
                raise ValueError(
                    "functional: forward must use the parameters that are passed, found that it also uses the module's "
                    f"own {name!r}, which never moves: a function, a list or another object keeps it. Let forward read "
                    "it from the module, or detach it."
                )
            holder.seen |= unseen
        if new := nodes_of(outputs) - known:
            Held(holder, parts.places, call.params, call.buffers, inputs, clone_each).watch(new, known)
        return output


def _refuse_fully_sharded(parts: Iterable[nn.Module]) -> None:
    """Refuse a module whose hooks gather parameters of its own, whatever it is given."""
    fsdp: Any = sys.modules.get("torch.distributed.fsdp")  # without it there are none, and it takes long to import
    if fsdp is None:
        return
    for part in parts:
        if isinstance(part, (fsdp.FSDPModule, fsdp.FullyShardedDataParallel)):
            raise ValueError(
                f"functional: expected a module without the hooks of fully_shard, found {type(part).__name__}, which "
                "gathers parameters of its own. Before fully_shard, call apply = functional(copy.deepcopy(module))."
            )


def _marks(tensors: Any) -> list[Any]:
    """Marks that differ once a tensor was changed in place or was given other data."""
    with torch_function_disabled():
        try:
            return [(change_count(x), x.data_ptr() if x.__class__ in PLAIN_TENSORS else 0) for x in tensors]
        except RuntimeError:  # hidden by a transform, or made in inference mode
            return [None if (y := innermost(x)).is_inference() else change_count(y) for x in tensors]


def _tensors_in(output: Any, parts: ModuleParts) -> list[Tensor]:
    """The tensors in an output, which must not call the module later, when it has its own parameters again."""
    found: list[Tensor] = []
    known, waiting = set[int](), [output]
    while waiting:
        x = waiting.pop()
        if isinstance(x, Tensor):
            found.append(x)
        if id(x) in parts.ids:
            raise ValueError(
                f"functional: expected an output of tensors, found {type(output).__name__} that holds a part of the "
                f"module ({type(x).__name__}), which has its own parameters again. Let forward return what it computes."
            )
        if id(x) in known or isinstance(x, _ENDS):
            continue
        known.add(id(x))
        cells = (x.__closure__, x.__defaults__, x.__dict__) if isinstance(x, FunctionType) else None
        waiting += gc.get_referents(x if cells is None else cells)
    return found


_ENDS = (Tensor, nn.Module, type, ModuleType, str, int, float, torch.dtype, torch.device)


def _named(what: str, given: Any, names: Collection[str], method: str) -> State:
    """The tensors by name, in the order of the module."""
    tensors = [x for x in given.values() if isinstance(x, Tensor)] if isinstance(given, Mapping) else None
    if tensors is None or len(tensors) != len(given):
        found = type(given).__name__ if not isinstance(given, Mapping) else "a dict with other values"
        raise TypeError(
            f"functional: {what} must be a dict of tensors by name, found {found}. Start with dict(module.{method}())."
        )
    if len(given) != len(names) or not all(map(given.__contains__, names)):
        missing, unknown = sorted(set(names) - set(given)), sorted(set(given) - set(names))
        raise ValueError(
            f"functional: {what} must have the names of module.{method}(), found {missing[:5]} missing and "
            f"{unknown[:5]} unknown. If some parameters are constants, pass merge(trained, constant)."
        )
    return {name: given[name] for name in names}


def run_traced(losses: Callable[..., Any], *args: Any) -> Any:
    """The result of losses that torch.compile traces; attributes of modules that hold traced values are put back."""
    TRACED.append([])
    result = losses(*args)
    put_back(TRACED.pop())
    return result


def put_back(parts: list[tuple[nn.Module, dict[str, Any]]]) -> None:
    """Give parts of modules the attributes that they had before, the newest first."""
    for part, before in reversed(parts):
        for name, x in list(part.__dict__.items()):
            if name not in before:
                delattr(part, name)
            elif isinstance(x, Tensor | tuple | list | dict) and x is not before[name]:
                setattr(part, name, before[name])
