"""The private names of torch that several files use, each with what happens once torch no longer has it.

A name that one feature alone needs stands in the file of this feature. `private(name, feature)` raises an error that
names the feature when it is used without the name; with `otherwise`, a replacement gives the same numbers in more time.
`tests/torch_compat/test_torch_internals.py` has a test for each name, which fails when torch renames it or changes what
it means; `test_next_torch.py` takes each away.
"""

import inspect
from collections.abc import Callable, Iterable
from types import FunctionType
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from functional_jd.torch_compat.private_names import Missing, missing, private

_Function = TypeVar("_Function", bound=Callable[..., Any])

_EXAMPLES = "the Gramian engine over examples"
_RECORDER = "the layer recorder"
_VMAPS = "random numbers and recurrent layers under torch.vmap"

_peek: Any = private("_C._functorch.peek_interpreter_stack", "every function")
_forward_ad: Any = private("autograd.forward_ad", "every function", "_current_level")
_interpreter: Any = private("_functorch.pyfunctorch.retrieve_current_functorch_interpreter", "compiled functions")
is_batched_tensor: Any = private("_C._functorch.is_batchedtensor", _EXAMPLES)
unwrapped: Any = private("_C._functorch.get_unwrapped", _EXAMPLES)
batch_dim: Any = private("_C._functorch.maybe_get_bdim", _EXAMPLES)
"""Whether the innermost `torch.vmap` hides a dimension of a tensor; the tensor below it, and which dimension it is."""
_add_batch_dim: Any = private("_C._functorch._add_batch_dim", _VMAPS)
interpreters: Any = private("_C._functorch.get_interpreter_stack", _VMAPS)
change_count: Any = private("Tensor._version.__get__", "the layer recorder and shards that are gathered again")
"""How often a tensor that no vmap hides was changed in place. Inside `torch_function_disabled`, no mode sees it."""

torch_function_disabled: Any = private("_C.DisableTorchFunction", f"{_RECORDER} and random numbers")
"""A context in which no `TorchFunctionMode` sees what is called, attributes of tensors included."""

traced_grad: Any = private("_functorch.eager_transforms._autograd_grad", "compiled Gramians and shared features")
"""`torch.autograd.grad` as torch.func calls it: the form that torch.compile traces inside a transform."""

dispatch_modes: Any = private("_C._len_torch_dispatch_stack", "random numbers", otherwise=lambda: 1)
"""How many `TorchDispatchMode`s see what is computed. One may record it: values that are read would be constants."""

REQUIRES_GRAD: Any = Tensor.requires_grad.__get__  # pyright: ignore[reportAttributeAccessIssue, reportFunctionMemberAccess]
GRAD_FN: Any = Tensor.grad_fn.__get__  # pyright: ignore[reportOptionalMemberAccess, reportAttributeAccessIssue]
GRAPH_ATTRIBUTES = (REQUIRES_GRAD, GRAD_FN)
"""The getters by which code asks whether autograd records a tensor, as a `TorchFunctionMode` sees them."""


class _UnknownContainers:
    """Stands in for torch's registry of containers: whatever is no tensor and none of Python's own may be one."""

    def keys(self) -> Any:
        return self

    def __rand__(self, kinds: set[type]) -> set[type]:
        if any(not issubclass(kind, Tensor) and kind.__module__ not in ("builtins", "torch") for kind in kinds):
            raise missing("utils._pytree.SUPPORTED_NODES", "registered containers")
        return set()

    def get(self, _: Any) -> None:
        return None


pytree_nodes: Any = private("utils._pytree.SUPPORTED_NODES", "registered containers", otherwise=_UnknownContainers())
"""The containers that are registered with torch's own pytree, with the functions that flatten them."""

name_record: Any = private("utils._pytree._register_namedtuple", "records in exports", otherwise=lambda *_, **__: None)
"""Names a class of named tuples in programs of torch.export that are saved."""


def constant_while_tracing(f: _Function) -> _Function:
    """`torch.compiler.assume_constant_result`, but for the import of the compiler, which takes as long as torch."""
    f._dynamo_marked_constant = True  # pyright: ignore[reportFunctionMemberAccess]
    return f


def under_functorch() -> bool:
    """Whether a transform of torch.func (vmap, grad, jvp, ...) is active."""
    return _peek() is not None


def under_transform() -> bool:
    """Whether torch.func, torch.compile or forward mode is active: plain autograd would fail, or would not be seen."""
    return torch.compiler.is_compiling() or _peek() is not None or _forward_ad._current_level >= 0


def under_functional_transform() -> bool:
    """`under_transform`, but for torch.compile alone."""
    if torch.compiler.is_compiling():  # to which the innermost transform is never None
        return functorch_depth() > 0 or _forward_ad._current_level >= 0
    return _peek() is not None or _forward_ad._current_level >= 0


def transform_level() -> tuple[Any, int]:
    """The number of active transforms: of torch.func, and of forward mode."""
    if torch.compiler.is_compiling():  # torch.compile traces this form only
        inner: Any = _interpreter().level() if under_functorch() else None
    else:
        top = _peek()
        inner = None if top is None else top.level()
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


def runs_inside(code: Any) -> bool:
    """Whether the caller runs inside the Python function with this code."""
    frame = inspect.currentframe()
    while frame is not None and frame.f_code is not code:
        frame = frame.f_back
    return frame is not None


def module_tensors(module: nn.Module) -> list[dict[str, Any]]:
    """The parameters and the buffers of a module, without those of its children, where it keeps them."""
    for name in ("_parameters", "_buffers"):
        if not hasattr(module, name):
            raise missing(f"nn.Module.{name}", "functional modules")
    return [module._parameters, module._buffers]  # pyright: ignore[reportPrivateUsage]


def untraced(handler: Any) -> Any:
    """Keep torch.compile from compiling the handler of a mode as a frame of its own, where a compiled function that
    fell back to eager mode runs under the mode. Where the caller is compiled, the handler is traced as always.
    """
    if _eval_frame:
        skip = _eval_frame._FrameAction.SKIP
        _eval_frame.set_code_exec_strategy(handler.__code__, _eval_frame._FrameExecStrategy(skip, skip))
    return handler


# Without it, torch's compiler raises its own errors where a compiled function inside the losses falls back.
_eval_frame: Any = private(
    "_C._dynamo.eval_frame", "compiled functions inside the losses",
    "set_code_exec_strategy", "_FrameExecStrategy", "_FrameAction", otherwise=False,
)  # fmt: skip


def is_batched(value: Any) -> bool:
    """Whether the innermost `torch.vmap` hides a dimension of this value."""
    return isinstance(value, Tensor) and is_batched_tensor(value)


def examples_first(x: Tensor) -> Tensor:
    """The tensor below `torch.vmap`, with the dimension that is hidden first."""
    inner, dim = unwrapped(x), batch_dim(x)
    return inner.movedim(dim, 0) if dim else inner


def graph_attribute(func: Any, x: Tensor) -> Any:
    """What a getter of `GRAPH_ATTRIBUTES` returns below the innermost `torch.vmap`, which says that nothing requires
    grad: code that asks would leave out its hooks without a word. An error where no answer serves all elements.
    """
    inner = unwrapped(x) if is_batched_tensor(x) else x
    value = func(inner)
    if value is not None and inner is not x and func == GRAD_FN:
        raise RuntimeError("grad_fn of a tensor under torch.vmap is that of all examples together")
    return value


@constant_while_tracing  # the compiled function has no transforms left
def functorch_depth() -> int:
    """The number of active transforms of torch.func."""
    return len(interpreters() or [])


def as_batch(x: Tensor, level: int) -> Tensor:
    """A tensor whose first dimension is the one that the vmap at this level hides."""
    return _add_batch_dim(x, 0, level)


def show_to_compiled_modes(functions: Iterable[Any]) -> None:
    """Let torch.compile hand these functions to a `TorchFunctionMode`, as eager mode does: it leaves out some that are
    no attributes of tensors, `torch.rand_like` and `torch.normal` among them, without a word.
    """
    # Not before something is compiled: the import is slow.
    private("_dynamo.variables.torch.get_overridable_functions", "keyed in compiled functions")().update(functions)


def _never_wrapped(_: Tensor) -> bool:
    """Stands in for `is_wrapped` where no transform is active."""
    if under_functorch():
        raise missing("_C._functorch.is_functorch_wrapped_tensor", "values under transforms")
    return False


is_wrapped: Any = private("_C._functorch.is_functorch_wrapped_tensor", "transforms", otherwise=_never_wrapped)
"""Whether a transform of torch.func hides the values of a tensor."""

# Without it, no values are shown under any `TorchDispatchMode`.
_fake_mode: Any = private("_guards.detect_fake_mode", "reprs", otherwise=lambda: dispatch_modes() or None)
# Without it, the repr of a tensor in torch's functionalization raises torch's own error.
_is_functional: Any = private("_is_functional_tensor", "reprs", otherwise=lambda _: False)


def has_values(value: Any) -> bool:
    """Whether it is a tensor with numbers to show, and not a stand-in of a transform or a tracer."""
    return type(value) in (Tensor, nn.Parameter) and value.device.type != "meta" and is_concrete(value)


def is_concrete(x: Tensor) -> bool:
    """Whether a tensor is no stand-in of a transform or a tracer."""
    return _fake_mode() is None and not _is_functional(x) and not is_wrapped(x)


def is_faked() -> bool:
    """Whether a mode is active under which tensors have shapes and no values, as where a graph is written down."""
    return bool(dispatch_modes()) and _fake_mode() is not None


def version(x: Tensor) -> int:
    """How often a tensor was changed in place."""
    with torch_function_disabled():
        return change_count(unwrapped(x) if is_batched_tensor(x) else x)


def ignoring_modes(f: Any) -> Callable[..., Any]:
    """A function of `torch.nn.functional` that is not passed to a mode as one op, so that the mode sees the ops
    inside it. There is no public way: `has_torch_function` is true wherever a mode is active.
    """
    ignored: dict[str, Any] = {f"has_torch_function{form}": lambda *_: False for form in ("", "_unary", "_variadic")}
    if ignored.keys().isdisjoint(getattr(getattr(f, "__code__", None), "co_names", ())):
        return Missing(f"overrides.has_torch_function in nn.functional.{f.__name__}", "what is drawn or recorded in it")
    return FunctionType(f.__code__, vars(nn.functional) | ignored, None, f.__defaults__)


transparent: dict[Any, Callable[..., Any]] = {
    f: ignoring_modes(f) for f in (nn.functional.multi_head_attention_forward,)
}
"""Functions that torch shows to a mode as one op, in a form that shows the ops inside."""
