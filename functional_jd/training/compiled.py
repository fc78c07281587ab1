"""A step, or any other pure function of tensors, as one compiled graph for each kind of arguments."""

import warnings
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from enum import Enum
from functools import partial, update_wrapper
from threading import Lock
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook

from functional_jd.core.arguments import check_flag, check_function, described
from functional_jd.core.tree import structure_key, tree_flatten, tree_names, tree_unflatten
from functional_jd.core.types import PLAIN_TENSORS
from functional_jd.torch_compat import graphs
from functional_jd.torch_compat.fewer_operators import with_fewer_operators
from functional_jd.torch_compat.graphs import function_modes
from functional_jd.torch_compat.torch_internals import dispatch_modes, transform_level
from functional_jd.torch_compat.torch_internals import is_compiled as compiled_by_torch
from functional_jd.training.captured import Captured, Newest, donated_pairs, flat_kind, refuse_without_cuda

Run = Callable[..., Sequence[Tensor]]
Backend = Callable[[torch.fx.GraphModule, list[Tensor]], Run]

_MANY = 8
"""So many graphs of one function are more than shapes explain, mostly."""


def compiled(f: Callable[..., Any], *, backend: str | Backend = "inductor", donate: bool = False) -> "Compiled":
    """Compile a pure function, such as a step, from the operators that it calls.

    `f` is called twice for each kind of arguments: as it is, and with tensors that have shapes but no values. The
    operators that it calls are written down as one graph, transforms and derivatives already taken, which is compiled.
    `torch.compile` reads the Python code instead: that takes longer, in every process anew, and finds less to fuse.

    `take = compiled(functools.partial(step, **method))`, then `state, info = take(state, *batch)`

    Args:
        f: a function of pytrees of tensors, and of other values, to pytrees of tensors: `step`, `aggregate`, several
            steps, `torch.vmap` of a step, `torch.func.grad` of a training.
        backend: `"inductor"`, which writes machine code and keeps it in torch's cache for the next process; `"eager"`,
            which runs the operators of the graph one by one; `"cudagraphs"`, which captures them as one CUDA graph and
            replays it: the host launches once per call; or a function from the graph, a `torch.fx.GraphModule`, and the
            list of its inputs to a function of those inputs, as `torch.compile` takes it.
        donate: with `"cudagraphs"`, whether the first argument gives its memory to the first result, which has the
            same structure: `state, info = take(state, x)`. Then no state is copied, and reading the old one raises.

    Returns:
        A function of the arguments of `f` that returns what `f` does, up to rounding. Arguments are of one kind if
        they have the same structure, tensors of the same shapes, strides, dtypes and devices, and otherwise equal
        values; functions are equal only to themselves. Whether autocast is on, the default dtype,
        `torch.use_deterministic_algorithms` and the modes (`training`) of the modules that `f` calls belong to it too.

    Raises:
        TypeError: `f` is not callable, or `backend` neither a name nor a function. When called: an argument is neither
            a plain tensor nor hashable, or is an object whose contents are not seen; a result is neither a tensor nor a
            number or a name, such as a function.
        ValueError: when called: `f` changes an argument or a tensor of its closure in place, or draws numbers without
            a key (`random.keyed` draws by one); a tensor requires grad; a transform of torch.func is active, or
            `keyed`, `autocast` or another mode. Compile the outermost function: `compiled(torch.func.grad(f))`.
            `"cudagraphs"` without CUDA; when called, with tensors elsewhere, or for operators that wait for the device
            (`eigh`, searches on the host): these are found before the capture.
        RuntimeError: a tensor is read that was donated. When called: `f` decides by values, such as `if x > 0`,
            `x[mask]`, `x[i]` of a tensor i without dimensions, or `x.item()`; a schedule of a rate, too.

    Guarantees:
        With `backend="eager"` torch runs the operators of `f`: the same bits, and equal to rounding if a rule looks at
        values to choose a solver or to stop a search (`config`, `imtl_g`, small dampings of residuals).
        Results carry no gradient.
        Calling `f` to write it down leaves no trace in generators or arguments; what it caches in a module stays.
        A `RuntimeWarning` at the eighth graph names an argument that differs from call to call.

    Differs:
        Values that `f` finds elsewhere than in its arguments are read once: hooks, Python numbers, also those that it
        reads from tensors of its closure. Such a tensor itself is an input of the graph, with new values.
        Dicts are of one kind whatever the order of their keys. `torch.compile` guards most of these.

    Example:
        >>> double = compiled(lambda x: {"twice": 2 * x}, backend="eager")
        >>> double(torch.ones(2))
        {'twice': tensor([2., 2.])}
    """
    check_function("compiled", "f", f, "Pass functools.partial(functional_jd.step, ...), or a function of your own.")
    if isinstance(backend, str) and backend in _BACKENDS:
        chosen = _BACKENDS[backend]
    elif callable(backend):
        chosen = backend
    else:
        raise TypeError(
            f"compiled: backend must be 'inductor', 'eager', 'cudagraphs' or a function, found {described(backend)}. "
            "A function takes the graph and the list of its inputs."
        )
    check_flag("compiled", "donate", donate)
    if chosen is Captured:
        refuse_without_cuda()
    elif donate:
        raise ValueError(
            "compiled: donate must be False unless backend='cudagraphs', found True. Only captured graphs reuse memory."
        )
    return Compiled(f, chosen, donate)


class Compiled:
    """What `compiled` returns: the function, and its graphs by the kind of arguments."""

    def __init__(self, f: Callable[..., Any], backend: Any, donate: bool = False):
        self.f, self.backend, self.donate = f, backend, donate
        self.graphs: dict[Any, _Graph] = {}
        self.newest = Newest()
        update_wrapper(self, f, updated=())

    def __reduce__(self) -> Any:  # a copy compiles anew
        return Compiled, (self.f, self.backend, self.donate)

    def __repr__(self) -> str:
        return f"compiled({self.f!r})"

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        # A part of the graph around; or somebody looks at operators, as tracers do.
        if torch.compiler.is_compiling() or _INSIDE.get() or dispatch_modes():
            return self.f(*args, **kwargs)
        given: list[Any]
        given, structure = tree_flatten((args, kwargs))
        tensors = [leaf for leaf in given if isinstance(leaf, Tensor)]
        first, count = None, 0
        if self.donate:  # all tensors are on one device
            first, count = self.newest.kinds_of(given, args[:1], _kind)
            kind = (structure_key(structure), _ambient(tensors[:1]), first, *map(_kind, given[count:]))
        else:
            kind = (structure_key(structure), _ambient(tensors), *map(_kind, given))
        try:
            graph = self.graphs.get(kind)
        except TypeError as error:
            error.add_note(
                "compiled: arguments must be tensors or hashable values. Pass a tensor, or a dict or tuple of tensors, "
                "or bind the value with functools.partial."
            )
            raise
        while graph is not None and (modes := _modes(graph.modules)) != graph.modes:
            kind = (*kind, modes)
            graph = self.graphs.get(kind)
        if graph is None or transform_level() != _NO_TRANSFORM or function_modes():
            _check((args, kwargs), given)
        if graph is None:
            with _COMPILING:
                inside = _INSIDE.set(True)
                try:
                    graph = self.graphs.get(kind) or self._add(kind, given, structure, tensors)
                finally:
                    _INSIDE.reset(inside)
                if len(self.graphs) == _MANY:
                    self._warn((args, kwargs))
        result, leaves = graph(tensors)
        if self.donate:
            self.newest = Newest(leaves[:count], first)
        return result

    def _add(self, kind: Any, given: list[Any], structure: Any, tensors: list[Tensor]) -> "_Graph":
        outputs: list[Any] = []
        called: dict[int, nn.Module] = {}
        pairs: list[tuple[int, int]] = []

        def of_tensors(*tensors: Tensor) -> list[Tensor]:
            rest = iter(tensors)
            args, kwargs = tree_unflatten(structure, [next(rest) if isinstance(x, Tensor) else x for x in given])
            result = self.f(*args, **kwargs)
            leaves: list[Any]
            leaves, found = tree_flatten(result)
            _check_result(result, leaves)
            outputs[:] = found, [None if isinstance(x, Tensor) else (x,) for x in leaves]
            pairs[:] = donated_pairs(args[:1], result) if self.donate else []
            return [x for x in leaves if isinstance(x, Tensor)]

        with torch.random.fork_rng([x.device for x in tensors if x.is_cuda]):
            with _noting_modules(called):
                of_tensors(*(x.clone() for x in tensors))  # so that caches of modules are filled with values
            graph = graphs.written(of_tensors, tensors)
        for node in graphs.changed_in_place(graph):
            raise ValueError(
                "compiled: expected a pure function, found one that changes "
                f"{_origin(node, given, structure)} in place. "
                "Return what is new instead; of a module with buffers, functional(module) returns them."
            )
        for node in graphs.draws(graph):
            raise ValueError(
                f"compiled: expected numbers that are drawn by a key, found {node.target}, which takes a generator. "
                "Wrap what draws by random.keyed, and pass its key as an argument."
            )
        constants = graphs.with_inputs_for_constants(graph)
        inputs = [*tensors, *(x.detach() for x in constants)]
        if self.backend is Captured:
            run = Captured(graph, inputs, len(tensors), dict(pairs))
        else:
            run = self.backend(graph, inputs)
        made = self.graphs[kind] = _Graph(run, constants, [*called.values()], *outputs)
        return made

    def _warn(self, arguments: Any) -> None:
        *_, before, last = self.graphs
        kinds = zip(tree_names(arguments), flat_kind(before), flat_kind(last), strict=False)
        name, old, new = next((each for each in kinds if each[1] != each[2]), ("", None, None))
        differ = _called(name) if name else "their structure"
        shapes = [kind[0] for kind in (old, new) if type(kind) is tuple and isinstance(kind[0], torch.Size)]
        if len({*shapes}) == 2:
            differ = f"the shape of {differ}: {list(shapes[0])} and then {list(shapes[1])}"
        warnings.warn(
            f"compiled: {_MANY} graphs of one function were made, each compiled by itself; the last two calls differ "
            f"in {differ}. Pad batches to one size, pass numbers that change as tensors, make functions among the "
            "arguments once, and call the function itself for shapes that are rare.",
            RuntimeWarning,
            stacklevel=3,
        )


@contextmanager
def _noting_modules(called: dict[int, nn.Module]) -> Generator[None]:
    """Keep all modules that are called, by their ids, except for those in a compiled body of torch's control flow."""

    def note(module: nn.Module, _: Any) -> None:
        if not torch.compiler.is_compiling():
            called[id(module)] = module

    handle = register_module_forward_pre_hook(note)
    try:
        yield
    finally:
        handle.remove()


class _Graph:
    """A compiled graph, the tensors of closures that it takes, the modules that it calls, and the structure of what it
    returns.
    """

    def __init__(self, run: Run, constants: list[Tensor], modules: list[nn.Module], structure: Any, leaves: list[Any]):
        self.run, self.constants, self.structure, self.leaves = run, constants, structure, leaves
        self.modules, self.modes = modules, _modes(modules)

    def __call__(self, tensors: list[Tensor]) -> Any:
        found = iter(self.run(*tensors, *(x.detach() for x in self.constants)))
        leaves = [next(found) if x is None else x[0] for x in self.leaves]
        return tree_unflatten(self.structure, leaves), leaves


def is_compiled(f: Any) -> bool:
    """Whether the first call of a function compiles it, by `compiled` or by torch.compile."""
    inner = f.func if isinstance(f, partial) else f
    return isinstance(inner, Compiled) or compiled_by_torch(inner) or compiled_by_torch(f)


_NO_TRANSFORM = (None, -1)
_COMPILING = Lock()
"""torch traces one function at a time."""

_INSIDE = ContextVar("compiled", default=False)
"""Whether a function is being written down here: what it calls becomes a part of its graph."""


def _one_by_one(graph: torch.fx.GraphModule, _: list[Tensor]) -> Run:
    return with_fewer_operators(graph)


_BACKENDS: dict[str, Any] = {"inductor": graphs.machine_code, "eager": _one_by_one, "cudagraphs": Captured}


def _kind(leaf: Any) -> Any:
    """What a graph depends on."""
    if not isinstance(leaf, Tensor):
        if type(leaf) is float:  # as text: NaN is itself, and -0 not 0
            return leaf.hex()
        return type(leaf), _Same(leaf) if callable(leaf) and not _is_hashable(leaf) else leaf
    strides: Any = leaf.stride() if leaf.layout is torch.strided and not leaf.is_nested else None
    if strides and 1 in leaf.shape:  # along which no step is taken
        strides = tuple(step for size, step in zip(leaf.shape, strides, strict=True) if size != 1)
    bits = leaf.requires_grad, leaf.is_conj(), leaf.is_neg()
    return leaf.shape, type(leaf) in PLAIN_TENSORS, strides, leaf.dtype, leaf.device, bits


def _modes(modules: list[nn.Module]) -> tuple[bool, ...]:
    """Which modules are in training mode."""
    return tuple([module.training for module in modules])


def _is_hashable(leaf: Any) -> bool:
    try:
        hash(leaf)
    except TypeError:
        return False
    return True


class _Same:
    """A function that cannot be hashed, such as the losses of a dataclass with a dict: equal only to itself."""

    def __init__(self, value: Any):
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and self.value is other.value

    def __hash__(self) -> int:
        return id(self.value)


def _ambient(tensors: list[Tensor]) -> tuple[Any, ...]:
    """What operators follow besides their arguments."""
    types = {"cpu", *(x.device.type for x in tensors)}
    autocast = [
        (kind, torch.get_autocast_dtype(kind))
        for kind in sorted(types)
        if torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)
    ]
    modes = torch.are_deterministic_algorithms_enabled(), torch.is_grad_enabled(), torch.is_inference_mode_enabled()
    return tuple(autocast), torch.get_default_dtype(), torch.get_default_device(), modes


def _check(arguments: Any, leaves: list[Any]) -> None:
    """Raise for a call that a graph of plain tensors would get wrong."""
    outermost = "Compile the outermost function: compiled(torch.func.grad(f)), compiled(random.keyed(f))."
    if transform_level() != _NO_TRANSFORM:
        raise ValueError(
            f"compiled: expected a call outside of transforms, found one under torch.func or forward mode. {outermost}"
        )
    for mode in function_modes():
        found = type(mode).__name__
        raise ValueError(f"compiled: expected a call outside of modes, found one inside {found}. {outermost}")
    for name, leaf in zip(tree_names(arguments), leaves, strict=True):
        at = f"as {_called(name)}"
        if not isinstance(leaf, Tensor):
            if not callable(leaf) and type(leaf).__hash__ is object.__hash__:
                raise TypeError(
                    f"compiled: expected tensors, containers, numbers, names or functions, found {described(leaf)} "
                    f"{at}, whose contents are not seen. Pass a dict or a tuple of them, or register the class with "
                    "torch.utils._pytree."
                )
        elif type(leaf) not in PLAIN_TENSORS or leaf.is_nested:
            found = "a nested tensor" if leaf.is_nested else type(leaf).__name__
            raise TypeError(
                f"compiled: expected plain tensors, found {found} {at}. torch.compile(f) takes some of the others."
            )
        elif leaf.requires_grad and torch.is_grad_enabled():
            raise ValueError(
                f"compiled: expected tensors that need no gradient, found one that requires grad {at}. Detach it, or "
                "compile the function that differentiates: compiled(torch.func.grad(f))."
            )


def _check_result(result: Any, leaves: list[Any]) -> None:
    """Raise for results that would hold tensors of the call that was written down."""
    for name, leaf in zip(tree_names(result), leaves, strict=True):
        if not isinstance(leaf, (Tensor, *_CONSTANTS)):
            raise TypeError(
                f"compiled: expected tensors, numbers and names as results, found {described(leaf)} as {name!r}. "
                "Return what it computes, such as pullback(weights) instead of pullback."
            )


_CONSTANTS = (bool, int, float, complex, str, bytes, torch.dtype, torch.device, Enum)


def _called(name: str) -> str:
    """An argument, by its name in the tree of positional and keyword arguments."""
    place, _, rest = name.partition(".")
    return f"argument {rest}" if place == "0" else repr(rest)


def _origin(node: torch.fx.Node, given: list[Any], structure: Any) -> str:
    """What an input or a constant of a graph is to the user."""
    if node.op == "get_attr":
        return f"a tensor {list(getattr(node.graph.owning_module, str(node.target)).shape)} that is no argument"
    names = tree_names(tree_unflatten(structure, given))
    inputs = [name for name, leaf in zip(names, given, strict=True) if isinstance(leaf, Tensor)]
    place = [other for other in node.graph.nodes if other.op == "placeholder"].index(node)
    return _called(inputs[place])
