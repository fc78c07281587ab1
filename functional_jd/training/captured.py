"""A graph of operators as one CUDA graph: captured once, then replayed by one launch."""

from collections.abc import Callable, Sequence
from itertools import filterfalse
from operator import is_
from threading import Lock
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.node import map_arg

from functional_jd.core.foreach import clone_each, copy_each
from functional_jd.torch_compat.graphs import base_of, written_bases

_WAITS = (  # operators of aten that wait for the device, which a CUDA graph cannot hold
    *("_linalg_eigh", "linalg_eig", "_linalg_svd", "linalg_lstsq", "cholesky_solve", "nonzero", "masked_select"),
    *("_local_scalar_dense", "_linalg_check_errors", "is_nonzero", "equal"),
)
_SMALL = 1 << 10  # elements of results that are copied together


class Donated(Tensor):
    """A tensor whose memory a later call has taken. Every operation on it raises."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = "compiled: the state must be the newest one, found a tensor that an earlier call has donated"
        raise RuntimeError(f"{found}. Use the state that this call returned, or pass donate=False.")


def prepare_capture(graph: fx.GraphModule) -> None:
    """Let a graph run on the device alone. Raise for operators that wait: after a failed capture no other succeeds."""
    for node in graph.graph.nodes:  # searches on the host have an operator for the device
        package, _, name = str(node.target).removesuffix(".default").partition(".")
        twin = getattr(torch.ops.functional_jd, f"{name}_on_device", None) if package == "functional_jd" else None
        node.target = node.target if twin is None else twin.default
    _copy_constants(graph)
    for node in graph.graph.nodes:
        name, unsafe = str(node.target), torch.Tag.cudagraph_unsafe in getattr(node.target, "tags", ())
        if unsafe or name.partition(".")[2].partition(".")[0] in _WAITS or _crosses(node):
            raise ValueError(
                f"compiled: the function must not wait for the device with backend='cudagraphs', found {name}. Take a "
                "rule with solver='device', keep all tensors on the device, or use backend='eager'."
            )


def _copy_constants(graph: fx.GraphModule) -> None:
    """Copy constants from the host to the device now, and not in each call."""
    written, values = {*written_bases(graph)}, dict[fx.Node, Any]()
    with torch.no_grad():
        for node in graph.graph.nodes:
            if node.op == "get_attr" and isinstance(found := getattr(graph, str(node.target), None), Tensor):
                values[node] = found
            known = node.op == "call_function" and values.keys() >= {*node.all_input_nodes}
            if known and not node.is_impure() and base_of(node) not in written:
                args, kwargs = map_arg((node.args, node.kwargs), values.__getitem__)
                values[node] = node.target(*args, **kwargs)
                if _crosses(node):
                    graph.register_buffer(f"_copied_{node.name}", values[node], persistent=False)
                    with graph.graph.inserting_before(node):
                        node.replace_all_uses_with(graph.graph.get_attr(f"_copied_{node.name}"))
                    graph.graph.erase_node(node)
    graph.recompile()


def write_donated(graph: fx.GraphModule, donated: int) -> None:
    """Let `adamw` move donated tensors where they are, unless something reads the old ones later, or as a direction."""
    nodes = [*graph.graph.nodes]
    places = {node: k for k, node in enumerate(nodes[:donated])}
    results = nodes[-1].args[0]
    for at, node in enumerate(nodes):
        if str(node.target) != "functional_jd.fused_adamw.default":
            continue
        leaves, directions, first, second, *_ = node.args
        old, new = [*leaves, *first, *second], {user.args[1]: user for user in node.users}
        strides = [x.meta["val"].stride() for x in old]
        alike = strides == strides[: len(leaves)] * 3 and {*old} <= places.keys()
        read = {base_of(x) for user in nodes[at + 1 :] for x in user.all_input_nodes} | {*map(base_of, directions)}
        if alike and read.isdisjoint(old) and all(results[places[x]] is new.get(k) for k, x in enumerate(old)):
            node.target = torch.ops.functional_jd.fused_adamw_in_place.default
            for k, x in enumerate(old):
                new[k].replace_all_uses_with(x)
                graph.graph.erase_node(new[k])
    graph.recompile()


def _crosses(node: fx.Node) -> bool:
    """Whether a node copies between the host and the device."""
    places = [x.meta["val"].is_cpu for x in (node, *node.all_input_nodes) if isinstance(x.meta.get("val"), Tensor)]
    return str(node.target) in ("aten._to_copy.default", "aten.copy_.default", "aten.to.device") and len({*places}) == 2


class Captured:
    """A captured graph; the first `donated` of the `arguments` give their memory to results, closures stay in place."""

    def __init__(self, graph: fx.GraphModule, inputs: Sequence[Tensor], arguments: int, donated: int):
        check_inputs(inputs)
        prepare_capture(graph)
        write_donated(graph, donated)
        self.lock, self.arguments, self.donated = Lock(), arguments, donated
        self.module = graph  # it holds the constants, which a replay reads where they are
        with torch.no_grad():
            self.static = [x.detach().clone() if k < arguments else x for k, x in enumerate(inputs)]
            self.newest: list[Tensor] = []  # the results that hold the memory of the donated ones
            self.graph, self.results = self._captured(graph.forward)
            small = [k for own, *_ in self.groups for k in own]
            self.large = [k for k in range(donated, len(self.results)) if k not in small]
            self.order = sorted(range(len(small + self.large)), key=(small + self.large).__getitem__)

    def _captured(self, run: Callable[..., Sequence[Tensor]]) -> tuple[Any, list[Tensor]]:
        run(*self.static)  # libraries and kernels are loaded, which a capture does not allow
        memory = lambda x: x.untyped_storage().data_ptr() if x.layout is torch.strided else None
        graph, written, d = torch.cuda.CUDAGraph(), [*map(memory, self.static[: self.arguments])], self.donated
        stream = torch.cuda.Stream(self.static[0].device)  # torch's own is one of the first device that it captured on
        with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
            results = list(run(*self.static))
            results[d:] = [x.clone() if memory(x) in written[:d] else x for x in results[d:]]
            moved = [k for k in range(d) if results[k] is not self.static[k]]
            apart = [results[k].clone() if memory(results[k]) in written else results[k] for k in moved]
            copy_each([self.static[k] for k in moved], apart)
            self.groups, self.bytes = joined_bytes(results, d)
        return graph, results

    def __call__(self, *tensors: Tensor) -> list[Tensor]:
        """Copy the inputs in, replay, and return fresh tensors; donated ones keep their static memory."""
        with self.lock, torch.no_grad():
            n = self.arguments
            if [x.data_ptr() for x in self.static[n:]] != [x.data_ptr() for x in tensors[n:]]:
                raise ValueError("compiled: tensors of closures must keep their memory, found another one. Pass it.")
            kept = len(self.newest) * (all(map(is_, tensors, self.newest)) and Donated not in map(type, self.newest))
            given = [x.detach() for x in tensors[kept:n]]  # the newest, if in another order
            given = clone_each(given) if self.newest and not kept else given
            taken = [*tensors[: self.donated], *(x for x in self.newest if not (kept or type(x) is Donated))]
            try:
                copy_each(self.static[kept:n], given)
                self.graph.replay()
            finally:  # whoever passed them, their memory is the next one
                torch.autograd.graph.increment_version(filterfalse(Tensor.is_inference, taken))
                for x in taken:
                    x.__class__ = Donated
                self.newest = []
            self.newest = [x.data for x in self.static[: self.donated]]  # `detach` takes twice as long
            return self.newest + self._fresh()

    def _fresh(self) -> list[Tensor]:
        """Copies of the results that are not donated: all small ones by one launch."""
        parts, found = torch.split_with_sizes(self.bytes.clone(), [size for *_, size in self.groups]), list[Tensor]()
        for (_, dtype, shape, _), part in zip(self.groups, parts, strict=True):
            found += part.view(dtype).view(shape).unbind()
        found += clone_each([self.results[k] for k in self.large])
        return [found[k] for k in self.order]


def joined_bytes(results: list[Tensor], start: int) -> tuple[list[Any], Tensor]:
    """The small results from `start` on, by dtype and shape, wide dtypes first; and the bytes of all of them."""
    places: dict[tuple[torch.dtype, torch.Size], list[int]] = {}
    for k, x in enumerate(results):
        if k >= start and x.layout is torch.strided and 0 < x.numel() <= _SMALL and not (x.is_complex() or x.is_neg()):
            places.setdefault((x.dtype, x.shape), []).append(k)
    ordered = sorted(places.items(), key=lambda group: -group[0][0].itemsize)
    groups = [(own, dtype, (len(own), *x), len(own) * x.numel() * dtype.itemsize) for (dtype, x), own in ordered]
    parts = [results[k].reshape(-1).view(torch.uint8) for own, *_ in groups for k in own]
    return groups, torch.cat(parts) if parts else torch.empty(0, dtype=torch.uint8)


def check_inputs(inputs: Sequence[Tensor]) -> None:
    """Raise unless all inputs are on one CUDA device."""
    devices = sorted({str(x.device) for x in inputs})
    if len(devices) != 1 or not inputs[0].is_cuda:
        found = f"on one CUDA device with backend='cudagraphs', found {', '.join(devices) or 'no tensor'}"
        raise ValueError(f"compiled: all tensors must be {found}. Move state and batch, or use backend='eager'.")
