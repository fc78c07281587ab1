"""Graphs of operators: written down without values, searched for changes in place, and compiled."""

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from functools import wraps
from operator import getitem
from typing import Any

import torch
from torch import Tensor, fx

from functional_jd.torch_compat.private_names import private
from functional_jd.torch_compat.torch_internals import constant_while_tracing

_number_of_function_modes: Any = private("_C._len_torch_function_stack", "compiled", otherwise=lambda: 1)

_map_only: Any = private("utils._pytree.tree_map_only", "compiled")
_DispatchMode: Any = private("utils._python_dispatch.TorchDispatchMode", "compiled", otherwise=nullcontext)

_VALUES_WANTED = ("DataDependentOutputException", "DynamicOutputShapeException", "UserWarning")


def written(f: Callable[..., list[Any]], inputs: Sequence[Tensor]) -> fx.GraphModule:
    """Return the operators that a function of tensors calls, as a graph.

    It is called once, with tensors that have shapes and no values: what asks for a value of theirs raises, and the
    inputs are as before.
    """
    make_fx: Any = private("fx.experimental.proxy_tensor.make_fx", "compiled")
    mode: Any = private("_subclasses.FakeTensorMode", "compiled")(allow_non_fake_inputs=True)
    without_values = [mode.from_tensor(x.detach(), static_shapes=True) for x in inputs]
    try:
        with mode, warnings.catch_warnings():
            warnings.filterwarnings("error", message="Accessing the data pointer of FakeTensor")
            graph = make_fx(_with_zero_tangents(f, inputs))(*without_values)
    except (RuntimeError, UserWarning) as error:
        kind = type(error).__name__
        lost = kind == "FakeTensorDeviceMismatchError" or "invalid gradient" in str(error)
        if lost and "meta" in str(error):
            raise _lost_tangents() from error
        if kind not in _VALUES_WANTED and "numpy()" not in str(error):
            raise
        raise RuntimeError(
            "compiled: expected operators whose shapes and choices do not depend on values, found "
            f"{str(error).splitlines()[0]}. Choose by torch.where in the place of `if` and of x[mask], index by "
            "x[i[None]][0] in the place of x[i], and keep numbers as tensors, without .item() or .numpy(): in losses, "
            "in rules, and in schedules, which get the steps as a tensor. Of torch.optim, Adam reads its count of "
            "steps: take adamw."
        ) from error

    values = [node.meta.get("val") for node in graph.graph.output_node().all_input_nodes]
    if any(isinstance(value, Tensor) and value.device.type == "meta" for value in values):
        raise _lost_tangents()
    return graph


class _ZeroTangents(_DispatchMode):
    """Puts on a device the zeros of forward mode that torch makes on "meta", where tensors have no values."""

    supports_higher_order_operators = True

    @classmethod
    def is_infra_mode(cls) -> bool:  # torch's control flow compiles what it is given, with this mode on as without
        return True

    ignore_compile_internals = is_infra_mode

    def __init__(self, device: torch.device):
        super().__init__()
        self.device = device

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if is_overload(func):  # control flow wants its containers as they are
            args, kwargs = _map_only((Tensor, torch.device), self._placed, (args, kwargs))
        return func(*args, **kwargs)

    def _placed(self, given: Any) -> Any:
        if isinstance(given, torch.device):
            return self.device if given.type == "meta" else given
        lost = given.device.type == "meta" and given._is_zerotensor()
        return torch.zeros(given.shape, dtype=given.dtype, device=self.device) if lost else given


def _with_zero_tangents(f: Callable[..., list[Any]], inputs: Sequence[Tensor]) -> Callable[..., list[Any]]:
    """The function, whose zero tangents are on the device of the inputs if they have one device."""
    devices = {x.device for x in inputs}

    @wraps(f)
    def run(*args: Any) -> list[Any]:
        with _ZeroTangents(*devices) if len(devices) == 1 else nullcontext():
            return f(*args)

    return run


def _lost_tangents() -> RuntimeError:
    """In forward mode torch 2.13 to 2.15 makes zero tangents of tensors without values on their device, "meta"."""
    return RuntimeError(
        "compiled: expected operators that torch differentiates without values, found forward mode (jvp, jacfwd, "
        "hessian) where it does not. Take reverse mode: torch.func.grad, jacrev; of second derivatives, jacrev twice. "
        "Residuals with a hessian, one per point, compile in per_example."
    )


@constant_while_tracing
def control_flow() -> str:
    """The name of torch's control flow whose body the compiler is tracing, such as "scan"; "" where there is none, or
    where torch does not tell.
    """
    try:
        translator: Any = private("_dynamo.symbolic_convert.InstructionTranslator", "control flow")
        tracer: Any = translator.current_tx().output.current_tracer
        while tracer is not None:
            if (name := str(tracer.source_target)) in _CONTROL_FLOW:
                return name
            tracer = tracer.parent
    except (AttributeError, RuntimeError):  # private, and only for a message
        pass
    return ""


_CONTROL_FLOW = ("scan", "cond", "while_loop", "associative_scan", "map_impl")


def refuse_control_flow(where: str) -> None:
    """Refuse to be traced by torch's `scan`, `cond` or `while_loop`, in which no mode can be entered."""
    if name := control_flow():
        raise ValueError(
            f"{where}: expected a call outside of the functions that torch's control flow takes, found one in {name}, "
            "which refuses the modes that derivatives need. Give it what torch.fx.experimental.proxy_tensor.make_fx(f)"
            "(*args) returned before, of an f whose results are clones."
        )


def changed_in_place(graph: fx.GraphModule) -> Iterator[fx.Node]:
    """The inputs and constants of a graph that one of its operators changes in place, themselves or through a view."""
    return (base for base in _written(graph) if base.op in ("placeholder", "get_attr"))


def written_bases(graph: fx.GraphModule) -> set[fx.Node]:
    """The nodes whose values one of the operators changes in place, themselves or through a view."""
    return set(_written(graph))


def _written(graph: fx.GraphModule) -> Iterator[fx.Node]:
    for node in graph.graph.nodes:
        for given in written_by(node.target, node.args, node.kwargs):
            for each in given if isinstance(given, list | tuple) else [given]:
                base = base_of(each)
                if isinstance(base, fx.Node):
                    yield base


def function_modes() -> list[Any]:
    """The `TorchFunctionMode`s that are active, but for the one of `torch.set_default_device`."""
    if _number_of_function_modes() == 0:
        return []
    device: Any = private("utils._device.DeviceContext", "compiled")
    modes: Any = private("overrides._get_current_function_mode_stack", "compiled")
    return [mode for mode in modes() if not isinstance(mode, device)]


def draws(graph: fx.GraphModule) -> Iterator[fx.Node]:
    """The operators of a graph that draw numbers from a generator; attention without dropout draws none."""
    seeded = torch.Tag.nondeterministic_seeded
    return (
        node
        for node in graph.graph.nodes
        if seeded in getattr(node.target, "tags", ()) and _argument(node, "dropout_p") != 0
    )


def _argument(node: fx.Node, name: str) -> Any:
    """An argument of an operator by its name, or its default; None where it has none of this name."""
    schema: Any = getattr(node.target, "_schema", None)
    for index, argument in enumerate(() if schema is None else schema.arguments):
        if argument.name == name:
            return node.args[index] if index < len(node.args) else node.kwargs.get(name, argument.default_value)
    return None


def written_by(operator: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[Any]:
    """The arguments that a call of an operator writes into, each a tensor or a list, or what stands for them."""
    schema = getattr(operator, "_schema", None)
    if schema is None:
        return
    for index, argument in enumerate(schema.arguments):
        hidden = schema.name in _BATCH_NORMS and argument.name.startswith("running_")
        if hidden or (argument.alias_info is not None and argument.alias_info.is_write):
            yield args[index] if index < len(args) else kwargs.get(argument.name)


def base_of(node: Any) -> Any:
    """What a node is a view of."""
    while isinstance(node, fx.Node) and node.op == "call_function" and _is_view(node.target):
        node = node.args[0]
    return node


def is_overload(target: Any) -> bool:
    """Whether a node calls an operator, of which torch knows what it changes."""
    return getattr(target, "_schema", None) is not None


def _is_view(target: Any) -> bool:
    if target is getitem or str(target) == "aten._unsafe_view.default":  # one of several; a view that says so to nobody
        return True
    schema = getattr(target, "_schema", None)
    return schema is not None and bool(schema.arguments) and schema.arguments[0].alias_info is not None


_BATCH_NORMS = ("aten::native_batch_norm", "aten::cudnn_batch_norm", "aten::miopen_batch_norm")
"""Operators that change an argument without saying so."""


def with_inputs_for_constants(graph: fx.GraphModule) -> list[Tensor]:
    """Let a graph take the tensors of closures as further inputs, and return them: a compiler would keep their values.

    Tensors that the function made of numbers stay in the graph.
    """
    nodes = list(graph.graph.nodes)
    after = next((node for node in nodes if node.op != "placeholder"), None)
    found: dict[str, tuple[fx.Node, Tensor]] = {}
    for node in nodes:
        made_here = all(str(user.target).startswith("aten.lift_fresh") for user in node.users)
        if node.op != "get_attr" or made_here or not isinstance(getattr(graph, node.target, None), Tensor):
            continue
        if node.target not in found:
            with graph.graph.inserting_before(after):
                found[node.target] = graph.graph.placeholder(node.target), getattr(graph, node.target)
        node.replace_all_uses_with(found[node.target][0])
        graph.graph.erase_node(node)
    graph.recompile()
    return [tensor for _, tensor in found.values()]


def machine_code(graph: fx.GraphModule, inputs: Sequence[Tensor]) -> Callable[..., Any]:
    """Compile a graph by inductor, for tensors of these shapes."""
    for node in graph.graph.nodes:
        if str(node.target) == "aten._efficientzerotensor.default":  # it has no memory, which inductor would read
            node.target = torch.ops.aten.zeros.default
    graph.recompile()
    compile_: Any = private("_inductor.standalone_compile", "compiled")  # loads much: only when it is called for
    with torch.no_grad():
        return compile_(graph, [x.detach() for x in inputs], dynamic_shapes="from_example_inputs")
