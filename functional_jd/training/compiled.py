"""A step, or any other pure function of tensors, as one compiled graph for each kind of arguments."""

import warnings
from collections.abc import Callable
from contextlib import ExitStack, suppress
from contextvars import ContextVar, copy_context
from enum import Enum
from functools import update_wrapper
from operator import is_
from threading import Lock, get_ident
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.amp import is_autocast_available
from torch.nn.modules.module import register_module_forward_pre_hook

from functional_jd.core.arguments import check_flag, check_function, check_option, refuse
from functional_jd.core.tree import tree_difference, tree_flatten, tree_names
from functional_jd.core.types import PLAIN_TENSORS
from functional_jd.objectives.functional import put_back
from functional_jd.precision.autocast import autocast_disabled
from functional_jd.torch_compat import graphs
from functional_jd.torch_compat.slow_path import random_state_outside_torch
from functional_jd.torch_compat.torch_internals import NO_TRANSFORM, dispatch_modes, transform_level
from functional_jd.training.captured import Captured


def compiled(f: Callable[..., Any], *, backend: str | Any = "inductor", donate: bool = False) -> "Compiled":
    """Compile a pure function, such as a step, from the operators that it calls.

    For each kind of arguments, `f` is called twice, the second time to write its operators down as one graph.

    Args:
        f: a function of pytrees of tensors and of other values: `functools.partial(step, **method)`, `torch.vmap` of a
            step, `torch.func.grad` of a training.
        backend: `"inductor"` writes machine code; `"eager"` runs the operators one by one; `"cudagraphs"` captures them
            as one CUDA graph, which the host launches once per call; or a function of the graph and its inputs.
        donate: with `"cudagraphs"`, whether the first argument gives its memory to the first result, which has the
            same structure: `state, info = take(state, x)`. Then no state is copied, and reading the old one raises.

    Returns:
        A function that returns what `f` does, up to rounding. It has a graph for each structure of the arguments, for
        layouts of tensors, other values, autocast, default dtype, deterministic algorithms, and modes of modules.

    Raises:
        TypeError: an argument is not a plain tensor and not hashable, or is an object whose contents are not seen; a
            result is not a tensor, a number or a name.
        ValueError: `f` changes an argument or a tensor of its closure in place, or draws numbers without a key; a
            tensor requires grad; a transform or a mode is active. With `"cudagraphs"`: tensors elsewhere, and operators
            that wait for the device, such as `eigh`.
        RuntimeError: `f` decides by values, such as `if x > 0`, `x[mask]`, or `x.item()`; a tensor that was donated.

    Guarantees:
        With `"eager"` rows and weights have the same bits, except if a rule chooses a solver by values (`config`,
        `imtl_g`). The direction of a rule that reads rows is equal to rounding: a graph sums them in float64.
        Results carry no gradient. Writing `f` down leaves no trace in generators, arguments or attributes of modules.
        The eighth graph warns. Tensors of the closure are read in each call, numbers and the order of keys once.

    Example:
        >>> compiled(lambda x: {"twice": 2 * x}, backend="eager")(torch.ones(2))
        {'twice': tensor([2., 2.])}
    """
    check_function("f", f, "Pass functools.partial(functional_jd.step, ...), or a function of your own.")
    if not callable(backend):
        check_option("backend", backend, tuple(_NAMED), "Or pass a function of the graph and the list of its inputs.")
    check_flag("donate", donate)
    if donate and backend != "cudagraphs":
        refuse("donate", "False unless backend='cudagraphs'", donate, "Leave it out.", ValueError)
    return Compiled(f, backend, donate)


class Compiled:
    """The result of `compiled`: the function, and its graphs by the kind of arguments."""

    def __init__(self, f: Callable[..., Any], backend: Any, donate: bool = False):
        self.f, self.backend, self.donate = f, backend, donate
        self.graphs: dict[Any, _Graph] = {}
        self.kinds: dict[Any, object] = {}  # the kinds of first arguments: one object each is compared fast
        self.newest: Any = None, (), None, None  # the donated result, its leaves, their structure and kind
        update_wrapper(self, f, updated=())

    def __reduce__(self) -> Any:  # a copy compiles again
        return Compiled, (self.f, self.backend, self.donate)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling() or _INSIDE.get() or dispatch_modes():  # a part of the graph around
            return self.f(*args, **kwargs)
        first, of_first, kind = self._flat(args[:1])
        rest, of_rest = tree_flatten((args[1:], kwargs))
        tensors = [leaf for leaf in first + rest if isinstance(leaf, Tensor)]  # pyright: ignore[reportUnnecessaryIsInstance]
        key: Any = kind, of_rest, _ambient(tensors[:1] if self.donate else tensors), *map(_kind, rest)
        graph = self.graphs.get(key)
        while graph is not None and (modes := _modes(graph.modules, graph.constants)) != graph.modes:
            key = (*key, modes)
            graph = self.graphs.get(key)
        if graph is None or transform_level() != NO_TRANSFORM or graphs.function_modes():
            _check((args, kwargs), first + rest)
        if graph is None:
            with _COMPILING:
                given, structure = tree_flatten((args, kwargs))
                graph = self.graphs.get(key) or copy_context().run(self._written, given, structure, tensors)
                self.graphs[key] = graph
                if len(self.graphs) == _MANY:
                    warnings.warn(_TOO_MANY, RuntimeWarning, stacklevel=2)
        with autocast_disabled():
            leaves = [*graph.run(*tensors, *(x.detach() for x in graph.constants))]
        for place, leaf in graph.others:
            leaves.insert(place, leaf)
        result = graph.structure.unflatten(leaves)
        if self.donate:
            state = result[0] if type(result) is tuple and result else result
            self.newest = state, leaves[: len(first)], of_first, kind
        return result

    def _flat(self, first: tuple[Any, ...]) -> tuple[list[Any], Any, object]:
        """The leaves of the first argument, their structure and kind: of the donated result in a tenth of the time."""
        result, newest, structure, kind = self.newest
        if structure is not None and first and first[0] is result:
            with suppress(ValueError):
                leaves = structure.flatten_up_to(first)
                if all(map(is_, newest, leaves)):
                    return leaves, structure, kind
        leaves, structure = tree_flatten(first)
        return leaves, structure, self.kinds.setdefault((structure, *map(_kind, leaves)), object())

    def _written(self, given: list[Any], structure: Any, tensors: list[Tensor]) -> "_Graph":
        _INSIDE.set(True)
        found, called, thread = list[Any](), dict[int, nn.Module](), get_ident()

        def of_tensors(*tensors: Tensor) -> list[Tensor]:
            rest = iter(tensors)
            args, kwargs = structure.unflatten([next(rest) if isinstance(x, Tensor) else x for x in given])
            result = self.f(*args, **kwargs)
            leaves, of_result = tree_flatten(result)
            for name, leaf in zip(tree_names(result), leaves, strict=True):
                if not isinstance(leaf, _RESULTS):
                    cure = "Return what it computes, such as pullback(weights) instead of pullback."
                    refuse(f"the result {name!r}", "a tensor, a number or a name", leaf, cure)
            donated = count_donated(args[:1], result) if self.donate else 0
            found[:] = donated, of_result, [(k, x) for k, x in enumerate(leaves) if not isinstance(x, Tensor)]
            return [x for x in leaves if isinstance(x, Tensor)]

        def note(module: nn.Module, _: Any) -> None:
            if get_ident() == thread and not torch.compiler.is_compiling():  # no compiled body of torch's control flow
                called[id(module)] = module

        with torch.random.fork_rng([x.device for x in tensors if x.is_cuda]), ExitStack() as after:
            after.callback(random_state_outside_torch())
            with register_module_forward_pre_hook(note):
                of_tensors(*(x.clone() for x in tensors))  # so that caches of modules are filled with values
            ordinary = [x for x in called.values() if not isinstance(x, torch.jit.ScriptModule)]
            after.callback(put_back, [(x, dict(x.__dict__)) for x in ordinary])
            for own in [x._buffers for x in ordinary]:  # pyright: ignore[reportPrivateUsage]
                after.callback(own.update, dict(own))
            graph = graphs.written(of_tensors, tensors)
        for node in [x for x in graphs.written_bases(graph) if x.op in ("placeholder", "get_attr")]:
            raise ValueError(
                f"compiled: the function must be pure, found that it changes {_origin(node, given, structure)} in "
                "place. Return the new value instead. For a module with buffers, functional(module) returns them."
            )
        for node in graphs.draws(graph):
            raise ValueError(f"compiled: numbers must be drawn by a key, found {node.target}. Take random.keyed(f).")
        constants = graphs.with_inputs_for_constants(graph)
        inputs = [*tensors, *(x.detach() for x in constants)]
        modules = list(dict.fromkeys(part for module in called.values() for part in module.modules()))
        backend = _NAMED[self.backend] if isinstance(self.backend, str) else self.backend
        with autocast_disabled():  # casts are operators of the graph
            run = backend(graph, inputs, *((len(tensors), found[0]) if backend is Captured else ()))
        return _Graph(run, constants, modules, _modes(modules, constants), *found[1:])


class _Graph(NamedTuple):
    run: Any
    constants: list[Tensor]  # of closures, which it takes after the arguments
    modules: list[nn.Module]  # that it calls
    modes: tuple[Any, ...]  # theirs, and the shapes of the constants
    structure: Any  # of the results
    others: list[tuple[int, Any]]  # the leaves of the results that are no tensors, with their places


_RESULTS = (Tensor, bool, int, float, complex, str, bytes, torch.dtype, torch.device, Enum)
_MANY = 8  # graphs of one function: mostly not due to shapes
_TOO_MANY = f"compiled: {_MANY} graphs of one function exist. Pad batches to one size, pass numbers as tensors."
_modes: Any = lambda modules, constants: (*[x.training for x in modules], *[x.shape for x in constants])
_COMPILING = Lock()  # torch traces one function at a time
_INSIDE = ContextVar("compiled", default=False)  # whether a function is being written down here, with what it calls
_NAMED: Any = {"inductor": graphs.machine_code, "eager": lambda graph, _: graph.forward, "cudagraphs": Captured}


def _kind(leaf: Any) -> Any:
    """The properties of an argument that a graph depends on."""
    if not isinstance(leaf, Tensor):  # floats as text: NaN is itself, and -0 not 0
        if type(leaf).__hash__ is None:
            refuse("an argument", "a tensor or hashable", leaf, "Bind others by functools.partial.")
        return type(leaf), repr(leaf) if isinstance(leaf, float | complex) else leaf
    strides: Any = leaf.stride() if leaf.layout is torch.strided and not leaf.is_nested else None
    if strides and 1 in leaf.shape:  # along which no step is taken
        strides = tuple(step for size, step in zip(leaf.shape, strides, strict=True) if size != 1)
    bits = leaf.requires_grad, leaf.is_conj(), leaf.is_neg(), leaf.is_sparse and leaf.is_coalesced()
    return not leaf.is_nested and leaf.shape, type(leaf) in PLAIN_TENSORS, strides, leaf.dtype, leaf.device, bits


def _ambient(tensors: list[Tensor]) -> tuple[Any, ...]:
    """The settings of torch that operators follow."""
    known = [kind for kind in sorted({"cpu", *(x.device.type for x in tensors)}) if is_autocast_available(kind)]
    autocast = tuple([torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind) for kind in known])
    modes = torch.are_deterministic_algorithms_enabled(), torch.is_grad_enabled(), torch.is_inference_mode_enabled()
    return autocast, torch.get_default_dtype(), graphs.has_torch_function((0,)) and torch.get_default_device(), modes


def _check(arguments: Any, leaves: list[Any]) -> None:
    """Raise for a call that a graph of plain tensors would get wrong."""
    outer = "Compile the outermost function: compiled(torch.func.grad(f)), compiled(random.keyed(f))."
    around = ["torch.func"] * (transform_level() != NO_TRANSFORM) + [type(x).__name__ for x in graphs.function_modes()]
    if around:
        raise ValueError(f"compiled: expected a call outside of transforms and modes, found {around[0]}. {outer}")
    for name, leaf in zip(tree_names(arguments), leaves, strict=True):
        at = _called(name)
        if not isinstance(leaf, Tensor):
            if not callable(leaf) and type(leaf).__hash__ is object.__hash__:  # its contents are not seen
                cure = "Pass a dict or a tuple, or take torch.export.register_dataclass."
                refuse(at, "a tensor, a container, a number or a function", leaf, cure)
        elif type(leaf) not in PLAIN_TENSORS or leaf.is_nested:
            refuse(at, "a plain tensor, not nested", type(leaf), "torch.compile(f) takes some others.")
        elif leaf.requires_grad and torch.is_grad_enabled():
            refuse(at, "a tensor without grad", leaf, f"Detach it. {outer}", ValueError)


def _called(name: str) -> str:
    """An argument, by its name in the tree of positional and keyword arguments."""
    place, _, rest = name.partition(".")
    return f"argument {rest}" if place == "0" else repr(rest)


def _origin(node: torch.fx.Node, given: list[Any], structure: Any) -> str:
    """An input or a constant of a graph, in the words of the user."""
    if node.op == "get_attr":
        return f"a tensor {list(getattr(node.graph.owning_module, str(node.target)).shape)} that is no argument"
    names = tree_names(structure.unflatten(given))
    inputs = [name for name, leaf in zip(names, given, strict=True) if isinstance(leaf, Tensor)]
    return _called(inputs[node.graph.find_nodes(op="placeholder").index(node)])


def count_donated(first: tuple[Any, ...], result: Any) -> int:
    """The number of tensors of the first argument, which the first result must be like."""
    if difference := tree_difference(first, (result[0] if type(result) is tuple and result else result,)):
        must = "compiled: the first result must be like the first argument with donate=True"
        raise ValueError(f"{must}: {difference}. Return the new state first, or pass donate=False.")
    return sum(isinstance(x, Tensor) for x in tree_flatten(first)[0])
