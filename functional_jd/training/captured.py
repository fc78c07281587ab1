"""A graph of operators as one CUDA graph: captured once, then replayed by one launch."""

from collections.abc import Callable, Sequence
from operator import is_
from threading import Lock
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from functional_jd.core.foreach import copy_each
from functional_jd.core.tree import structure_key, tree_flatten
from functional_jd.torch_compat.fewer_operators import with_fewer_operators

Run = Callable[..., Sequence[Tensor]]

_WAITS = {
    "aten._linalg_eigh": "an eigendecomposition",
    "aten.linalg_eig": "an eigendecomposition",
    "aten._linalg_svd": "a singular value decomposition",
    "aten.linalg_lstsq": "least squares",
    "aten.cholesky_solve": "cholesky_solve",
    "aten.nonzero": "sizes that depend on values",
    "aten.masked_select": "sizes that depend on values",
    "aten._local_scalar_dense": "a value on the host",
    "aten.is_nonzero": "a value on the host",
    "aten.equal": "a value on the host",
}
"""Operators that wait for the device, which a CUDA graph cannot hold, and the words for them."""


class Donated(Tensor):
    """A tensor whose memory a later call has taken. Every operation on it raises."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise RuntimeError(
            "compiled: the state must be the newest one, found a tensor that an earlier call has donated. Use the "
            "state that this call returned, or pass donate=False."
        )

    def __repr__(self) -> str:  # pyright: ignore[reportIncompatibleMethodOverride]
        return "Donated()"


def refuse_what_waits(graph: fx.GraphModule) -> None:
    """Raise for operators that no CUDA graph can hold: after a capture that fails, a process cannot capture again."""
    for node in graph.graph.nodes:
        name = str(node.target).removesuffix(".default").partition(".self")[0]
        words = _WAITS.get(name)
        if words is None and _crosses(node):
            words = "a copy between the host and the device"
        if words is None and torch.Tag.cudagraph_unsafe in getattr(node.target, "tags", ()):
            words = f"{name}, which runs on the host"
        if words is not None:
            raise ValueError(
                f"compiled: the function must not wait for the device with backend='cudagraphs', found {words} "
                f"({name}). Take a rule with solver='device', keep all tensors on the device, or use backend='eager'."
            )


def _crosses(node: fx.Node) -> bool:
    """Whether a node copies between a host and a device, in a call: constants are copied once, before."""
    value = node.meta.get("val")
    if not isinstance(value, Tensor) or not _devices(node):
        return False
    sources = {x.meta["val"].device.type for x in node.all_input_nodes if isinstance(x.meta.get("val"), Tensor)}
    return bool(sources) and ("cpu" in sources) != (value.device.type == "cpu") and len(sources) == 1


def _devices(node: fx.Node) -> bool:
    return str(node.target) in ("aten._to_copy.default", "aten.copy_.default", "aten.to.device")


def on_the_device(graph: fx.GraphModule) -> None:
    """Let searches run on the device: the operator of a search on the host has one beside it."""
    for node in graph.graph.nodes:
        name = str(node.target)
        if name.startswith("functional_jd.") and not name.endswith("_on_device.default"):
            twin = name.removeprefix("functional_jd.").removesuffix(".default") + "_on_device"
            if hasattr(torch.ops.functional_jd, twin):
                node.target = getattr(torch.ops.functional_jd, twin).default
    graph.recompile()


def refuse_inputs(inputs: Sequence[Tensor]) -> None:
    """Raise unless all inputs are on one CUDA device."""
    devices = {x.device for x in inputs}
    if len(devices) != 1 or devices.pop().type != "cuda":
        found = ", ".join(sorted({str(x.device) for x in inputs})) or "no tensor"
        raise ValueError(
            f"compiled: all tensors must be on one CUDA device with backend='cudagraphs', found {found}. Move the "
            "state and the batch there, or use backend='eager'."
        )


class Captured:
    """A captured graph with its static memory.

    Args:
        graph: operators, from inputs and constants to results.
        inputs: example inputs, then the constants of closures, which are read where they are.
        arguments: how many of these are inputs.
        donated: pairs of an input and a result that shall have the memory of this input.
    """

    def __init__(self, graph: fx.GraphModule, inputs: Sequence[Tensor], arguments: int, donated: dict[int, int]):
        refuse_inputs(inputs)
        on_the_device(graph)
        run = with_fewer_operators(graph)
        refuse_what_waits(graph)
        self.lock, self.donated = Lock(), {result: given for given, result in donated.items()}
        with torch.no_grad():
            self.static = [x.detach().clone() if k < arguments else x for k, x in enumerate(inputs)]
            self.arguments = arguments
            self.newest: list[Tensor | None] = [None] * arguments
            self.graph, self.results = self._captured(run)

    def _captured(self, run: Run) -> tuple[Any, list[Tensor]]:
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            run(*self.static)  # libraries and kernels are loaded, which a capture does not allow
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            results = list(run(*self.static))
            targets, sources = [], []
            for index, given in self.donated.items():
                if results[index] is not self.static[given]:
                    targets.append(self.static[given])
                    sources.append(self._apart(results[index]))
            if targets:
                copy_each(targets, sources)
        return graph, results

    def _apart(self, x: Tensor) -> Tensor:
        """A result that is another input is copied first: its memory is about to be written."""
        start = x.untyped_storage().data_ptr()
        shared = any(start == other.untyped_storage().data_ptr() for other in self.static[: self.arguments])
        return x.clone() if shared else x

    def __call__(self, *tensors: Tensor) -> list[Tensor]:
        """Copy the inputs in, replay, and return fresh tensors; donated ones keep their static memory."""
        with self.lock, torch.no_grad():
            targets, sources = [], []
            for own, given in zip(self.static[self.arguments :], tensors[self.arguments :], strict=True):
                if own.data_ptr() != given.data_ptr():
                    raise ValueError(
                        "compiled: tensors of closures must keep their memory, found one that moved. Pass it instead."
                    )
            for own, mine, given in zip(self.static, self.newest, tensors, strict=False):
                if given is not mine:
                    targets.append(own)
                    sources.append(given.detach())
            if targets:
                copy_each(targets, sources)
            self.graph.replay()
            found = [
                self.static[self.donated[k]].detach() if k in self.donated else torch.empty_like(x)
                for k, x in enumerate(self.results)
            ]
            fresh = [k for k in range(len(found)) if k not in self.donated]
            if fresh:
                copy_each([found[k] for k in fresh], [self.results[k] for k in fresh])
            for result, given in self.donated.items():
                tensors[given].__class__ = Donated
                if (mine := self.newest[given]) is not None:  # its memory holds the new result, whoever passed it
                    mine.__class__ = Donated
                self.newest[given] = found[result]
        return found


class Kinds:
    """What a graph depends on, of several leaves, with its hash: to hash hundreds takes as long as a small step."""

    def __init__(self, kinds: tuple[Any, ...]):
        self.kinds, self.hash = kinds, hash(kinds)

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, Kinds) and self.kinds == other.kinds)

    def __hash__(self) -> int:
        return self.hash


class Newest(NamedTuple):
    """The leaves of the newest donated result, whose kinds are those of the first argument."""

    leaves: Sequence[Any] = ()
    kinds: Kinds | None = None

    def kinds_of(
        self, given: Sequence[Any], first: tuple[Any, ...], kind_of: Callable[[Any], Any]
    ) -> tuple[Kinds, int]:
        """The kinds of the leaves of the first argument, and how many these are."""
        if self.kinds is not None and len(given) >= len(self.leaves) and all(map(is_, self.leaves, given)):
            return self.kinds, len(self.leaves)
        count = len(tree_flatten(first)[0])
        return Kinds(tuple(map(kind_of, given[:count]))), count


def flat_kind(kind: tuple[Any, ...]) -> list[Any]:
    """The kinds of all leaves, one by one."""
    return [own for part in kind[2:] for own in (part.kinds if isinstance(part, Kinds) else (part,))]


def refuse_without_cuda() -> None:
    """Raise where there is no CUDA device."""
    if not torch.cuda.is_available():
        raise ValueError(
            "compiled: backend='cudagraphs' needs a CUDA device, found none. Use backend='inductor' or 'eager'."
        )


def donated_pairs(first: tuple[Any, ...], result: Any) -> list[tuple[int, int]]:
    """Pairs of positions, among all tensors: a tensor of the first argument, and the one of the first result."""
    given, structure = tree_flatten(first)
    found, found_structure = tree_flatten((result[0] if type(result) is tuple and result else result,))
    same = structure_key(structure) == structure_key(found_structure)
    if not same or not all(map(_alike, given, found)):
        raise ValueError(
            "compiled: with donate=True the first result must have the structure, shapes and dtypes of the first "
            "argument, found others. Return the new state first, or pass donate=False."
        )
    return [(k, k) for k in range(sum(isinstance(x, Tensor) for x in given))]


def _alike(x: Any, y: Any) -> bool:
    if not isinstance(x, Tensor) or not isinstance(y, Tensor):
        return type(x) is type(y) and not isinstance(x, Tensor)
    return (x.shape, x.dtype, x.device) == (y.shape, y.dtype, y.device)
