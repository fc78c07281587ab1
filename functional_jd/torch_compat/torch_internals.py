"""The private names of torch that several files use, each with what happens once torch no longer has it.
A name that one feature alone needs stands in the file of this feature. `test_torch_internals.py` tests each name.
"""

import json
from collections.abc import Callable, Iterable
from pkgutil import resolve_name
from types import FunctionType
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

SUPPORTED = "torch>=2.11"  # as in pyproject.toml


class Missing:
    """Stands in for a name that torch does not have, and raises once it is called or asked for an attribute."""

    def __init__(self, name: str, feature: str):
        self.absent = name.removesuffix(".__get__"), feature

    def __call__(self, *_: Any, **__: Any) -> Any:
        name, feature = self.absent
        raise RuntimeError(
            f"functional_jd: expected torch.{name} for {feature}, found torch {torch.__version__} "
            f'without it; install another: pip install "{SUPPORTED}".'
        )

    __getattr__ = __call__


def private(name: str, feature: str, otherwise: Any = None) -> Any:
    """An object of torch by its name, bound once; where torch has none, `otherwise`, or a `Missing` of a `feature`."""
    try:
        return resolve_name(f"torch.{name}")
    except (AttributeError, ImportError):
        return Missing(name, feature) if otherwise is None else otherwise


_Function = TypeVar("_Function", bound=Callable[..., Any])
_VMAPS = "functions under torch.vmap"

_interpreters: Any = private("_C._functorch.get_interpreter_stack", "every function")
_forward_ad: Any = private("autograd.forward_ad", "every function")
_unwrap_batched: Any = private("_C._functorch._unwrap_batched", _VMAPS)
add_batch_dim: Any = private("_functorch.predispatch._add_batch_dim", _VMAPS)
"""`add_batch_dim(x, dim, level)`: a tensor with the dimension that the vmap at this level hides."""

change_count: Any = private("Tensor._version.__get__", "the layer recorder and shards that are gathered again")
"""How often a tensor that no vmap hides was changed in place. Inside `torch_function_disabled`, no mode sees it."""

torch_function_disabled: Any = private("_C.DisableTorchFunction", "the layer recorder and random numbers")
"""A context in which no `TorchFunctionMode` sees what is called, attributes of tensors included."""

traced_grad: Any = private("_functorch.eager_transforms._autograd_grad", "compiled Gramians and shared features")
"""`torch.autograd.grad` as torch.func calls it: the form that torch.compile traces inside a transform."""

dispatch_modes: Any = private("_C._len_torch_dispatch_stack", "random numbers", otherwise=lambda: 1)
"""How many `TorchDispatchMode`s see what is computed. One may record it: values that are read would be constants."""

pytree_nodes: Any = private("utils._pytree.SUPPORTED_NODES", "registered containers")
"""The containers that are registered with torch's own pytree, with the functions that flatten them."""

innermost = torch.func.debug_unwrap
"""The tensor inside the wrappers of torch.func's transforms."""

GRAD_FN: Any = Tensor.grad_fn.__get__  # pyright: ignore[reportOptionalMemberAccess, reportAttributeAccessIssue]
GRAPH_ATTRIBUTES: tuple[Any, ...] = (Tensor.requires_grad.__get__, GRAD_FN)  # pyright: ignore
"""The getters by which code asks whether autograd records a tensor, as a `TorchFunctionMode` sees them."""


def constant_while_tracing(f: _Function) -> _Function:
    """`torch.compiler.assume_constant_result` without the import of the compiler, which takes as long as torch."""
    f._dynamo_marked_constant = True  # pyright: ignore[reportFunctionMemberAccess]
    return f


@constant_while_tracing  # the compiled function has no transforms left
def functorch_depth() -> int:
    """The number of active transforms of torch.func."""
    return len(_interpreters() or ())


def under_functorch() -> bool:
    """Whether a transform of torch.func (vmap, grad, jvp, ...) is active."""
    return functorch_depth() > 0 if torch.compiler.is_compiling() else _interpreters() is not None


def under_transform() -> bool:
    """Whether torch.func, torch.compile or forward mode is active: plain autograd would fail, or would not be seen."""
    return torch.compiler.is_compiling() or _interpreters() is not None or _forward_ad._current_level >= 0


NO_TRANSFORM = (None, -1)
"""The result of `transform_level` if neither torch.func nor forward mode is active."""


def transform_level() -> tuple[Any, int]:
    """The innermost transform: that of torch.func, counted from 1, or None; and that of forward mode."""
    depth = functorch_depth() if torch.compiler.is_compiling() else len(_interpreters() or ())
    return depth or None, _forward_ad._current_level


def differentiates() -> bool:
    """Whether a transform of torch.func other than vmap is active."""
    return any(interpreter.key().name != "Vmap" for interpreter in _interpreters() or ())


@constant_while_tracing
def vmaps_inside(level: int) -> list[tuple[int, int, str]]:
    """The `torch.vmap`s that were entered inside this level, outermost first: level, batch size, randomness."""
    vmaps = [x for x in _interpreters() or () if x.level() > level and x.key().name == "Vmap"]
    told = [json.loads(x.serialize())["meta"]["Vmap"] for x in vmaps]
    kinds = ("error", "same", "different")
    return [(x.level(), vmap["batchSize"], kinds[vmap["randomness"]]) for x, vmap in zip(vmaps, told, strict=True)]


def zero_of_members(device: torch.device) -> Tensor:
    """A zero `[]` of its own for every member of every active `torch.vmap`."""
    vmaps = vmaps_inside(0)
    zero = innermost(torch.zeros([size for _, size, _ in vmaps], device=device))  # not of a level inside the first vmap
    for level, _, _ in vmaps:
        zero = add_batch_dim(zero, 0, level)
    return zero


def is_batched(value: Any, level: int) -> bool:
    """Whether a tensor differs from one element of the vmap at this level to the next; torch.compile traces this."""
    return isinstance(value, Tensor) and _unwrap_batched(value, level)[1] is not None


def is_hidden(x: Tensor) -> bool:
    """Whether a vmap hides a dimension of a tensor; torch.compile tells of the innermost one alone."""
    return is_batched(x, functorch_depth()) if torch.compiler.is_compiling() else innermost(x).ndim > x.ndim


def examples_first(x: Tensor, level: int) -> Tensor:
    """The tensor below the vmap at this level, with the dimension that is hidden first."""
    inner, dim = _unwrap_batched(x, level)
    return inner.movedim(dim, 0) if dim else inner


def graph_attribute(func: Any, x: Tensor) -> Any:
    """A getter of `GRAPH_ATTRIBUTES` below the innermost `torch.vmap`; raises where no answer serves all elements."""
    inner, dim = _unwrap_batched(x, functorch_depth()) if under_functorch() else (x, None)
    value = func(inner)
    if value is not None and dim is not None and func == GRAD_FN:
        raise RuntimeError("grad_fn of a tensor under torch.vmap is that of all examples together")
    return value


def is_wrapped(x: Tensor) -> bool:
    """Whether a transform of torch.func hides the values of a tensor."""
    return innermost(x, recurse=False) is not x


def has_values(value: Any) -> bool:
    """Whether it is a tensor with numbers to show, and not a stand-in of a transform or a tracer."""
    return type(value) in (Tensor, nn.Parameter) and not (value.is_meta or dispatch_modes() or is_wrapped(value))


def is_concrete(x: Tensor) -> bool:
    """Whether a tensor is not a stand-in of a transform or a tracer."""
    return type(x).__name__ not in ("FakeTensor", "FunctionalTensor") and not is_wrapped(x)


def version(x: Tensor) -> int:
    """How often a tensor was changed in place."""
    with torch_function_disabled():
        return change_count(innermost(x))


def function_name(func: Any) -> str:
    """The name of a function that torch hands to a `TorchFunctionMode`, the same in eager mode and while compiling."""
    # From torch 2.15 on, torch.compile takes the name of the code object: `__pow__` and its like are all "wrapped".
    return getattr(getattr(func, "__wrapped__", func), "__name__", "")


def traceable(func: Any) -> Any:
    """The form of a function that torch.compile traces in a mode: before torch 2.14 not this one, with `super()`."""
    return torch.unflatten if func is Tensor.unflatten else func


def show_to_compiled_modes(functions: Iterable[Any]) -> None:
    """Let torch.compile hand these functions to a `TorchFunctionMode`: it leaves out `torch.rand_like` and others."""
    # Not before something is compiled: the import is slow.
    private("_dynamo.variables.torch.get_overridable_functions", "keyed in compiled functions")().update(functions)


def ignoring_modes(f: Any) -> Callable[..., Any]:
    """A function of `torch.nn.functional` whose ops a mode receives one by one. Torch has no public way."""
    ignored: dict[str, Any] = {f"has_torch_function{form}": lambda *_: False for form in ("", "_unary", "_variadic")}
    if ignored.keys().isdisjoint(getattr(getattr(f, "__code__", None), "co_names", ())):
        return Missing(f"overrides.has_torch_function in nn.functional.{f.__name__}", "what is drawn or recorded in it")
    found = FunctionType(f.__code__, vars(nn.functional) | ignored, None, f.__defaults__)
    found.__kwdefaults__ = f.__kwdefaults__
    return found


_SHOWN = ("multi_head_attention_forward", "linear_cross_entropy")  # the second one from torch 2.13 on
TRANSPARENT: dict[Any, Any] = {f: ignoring_modes(f) for name in _SHOWN if (f := getattr(nn.functional, name, None))}
"""Functions that torch shows to a mode as one op, in a form that shows the ops inside."""


def transparent(func: Any, kwargs: Any) -> Callable[..., Any] | None:
    """The form of a function in `TRANSPARENT`, if it can be called with these arguments."""
    # Torch checks a mask with a message that its compiler cannot trace. With options, it computes in chunks.
    untraced = torch.compiler.is_compiling() and kwargs.get("key_padding_mask") is not None
    return None if untraced or kwargs.get("options") is not None else TRANSPARENT.get(func)
