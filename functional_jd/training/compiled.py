"""A step, or any other pure function of tensors, as one compiled graph for each kind of arguments."""

import warnings
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from enum import Enum
from functools import update_wrapper
from operator import is_
from threading import Lock
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook

from functional_jd.core.arguments import check_flag, check_function, described, refuse
from functional_jd.core.tree import structure_key, tree_flatten, tree_names, tree_unflatten
from functional_jd.core.types import PLAIN_TENSORS
from functional_jd.torch_compat import graphs
from functional_jd.torch_compat.graphs import function_modes
from functional_jd.torch_compat.torch_internals import dispatch_modes, transform_level
from functional_jd.training.captured import Captured

Backend = Callable[[torch.fx.GraphModule, list[Tensor]], Callable[..., Sequence[Tensor]]]

_MANY = 8
"""Mostly, so many graphs of one function are not due to shapes."""


def compiled(f: Callable[..., Any], *, backend: str | Backend = "inductor", donate: bool = False) -> "Compiled":
    """Compile a pure function, such as a step, from the operators that it calls.

    `f` is called twice for each kind of arguments: as it is, and with tensors that have shapes but no values. The
    second call writes down its operators as one graph, transforms and derivatives taken. `torch.compile` reads the
    Python code instead: that takes longer, in every process, and finds less to fuse.

    `take = compiled(functools.partial(step, **method))`, then `state, info = take(state, *batch)`

    Args:
        f: a function of pytrees of tensors, and of other values, to pytrees of tensors: `step`, `aggregate`, several
            steps, `torch.vmap` of a step, `torch.func.grad` of a training.
        backend: `"inductor"` writes machine code; `"eager"` runs the operators one by one; `"cudagraphs"` captures them
            as one CUDA graph, which the host launches once per call; or a function of the graph and its inputs.
        donate: with `"cudagraphs"`, whether the first argument gives its memory to the first result, which has the
            same structure: `state, info = take(state, x)`. Then no state is copied, and reading the old one raises.

    Returns:
        A function that returns what `f` does, up to rounding. It has a graph for each kind of arguments: for their
        structure, for tensors of the same shapes, strides, dtypes and devices, and for other values that are equal;
        also for autocast, the default dtype, deterministic algorithms, and the modes (`training`) of modules.

    Raises:
        TypeError: an argument is neither a plain tensor nor hashable, or is an object whose contents are not seen; a
            result is neither a tensor nor a number or a name.
        ValueError: `f` changes an argument or a tensor of its closure in place, or draws numbers without a key; a
            tensor requires grad; a transform or a mode is active: compile the outermost function. With `"cudagraphs"`:
            tensors elsewhere, and operators that wait for the device, such as `eigh`, found before the capture.
        RuntimeError: `f` decides by values, such as `if x > 0`, `x[mask]`, or `x.item()`; a tensor that was donated.

    Guarantees:
        With `"eager"` the same bits; rounding if a rule chooses a solver by values (`config`, `imtl_g`).
        Results carry no gradient. Writing `f` down leaves no trace in generators or arguments.
        A `RuntimeWarning` at the eighth graph names an argument that differs from call to call.

    Differs:
        Numbers that `f` finds elsewhere than in its arguments are read once, where `torch.compile` guards most of them.
        Tensors of its closure are inputs of the graph, with new values.

    Example:
        >>> double = compiled(lambda x: {"twice": 2 * x}, backend="eager")
        >>> double(torch.ones(2))
        {'twice': tensor([2., 2.])}
    """
    check_function("compiled", "f", f, "Pass functools.partial(functional_jd.step, ...), or a function of your own.")
    chosen = _BACKENDS.get(backend) if isinstance(backend, str) else backend
    if not callable(chosen):
        names = "'inductor', 'eager', 'cudagraphs' or a function"
        refuse("compiled", "backend", names, backend, "A function takes the graph and the list of its inputs.")
    check_flag("compiled", "donate", donate)
    if donate and chosen is not Captured:
        refuse("compiled", "donate", "False unless backend='cudagraphs'", donate, "Leave it out.", ValueError)
    return Compiled(f, chosen, donate)


class Compiled:
    """What `compiled` returns: the function, and its graphs by the kind of arguments."""

    def __init__(self, f: Callable[..., Any], backend: Any, donate: bool = False):
        self.f, self.backend, self.donate = f, backend, donate
        self.graphs: dict[Any, _Graph] = {}
        self.newest: tuple[Sequence[Any], tuple[Any, ...]] = (), ()  # leaves of the donated result, and their kinds
        update_wrapper(self, f, updated=())

    def __reduce__(self) -> Any:  # a copy compiles again
        return Compiled, (self.f, self.backend, self.donate)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        # A part of the graph around; or tracers look at operators.
        if torch.compiler.is_compiling() or _INSIDE.get() or dispatch_modes():
            return self.f(*args, **kwargs)
        given: list[Any]
        given, structure = tree_flatten((args, kwargs))
        tensors = [leaf for leaf in given if isinstance(leaf, Tensor)]
        newest, known = self.newest
        known = known if len(newest) <= len(given) and all(map(is_, newest, given)) else ()
        kinds = known + tuple(map(_kind, given[len(known) :]))
        key = structure_key(structure), _ambient(tensors[:1] if self.donate else tensors), kinds
        try:
            graph = self.graphs.get(key)
        except TypeError as error:
            error.add_note(
                "compiled: arguments must be tensors or hashable values. Pass a tensor, or a dict or tuple of tensors, "
                "or bind the value with functools.partial."
            )
            raise
        while graph is not None and (modes := _modes(graph.modules)) != graph.modes:
            key = (*key, modes)
            graph = self.graphs.get(key)
        if graph is None or transform_level() != _NO_TRANSFORM or function_modes():
            _check((args, kwargs), given)
        if graph is None:
            with _COMPILING:
                inside = _INSIDE.set(True)
                try:
                    graph = self.graphs.get(key) or self._add(key, given, structure, tensors)
                finally:
                    _INSIDE.reset(inside)
                if len(self.graphs) == _MANY:
                    _warn((args, kwargs), [key[2] for key in self.graphs])
        found = iter(graph.run(*tensors, *(x.detach() for x in graph.constants)))
        leaves = [next(found) if x is None else x[0] for x in graph.leaves]
        if self.donate:
            count = len(known) or len(tree_flatten(args[:1])[0])
            self.newest = leaves[:count], kinds[:count]
        return tree_unflatten(graph.structure, leaves)

    def _add(self, key: Any, given: list[Any], structure: Any, tensors: list[Tensor]) -> "_Graph":
        found: list[Any] = []
        called: dict[int, nn.Module] = {}

        def of_tensors(*tensors: Tensor) -> list[Tensor]:
            rest = iter(tensors)
            args, kwargs = tree_unflatten(structure, [next(rest) if isinstance(x, Tensor) else x for x in given])
            result = self.f(*args, **kwargs)
            leaves: list[Any]
            leaves, of_result = tree_flatten(result)
            _check_result(result, leaves)
            constants = [None if isinstance(x, Tensor) else (x,) for x in leaves]
            found[:] = of_result, constants, count_donated(args[:1], result) if self.donate else 0
            return [x for x in leaves if isinstance(x, Tensor)]

        def note(module: nn.Module, _: Any) -> None:
            if not torch.compiler.is_compiling():  # no compiled body of torch's control flow
                called[id(module)] = module

        with torch.random.fork_rng([x.device for x in tensors if x.is_cuda]):
            noting = register_module_forward_pre_hook(note)
            try:
                of_tensors(*(x.clone() for x in tensors))  # so that caches of modules are filled with values
            finally:
                noting.remove()
            graph = graphs.written(of_tensors, tensors)
        for node in graphs.changed_in_place(graph):
            raise ValueError(
                f"compiled: expected a pure function, found one that changes {_origin(node, given, structure)} in "
                "place. Return what is new instead; of a module with buffers, functional(module) returns them."
            )
        for node in graphs.draws(graph):
            raise ValueError(
                f"compiled: expected numbers that are drawn by a key, found {node.target}, which takes a generator. "
                "Wrap what draws by random.keyed, and pass its key as an argument."
            )
        constants = graphs.with_inputs_for_constants(graph)
        inputs, (of_result, leaves, donated) = [*tensors, *(x.detach() for x in constants)], found
        how = (len(tensors), donated) if self.backend is Captured else ()
        run, modules = self.backend(graph, inputs, *how), [*called.values()]
        made = self.graphs[key] = _Graph(run, constants, modules, _modes(modules), of_result, leaves)
        return made


def _warn(arguments: Any, kinds: list[Any]) -> None:
    """Warn of many graphs, with the first argument in which the last two calls differ."""
    both = zip(tree_names(arguments), *kinds[-2:], strict=False)
    differ = next((_called(name) for name, old, new in both if old != new), "their structure")
    warnings.warn(
        f"compiled: {_MANY} graphs of one function were made, each compiled by itself; the last two calls differ in "
        f"{differ}. Pad batches to one size, pass numbers that change as tensors, make functions among the arguments "
        "once, and call the function itself for shapes that are rare.",
        RuntimeWarning,
        stacklevel=3,
    )


class _Graph(NamedTuple):
    """A compiled graph, the tensors of closures that it takes, the modules that it calls with their modes, and the
    structure and the constants of its results.
    """

    run: Any
    constants: list[Tensor]
    modules: list[nn.Module]
    modes: tuple[bool, ...]
    structure: Any
    leaves: list[Any]


_NO_TRANSFORM = (None, -1)
_COMPILING = Lock()  # torch traces one function at a time
_INSIDE = ContextVar("compiled", default=False)  # whether a function is being written down here, with what it calls


def _one_by_one(graph: torch.fx.GraphModule, _: list[Tensor]) -> Any:
    return graph.forward


_BACKENDS: dict[str, Any] = {"inductor": graphs.machine_code, "eager": _one_by_one, "cudagraphs": Captured}


def _kind(leaf: Any) -> Any:
    """The properties of an argument on which a graph depends."""
    if not isinstance(leaf, Tensor):  # floats as text: NaN is itself, and -0 not 0
        return leaf.hex() if type(leaf) is float else (type(leaf), leaf)
    strides: Any = leaf.stride() if leaf.layout is torch.strided and not leaf.is_nested else None
    if strides and 1 in leaf.shape:  # along which no step is taken
        strides = tuple(step for size, step in zip(leaf.shape, strides, strict=True) if size != 1)
    bits = leaf.requires_grad, leaf.is_conj(), leaf.is_neg()
    return leaf.shape, type(leaf) in PLAIN_TENSORS, strides, leaf.dtype, leaf.device, bits


def _modes(modules: list[nn.Module]) -> tuple[bool, ...]:
    """The modules that are in training mode."""
    return tuple([module.training for module in modules])


def _ambient(tensors: list[Tensor]) -> tuple[Any, ...]:
    """The settings of torch that operators follow."""
    types = sorted({"cpu", *(x.device.type for x in tensors)})
    on = (kind for kind in types if torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind))
    autocast = tuple([(kind, torch.get_autocast_dtype(kind)) for kind in on])
    modes = torch.are_deterministic_algorithms_enabled(), torch.is_grad_enabled(), torch.is_inference_mode_enabled()
    return autocast, torch.get_default_dtype(), torch.get_default_device(), modes


def _check(arguments: Any, leaves: list[Any]) -> None:
    """Raise for a call that a graph of plain tensors would get wrong."""
    outer = "Compile the outermost function: compiled(torch.func.grad(f)), compiled(random.keyed(f))."
    if transform_level() != _NO_TRANSFORM:
        raise ValueError(f"compiled: expected a call outside of transforms, found one inside torch.func. {outer}")
    for mode in function_modes():
        raise ValueError(f"compiled: expected a call outside of modes, found one inside {type(mode).__name__}. {outer}")
    for name, leaf in zip(tree_names(arguments), leaves, strict=True):
        at, found = f"as {_called(name)}", type(leaf).__name__
        if not isinstance(leaf, Tensor):
            if not callable(leaf) and type(leaf).__hash__ is object.__hash__:
                raise TypeError(
                    f"compiled: expected tensors, containers, numbers or functions, found {found} {at}, whose contents "
                    "are not seen. Pass a dict or a tuple, or take torch.export.register_dataclass."
                )
        elif type(leaf) not in PLAIN_TENSORS or leaf.is_nested:
            found = "a nested tensor" if leaf.is_nested else found
            raise TypeError(
                f"compiled: expected plain tensors, found {found} {at}. torch.compile(f) takes some others."
            )
        elif leaf.requires_grad and torch.is_grad_enabled():
            raise ValueError(f"compiled: expected no tensor that requires grad, found one {at}. Detach it. {outer}")


_RESULTS = (Tensor, bool, int, float, complex, str, bytes, torch.dtype, torch.device, Enum)


def _check_result(result: Any, leaves: list[Any]) -> None:
    """Raise for results that would hold tensors of the call that was written down."""
    for name, leaf in zip(tree_names(result), leaves, strict=True):
        if not isinstance(leaf, _RESULTS):
            raise TypeError(
                f"compiled: expected tensors, numbers and names as results, found {described(leaf)} as {name!r}. "
                "Return what it computes, such as pullback(weights) instead of pullback."
            )


def _called(name: str) -> str:
    """An argument, by its name in the tree of positional and keyword arguments."""
    place, _, rest = name.partition(".")
    return f"argument {rest}" if place == "0" else repr(rest)


def _origin(node: torch.fx.Node, given: list[Any], structure: Any) -> str:
    """An input or a constant of a graph, in the words of the user."""
    if node.op == "get_attr":
        return f"a tensor {list(getattr(node.graph.owning_module, str(node.target)).shape)} that is no argument"
    names = zip(tree_names(tree_unflatten(structure, given)), given, strict=True)
    inputs = [name for name, leaf in names if isinstance(leaf, Tensor)]
    return _called(inputs[node.graph.find_nodes(op="placeholder").index(node)])


def count_donated(first: tuple[Any, ...], result: Any) -> int:
    """The number of tensors of the first argument, which the first result must be like."""
    flat = [tree_flatten(first), tree_flatten((result[0] if type(result) is tuple and result else result,))]
    kinds = [[(type(x), getattr(x, "shape", 0), getattr(x, "dtype", 0)) for x in leaves] for leaves, _ in flat]
    if structure_key(flat[0][1]) != structure_key(flat[1][1]) or kinds[0] != kinds[1]:
        raise ValueError(
            "compiled: with donate=True the first result must have the structure, shapes and dtypes of the first "
            "argument, found others. Return the new state first, or pass donate=False."
        )
    return sum(isinstance(x, Tensor) for x in flat[0][0])
