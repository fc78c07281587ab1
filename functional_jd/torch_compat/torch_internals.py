"""Every private name of torch that the package uses: what it is for, and what breaks without it.

`tests/torch_compat/test_torch_internals.py` has a test for each, which fails when torch renames it or changes what it
means. "Loudly" says that an exception is raised without the name; "quietly", that only time or memory is lost.

| name of torch | used by | without it |
| --- | --- | --- |
| `_C._functorch.peek_interpreter_stack` | `under_functorch` | loudly: every function asks |
| `autograd.forward_ad._current_level` | `under_transform`, `transform_level` | loudly |
| `_C._functorch.maybe_current_level`, `retrieve_current_functorch_interpreter` | `transform_level` | loudly |
| `_C._functorch.is_batchedtensor`, `get_unwrapped`, `maybe_get_bdim` | the Gramian of examples | loudly |
| `_C._functorch.get_interpreter_stack`, `CVmapInterpreterPtr`, `_add_batch_dim` | `keyed`, under vmap | loudly |
| `_dynamo.variables.torch.get_overridable_functions` | `keyed`, compiled | wrong numbers |
| `_C._functorch.is_functorch_wrapped_tensor` | checks of values, reprs | loudly |
| `_C._dynamo.eval_frame.set_code_exec_strategy`, `_FrameExecStrategy`, `_FrameAction` | handlers of modes | loudly |
| `_dynamo_marked_constant` | answers that are constant while tracing | loudly |
| `_C._functorch._unwrap_batched`, `_autograd_grad` | compiled Gramians | loudly |
| `autograd.graph._engine_run_backward` | `vjp` | loudly |
| `_C.DisableTorchFunction` | the layer recorder | loudly |
| `_C._len_torch_function_stack`, `_get_function_stack_at` | op tables inside op tables | loudly |
| `_C._len_torch_dispatch_stack` | random numbers without tensors | loudly |
| `_guards.detect_fake_mode`, `_is_functional_tensor` | reprs while tracing | loudly |
| `_fused_adamw_` | `adamw`, eager | loudly |
| `Node._input_metadata` | the choice of row groups, losses that were stacked | loudly |
| `Node.name` of `torch.stack`, `Tensor._backward_hooks` | losses that were stacked | time; hooks left out |
| `_weight_norm` | second derivatives of `weight_norm` | loudly |
| `Tensor._version`, `Tensor._is_view` | the layer recorder, shards that are gathered again | loudly |
| `ops.aten._unsafe_view` | the layer recorder | loudly |
| `ops.aten._cdist_forward`, `_cdist_backward` | rows of distances | loudly |
| `ops._c10d_functional` | collectives | loudly |
| `DTensor.__new__`, `DTensor._spec` | closing shards | loudly |
| `utils._pytree.SUPPORTED_NODES` | containers registered with torch | loudly |
| `_C._autograd._top_saved_tensors_default_hooks` | modes where checkpoints run again | loudly |
| `_C._autograd._push_saved_tensors_default_hooks`, `_pop_saved_tensors_default_hooks` | the same | loudly |
| `_C._autograd._saved_tensors_hooks_get_disabled_error_message` | the same | loudly |
| `frame` of `utils.checkpoint._checkpoint_hook`, `_CheckpointFrame.recompute_fn` | the same | loudly |
| `gen` and `new_frame` inside `utils.checkpoint.checkpoint` (`_checkpoint_impl`) | `calling_modules` | loudly |
| `nn.Module._call_impl`, `_parameters`, `_buffers` | `calling_modules`, `module_tensors` | loudly |
| `nn.Module._apply` | `functional`, for modules that convert themselves | parameters of other dtypes |
| globals of `nn.functional.multi_head_attention_forward` | attention weights in the Gramian engine | quietly |
| globals of functions of `nn.functional` that draw | `keyed` | loudly |
"""

import inspect
from collections.abc import Callable, Container, Iterable
from math import prod
from types import FrameType, FunctionType
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch._C import _get_function_stack_at, _len_torch_dispatch_stack, _len_torch_function_stack  # pyright: ignore
from torch._C._dynamo.eval_frame import _FrameAction, _FrameExecStrategy, set_code_exec_strategy  # pyright: ignore
from torch._functorch.eager_transforms import _autograd_grad  # pyright: ignore
from torch._functorch.pyfunctorch import retrieve_current_functorch_interpreter
from torch._guards import detect_fake_mode
from torch.autograd.function import FunctionCtx
from torch.autograd.graph import GradientEdge, _engine_run_backward, get_gradient_edge  # pyright: ignore
from torch.utils import _pytree as torch_pytree
from torch.utils import checkpoint as torch_checkpoint

_Function = TypeVar("_Function", bound=Callable[..., Any])
_functorch: Any = torch._C._functorch  # pyright: ignore[reportPrivateUsage, reportAttributeAccessIssue]
_forward_ad: Any = torch.autograd.forward_ad
_autograd: Any = torch._C._autograd  # pyright: ignore[reportPrivateUsage, reportAttributeAccessIssue]

torch_function_disabled: Any = torch._C.DisableTorchFunction  # pyright: ignore[reportPrivateUsage, reportAttributeAccessIssue]
"""A context in which no `TorchFunctionMode` sees what is called, attributes of tensors included."""

pytree_nodes: dict[Any, Any] = torch_pytree.SUPPORTED_NODES
"""The containers that are registered with torch's own pytree, with the functions that flatten them."""

traced_grad: Any = _autograd_grad
"""`torch.autograd.grad` as torch.func calls it: the form that torch.compile traces inside a transform."""

run_backward: Any = _engine_run_backward
"""What `torch.autograd.grad` calls after it has asked about each tensor."""

dispatch_modes: Any = _len_torch_dispatch_stack
"""How many `TorchDispatchMode`s see what is computed. One may record it: values that are read would be constants."""

fused_adamw: Any = torch._fused_adamw_  # pyright: ignore[reportPrivateUsage]
"""The in-place kernel behind `torch.optim.AdamW(fused=True)`."""

weight_norm: Any = torch._weight_norm  # pyright: ignore[reportPrivateUsage]
"""The function that `torch.nn.utils.parametrizations.weight_norm` calls."""

cdist_forward, cdist_backward = torch.ops.aten._cdist_forward, torch.ops.aten._cdist_backward
"""The kernel of `torch.cdist`, and its derivative by the first points."""

collective_ops: Any = torch.ops._c10d_functional
"""Functional collectives: all-reduce, broadcast, gather and scatter as operators."""

GRAPH_ATTRIBUTES: Any = (Tensor.requires_grad.__get__, Tensor.grad_fn.__get__)  # pyright: ignore
"""The getters by which code asks whether autograd records a tensor, as a `TorchFunctionMode` sees them."""

_top_hooks: Any = _autograd._top_saved_tensors_default_hooks
# From torch 2.15 on, `checkpoint` is a decorator too and hands its work on.
_CHECKPOINT: Any = inspect.unwrap(getattr(torch_checkpoint, "_checkpoint_impl", torch_checkpoint.checkpoint)).__code__
_REENTRANT_CHECKPOINT: Any = torch_checkpoint.CheckpointFunction.forward.__code__
_CALL: Any = nn.Module._call_impl.__code__  # pyright: ignore[reportPrivateUsage]

# From torch 2.14 on it is written in C and has no frame.
_APPLY: Any = getattr(torch.autograd.Function.apply, "__code__", None)


def constant_while_tracing(f: _Function) -> _Function:
    """`torch.compiler.assume_constant_result`, but for the import of the compiler, which takes as long as torch."""
    f._dynamo_marked_constant = True  # pyright: ignore[reportFunctionMemberAccess]
    return f


def sharded_like(shard: Tensor, like: Any) -> Any:
    """A `DTensor` with the layout of another of its dtype: a tenth of the time of `DTensor.from_local`."""
    return type(like)(shard, like._spec, requires_grad=False)


def under_functorch() -> bool:
    """Whether a transform of torch.func (vmap, grad, jvp, ...) is active."""
    return _functorch.peek_interpreter_stack() is not None


def under_transform() -> bool:
    """Whether torch.func, torch.compile, forward mode or inference mode is active, so that plain autograd on detached
    tensors would fail or would not be seen.
    """
    return (
        torch.compiler.is_compiling()
        or under_functorch()
        or _forward_ad._current_level >= 0
        or torch.is_inference_mode_enabled()
    )


def transform_level() -> tuple[Any, int]:
    """The number of active transforms: of torch.func, and of forward mode."""
    if torch.compiler.is_compiling():  # torch.compile traces this form only
        inner: Any = retrieve_current_functorch_interpreter().level() if under_functorch() else None
    else:
        inner = _functorch.maybe_current_level()
    return inner, _forward_ad._current_level


def function_name(func: Any) -> str:
    """The name of a function that torch hands to a `TorchFunctionMode`, the same in eager mode and while compiling."""
    # From torch 2.15 on, torch.compile takes the name from the code object, which `functools.wraps` does not rename:
    # `Tensor.__pow__`, `Tensor.__rtruediv__` and the other Python operators are all called "wrapped" there.
    return getattr(getattr(func, "__wrapped__", func), "__name__", "")


def traceable(func: Any) -> Any:
    """The form of a function in which torch.compile traces it inside the handler of a mode: before torch 2.14 it cannot
    trace a method of `torch.Tensor` that calls `super()`, and this is the only one that stands for an op.
    """
    return torch.unflatten if func is Tensor.unflatten else func


def in_custom_function() -> bool:
    """Whether the caller runs inside the forward of a `torch.autograd.Function`."""
    if torch.compiler.is_compiling():  # torch.compile traces no frames
        return False
    frame = inspect.currentframe()
    if _APPLY is not None:
        while frame is not None and frame.f_code is not _APPLY:
            frame = frame.f_back
    else:
        while frame is not None and not _is_forward(frame):
            frame = frame.f_back
    return frame is not None


def _is_forward(frame: FrameType) -> bool:
    """Whether a frame is that of the forward of a custom function: by its context, or by its code."""
    code = frame.f_code
    first = frame.f_locals.get(code.co_varnames[0]) if code.co_argcount else None
    if isinstance(first, FunctionCtx) or code.co_name != "forward" or isinstance(first, nn.Module):
        return isinstance(first, FunctionCtx)
    classes: list[Any] = [torch.autograd.Function]
    for cls in classes:
        classes += cls.__subclasses__()
    # Below `functools.wraps`: the code of a wrapper is that of all functions that it wraps.
    return any(getattr(inspect.unwrap(cls.forward), "__code__", None) is code for cls in classes)


def saved_tensors_hook() -> Any:
    """The innermost function that packs what autograd saves, which identifies the checkpoint that runs; or None."""
    hooks = _top_hooks(False)
    return None if hooks is None else hooks[0]


def checkpoint_frames(around: Any = None) -> list[Any]:
    """The records that `torch.utils.checkpoint` keeps of the checkpoints that run, from the innermost to the last one
    inside the hook `around`.
    """
    hooks: list[Any] = []
    while (top := _top_hooks(False)) is not None and top[0] is not around:
        hooks.append(top)
        if _autograd._saved_tensors_hooks_get_disabled_error_message() is not None:
            break  # inside a transform, where no checkpoint can begin: they could not be put back
        _autograd._pop_saved_tensors_default_hooks()
    else:
        for pair in reversed(hooks):
            _autograd._push_saved_tensors_default_hooks(*pair)
    packs = [pack for pack, _ in hooks if getattr(pack, "__qualname__", "").startswith("_checkpoint_hook.")]
    return [pack.__closure__[pack.__code__.co_freevars.index("frame")].cell_contents for pack in packs]


def calling_modules(checkpoint_frame: Any) -> list[nn.Module]:
    """The modules that are being called around a checkpoint, from the innermost to the outermost."""
    found: list[nn.Module] = []
    frame = inspect.currentframe()
    while frame is not None:
        if frame.f_code is _CALL:
            found.append(frame.f_locals["self"])
        elif frame.f_code is _CHECKPOINT and _record_of(frame) is checkpoint_frame:
            found.clear()
        frame = frame.f_back
    return found


def _record_of(frame: FrameType) -> Any:
    """The record of the checkpoint whose Python frame this is; None while it is being made."""
    return frame.f_locals["gen"].gi_frame.f_locals.get("new_frame")


def in_reentrant_checkpoint() -> bool:
    """Whether the caller runs inside `torch.utils.checkpoint(..., use_reentrant=True)`."""
    frame = inspect.currentframe()
    while frame is not None and frame.f_code is not _REENTRANT_CHECKPOINT:
        frame = frame.f_back
    return frame is not None


def module_tensors(module: nn.Module) -> list[dict[str, Any]]:
    """The parameters and the buffers of a module, without those of its children, where it keeps them."""
    return [module._parameters, module._buffers]  # pyright: ignore[reportPrivateUsage]


def converts_as_usual(module: nn.Module) -> bool:
    """Whether `to`, `float` and the like do to a module what they do to every `nn.Module`."""
    return type(module)._apply is nn.Module._apply  # pyright: ignore[reportPrivateUsage]


def innermost_mode() -> Any:
    """The `TorchFunctionMode` that sees an op first, or None."""
    depth = _len_torch_function_stack()
    return _get_function_stack_at(depth - 1) if depth else None


def untraced(handler: Any) -> Any:
    """Keep torch.compile from compiling the handler of a mode as a frame of its own, where a compiled function that
    fell back to eager mode runs under the mode. Where the caller is compiled, the handler is traced as always.
    """
    set_code_exec_strategy(handler.__code__, _FrameExecStrategy(_FrameAction.SKIP, _FrameAction.SKIP))
    return handler


def is_batched(value: Any) -> bool:
    """Whether the innermost `torch.vmap` hides a dimension of this value."""
    return isinstance(value, Tensor) and _functorch.is_batchedtensor(value)


def unwrap_batched(x: Tensor) -> tuple[Tensor, int]:
    """The tensor with the dimension that `torch.vmap` hides, and where that dimension is."""
    return _functorch.get_unwrapped(x), _functorch.maybe_get_bdim(x)


def graph_attribute(func: Any, x: Tensor) -> Any:
    """What a getter of `GRAPH_ATTRIBUTES` returns below the innermost `torch.vmap`, which says that nothing requires
    grad: code that asks would leave out its hooks without a word. An error where no answer serves all elements.
    """
    inner = _base(x)
    value = func(inner)
    if value is not None and inner is not x and func == GRAPH_ATTRIBUTES[1]:
        raise RuntimeError("grad_fn of a tensor under torch.vmap is that of all examples together")
    return value


def varies_in_vmap(x: Tensor, level: int) -> bool:
    """Whether a tensor differs from one element of the vmap at this level to the next; torch.compile traces this."""
    return _functorch._unwrap_batched(x, level)[1] is not None


@constant_while_tracing  # the compiled function has no transforms left
def functorch_depth() -> int:
    """The number of active transforms of torch.func."""
    return len(_functorch.get_interpreter_stack() or [])


@constant_while_tracing
def vmaps_inside(level: int) -> list[tuple[int, int, str]]:
    """The `torch.vmap`s that were entered inside this level, outermost first: level, batch size, randomness."""
    found: list[tuple[int, int, str]] = []
    for interpreter in _functorch.get_interpreter_stack() or []:
        if interpreter.level() > level and interpreter.key() == _functorch.TransformType.Vmap:
            vmap = _functorch.CVmapInterpreterPtr(interpreter)
            found.append((interpreter.level(), vmap.batchSize(), vmap.randomness().name.lower()))
    return found


def show_to_compiled_modes(functions: Iterable[Any]) -> None:
    """Let torch.compile hand these functions to a `TorchFunctionMode`, as eager mode does: it leaves out some that are
    no attributes of tensors, `torch.rand_like` and `torch.normal` among them, without a word.
    """
    from torch._dynamo.variables.torch import get_overridable_functions  # not before something is compiled: it is slow

    get_overridable_functions().update(functions)


def as_batch(x: Tensor, level: int) -> Tensor:
    """A tensor whose first dimension is the one that the vmap at this level hides."""
    return _functorch._add_batch_dim(x, 0, level)


def is_wrapped(x: Tensor) -> bool:
    """Whether a transform of torch.func hides the values of a tensor."""
    return _functorch.is_functorch_wrapped_tensor(x)


def has_values(value: Any) -> bool:
    """Whether it is a tensor with numbers to show, and not a stand-in of a transform or a tracer."""
    return (
        type(value) in (Tensor, nn.Parameter)
        and value.device.type != "meta"
        and detect_fake_mode() is None
        and not torch._is_functional_tensor(value)  # pyright: ignore[reportPrivateUsage]
        and not is_wrapped(value)
    )


def _base(x: Tensor) -> Tensor:
    """The tensor below vmap: it counts changes in place, and knows whether it is a view."""
    return _functorch.get_unwrapped(x) if _functorch.is_batchedtensor(x) else x


def version(x: Tensor) -> int:
    """How often a tensor was changed in place."""
    with torch_function_disabled():
        return _base(x)._version


def without_view(x: Tensor, shape: Any = None) -> Tensor:
    """The same numbers, in this shape, without a copy and not as a view, which in place changes give another graph."""
    alone = shape is None and not _base(x)._is_view()
    return x if alone else torch.ops.aten._unsafe_view.default(x, x.shape if shape is None else shape)


def graph_nodes(outputs: list[Tensor], inputs: Iterable[Tensor] = ()) -> list[Any]:
    """The nodes that a backward pass from these outputs may visit, without those behind the inputs."""
    ends = {get_gradient_edge(x).node for x in inputs}
    return nodes_from([y.grad_fn for y in outputs if y.grad_fn is not None], ends)


def nodes_from(roots: Iterable[Any], ends: Container[Any] = ()) -> list[Any]:
    """The nodes that a backward pass from these nodes may visit, without those behind the ends."""
    # Dicts keep the order, so that what is appended below is visited too.
    found = dict.fromkeys(roots)
    order: list[Any] = list(found)
    for node in order:
        for following, _ in () if node in ends else node.next_functions:
            if following is not None and following not in found:
                found[following] = None
                order.append(following)
    return order


def scalars_of_stack(y: Tensor) -> list[tuple[Tensor, Any]]:
    """Pairs of a value and what `torch.autograd.grad` takes as its output: of scalars that `torch.stack` joined, each
    by itself; of all else, the tensor.
    """
    node: Any = y.grad_fn
    if node is None or node.name() != "StackBackward0" or y.ndim != 1 or y._backward_hooks:
        return [(y, y)]
    edges = node.next_functions
    # A part without a gradient, or one that was cast as it was stacked, has no edge that stands for it.
    if any(part is None or part._input_metadata[index].dtype != y.dtype for part, index in edges):
        return [(y, y)]
    return [(value, GradientEdge(*edge)) for value, edge in zip(y.detach().unbind(), edges, strict=True)]


def largest_gradient(graph: list[Any], inputs: tuple[Tensor, ...]) -> int:
    """The number of elements of the largest gradient on the way to the inputs, without these and their transposes."""
    ends = {shape for x in inputs for shape in (tuple(x.shape), tuple(x.shape)[::-1])}
    entries = (entry for node in graph for entry in node._input_metadata if not entry.is_nested_tensor)
    return max((prod(entry.shape) for entry in entries if tuple(entry.shape) not in ends), default=0)


def ignoring_modes(f: Any) -> Callable[..., Any]:
    """A function of `torch.nn.functional` that is not passed to a mode as one op, so that the mode sees the ops
    inside it. There is no public way: `has_torch_function` is true wherever a mode is active.
    """
    ignored: dict[str, Any] = {f"has_torch_function{form}": lambda *_: False for form in ("", "_unary", "_variadic")}
    return FunctionType(f.__code__, vars(nn.functional) | ignored, None, f.__defaults__)


transparent: dict[Any, Callable[..., Any]] = {
    f: ignoring_modes(f) for f in (nn.functional.multi_head_attention_forward,)
}
"""Functions that torch shows to a mode as one op, in a form that shows the ops inside."""
