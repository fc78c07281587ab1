"""Graphs of operators: written down without values, and searched for changes in place and for draws."""

import warnings
from collections.abc import Callable, Iterator, Sequence
from operator import getitem
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.overrides import has_torch_function

from functional_jd.torch_compat.torch_internals import private

_mode_stack: Any = private("overrides._get_current_function_mode_stack", "compiled")
_SYMBOLS: Any = {torch.SymInt, torch.SymFloat, torch.SymBool}
# Operators that change an argument although their schema does not tell.
_BATCH_NORMS = ("aten::native_batch_norm", "aten::cudnn_batch_norm", "aten::miopen_batch_norm")
_WRITES = ("index_add.", "index_copy.", "index_fill.", "index_put.", "scatter.", "scatter_add.", "scatter_reduce.")


def written(f: Callable[..., list[Any]], inputs: Sequence[Tensor]) -> fx.GraphModule:
    """The operators that a function calls, as a graph, by tensors without values; RuntimeError if it needs values."""
    from torch.fx.experimental.proxy_tensor import make_fx  # loads much: only when it is called for

    try:
        with warnings.catch_warnings(), torch.autograd.set_detect_anomaly(torch.is_anomaly_enabled(), check_nan=False):
            warnings.filterwarnings("error", message="Accessing the data pointer of FakeTensor")
            trace: Any = make_fx(f, _forms(inputs), tracing_mode="fake", _allow_non_fake_inputs=True)
            graph = trace(*(x.detach() for x in inputs))
    except (RuntimeError, TypeError, UserWarning) as error:
        if isinstance(error, TypeError) and not ("FakeTensor" in str(error) or "SymInt" in str(error)):
            raise
        raise _needs_values(f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}") from error
    outputs, outside = graph.graph.output_node().all_input_nodes, set[fx.Node]()
    for node in graph.graph.nodes:
        if str(node.target) in ("aten.view.default", "aten._unsafe_view.default"):
            node.target = torch.ops.aten.reshape.default  # strides without values are not always the real ones
        value = node.meta.get("val")
        if _outside(node) or not outside.isdisjoint(node.all_input_nodes):  # or follows from one
            outside.add(node)
        if str(node.target) == "aten._local_scalar_dense.default" and node in outside:
            raise _needs_values("the value of a tensor that is not an argument, and may change")
        numbers = value.shape if isinstance(value, Tensor) else [value]
        if _SYMBOLS & {*map(type, numbers)} or (node in outputs and getattr(value, "is_meta", False)):
            raise _needs_values(str(node.target))
        if str(node.target).startswith("c10d."):
            raise ValueError(f"compiled: f must not call torch.distributed, found {node.target}. Call it outside of f.")
    # A fast way that was given up leaves its operators: one that raised returned no value.
    for node in (x for x in reversed(graph.graph.nodes) if x.op == "call_function" and not x.users):
        returns = [str(x.type) for x in getattr(getattr(node.target, "_schema", None), "returns", ())]
        raised = "val" not in node.meta and any("Tensor" in x for x in returns)
        if raised or (returns and not node.is_impure()):  # others act by themselves, as asserts do
            graph.graph.erase_node(node)
    return graph


def _outside(node: fx.Node) -> bool:
    """Whether a node is a tensor of a closure. Tensors made of numbers are lifted at once."""
    return node.op == "get_attr" and not all(str(user.target).startswith("aten.lift_fresh") for user in node.users)


def _forms(inputs: Sequence[Tensor]) -> dict[Any, Any]:
    """Forms of operators: zeros of forward mode, which are on "meta", move; reading a value of a closure raises."""
    devices = {x.device for x in inputs}
    device: Any = {"device": next(iter(devices))} if len(devices) == 1 else {}

    def value(x: Tensor) -> Any:
        if type(x) in (Tensor, nn.Parameter):
            raise RuntimeError("the value of a tensor that is not an argument, and may change")
        return NotImplemented

    zeros = lambda size, **how: torch.zeros(size, **{**how, **device})
    forms = ("_efficientzerotensor", zeros), ("_local_scalar_dense", value)
    return {getattr(torch.ops.aten, name).default: form for name, form in forms}


def _needs_values(found: str) -> RuntimeError:
    return RuntimeError(
        f"compiled: expected operators whose shapes and choices do not depend on values, found {found}. Choose by "
        "torch.where instead of `if` and x[mask], keep numbers as tensors, without .item(), and pass CSR and CSC "
        "tensors as arguments. The guide 'Compile' has other forms."
    )


def function_modes() -> list[Any]:
    """The `TorchFunctionMode`s that are active, except for the one of `torch.set_default_device`."""
    modes = _mode_stack() if has_torch_function((0,)) else []
    return [mode for mode in modes if type(mode).__name__ != "DeviceContext"]


def written_bases(graph: fx.GraphModule) -> list[fx.Node]:
    """The nodes whose values one of the operators changes in place, themselves or through a view."""
    found: list[Any] = []
    for node in graph.graph.nodes:
        schema: Any = getattr(node.target, "_schema", None)
        for index, argument in enumerate(getattr(schema, "arguments", ())):
            moves = schema.name in _BATCH_NORMS and node.args[5]  # in training
            hidden = moves and argument.name.startswith("running_")
            if hidden or (argument.alias_info is not None and argument.alias_info.is_write):
                given = node.args[index] if index < len(node.args) else node.kwargs.get(argument.name)
                found += given if isinstance(given, list | tuple) else [given]
    return [base for x in found if isinstance(base := base_of(x), fx.Node)]


def draws(graph: fx.GraphModule) -> Iterator[fx.Node]:
    """The operators of a graph that draw numbers from a generator; attention without dropout draws none."""
    parts = [x for x in graph.modules() if isinstance(x, fx.GraphModule)]  # the graph, and those of `map` in it
    for own, node in ((part, node) for part in parts for node in part.graph.nodes):
        if torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ()):
            arguments = node.normalized_arguments(own, normalize_to_only_use_kwargs=True)
            if arguments is None or arguments.kwargs.get("dropout_p") != 0:
                yield node


def base_of(node: Any) -> Any:
    """The node that a node is a view of."""
    while isinstance(node, fx.Node) and node.op == "call_function":
        arguments = getattr(getattr(node.target, "_schema", None), "arguments", ())
        if node.target is not getitem and not (arguments and arguments[0].alias_info is not None):
            break
        node = node.args[0]
    return node


def with_inputs_for_constants(graph: fx.GraphModule) -> list[Tensor]:
    """Let a graph take the tensors of closures, not those made of numbers, as further inputs, and return them."""
    nodes = list(graph.graph.nodes)
    own = [x for x in nodes if x.op == "get_attr" and _outside(x) and isinstance(getattr(graph, x.target, 0), Tensor)]
    after = next((node for node in nodes if node.op != "placeholder" and node not in own), None)
    found: dict[str, tuple[fx.Node, Tensor]] = {}
    for node in own:
        if node.target not in found:
            with graph.graph.inserting_before(after):
                found[node.target] = graph.graph.placeholder(node.target), getattr(graph, node.target)
        node.replace_all_uses_with(found[node.target][0])
        graph.graph.erase_node(node)
    graph.recompile()
    return [tensor for _, tensor in found.values()]


def machine_code(graph: fx.GraphModule, inputs: Sequence[Tensor]) -> Callable[..., Any]:
    """Compile a graph by inductor, for tensors of these shapes."""
    compile_: Any = private("_inductor", "compiled").standalone_compile  # loads much
    # Up to torch 2.13 inductor writes through the strides of tensors that are expanded: it gets copies of them.
    for part in [x for x in graph.modules() if isinstance(x, fx.GraphModule)]:  # the graph, and those of `map` in it
        for node in [x for x in part.graph.nodes if any(map(str(x.target).__contains__, _WRITES))]:
            with part.graph.inserting_before(node):
                node.update_arg(0, part.graph.call_method("contiguous", node.args[:1]))
        part.recompile()
    with torch.no_grad():
        return compile_(graph, [x.detach() for x in inputs], dynamic_shapes="from_example_inputs")
