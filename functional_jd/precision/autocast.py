"""Mixed precision: PyTorch's autocast op reference, the same on every device and under every transform.

Native autocast says whether, and in which dtype; the tables below say which op. They act where Python calls the op,
before a transform takes it apart: vmap splits a biased `linear` into parts that native autocast treats differently.
"""

from collections.abc import Callable, Generator, Iterable
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import cache, partial, wraps
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from functional_jd.core.declared import Declared
from functional_jd.precision.op_tables import (
    ELIGIBLE,
    LISTED,
    WIDE,
    compute_dtype,
    is_foreign_operator,
)
from functional_jd.torch_compat.batch_statistics import BATCH_NORMS, refuse_statistics_of_one
from functional_jd.torch_compat.noticing import Noticing, can_notice
from functional_jd.torch_compat.recomputation import RecomputedMode
from functional_jd.torch_compat.repaired_ops import REPAIRED
from functional_jd.torch_compat.torch_internals import (
    any_autocast,
    constant_while_tracing,
    function_name,
    has_mode,
    innermost_mode,
    is_compiled,
    traceable,
    transform_level,
    under_transform,
    untraced,
)
from functional_jd.torch_compat.watching import StateJournal, Watch, WatchingMode


def autocast(f: Callable[..., Any], dtype: torch.dtype = torch.float16) -> Callable[..., Any]:
    """Run a function in mixed precision, op by op as PyTorch's autocast op reference says.

    `y = f(x)`, where an op of `HALF` computes in `dtype`, one of `FLOAT32` in float32, one of `PROMOTE` in the widest
    dtype among its tensors; the others follow their inputs, and float64 stays float64.

    Args:
        f: any function of tensors; its shapes and units stay what they are. Losses made by `multitask` or `per_example`
            keep their structure.
        dtype: `torch.float16` or `torch.bfloat16`.

    Returns:
        A function with the signature of `f`. Inside, autocast is on for the CPU and for the accelerator, if
            there is one.

    Raises:
        TypeError: `f` cannot be called.
        ValueError: another dtype.
        RuntimeError: when `f` calls `binary_cross_entropy`, whose logarithms overflow in half precision.

    Laws:
        The dtype of every op is the same on every device and under vmap, grad, jacrev, jacfwd, jvp, vjp, hessian and
        compile. Gradients come out in the dtype of what is differentiated (but `jacfwd` and `jvp` return the output's).
        `with torch.autocast(device, enabled=False)` inside is float32, forward and backward: put `autocast` inside what
        is differentiated, `grad(autocast(f))`, so that the backward pass runs as its forward pass did.
        A weight used twice gets its gradients added in its own dtype. Same inputs, same bits.

    Source:
        PyTorch, "Automatic Mixed Precision: Autocast Op Reference" (the CUDA lists) and `ATen/autocast_mode.h`.

    Differs:
        gelu, square, local_response_norm, fft and matrix decompositions are computed in float32 too. batch_norm and
        instance_norm, which the reference leaves alone, are computed in float32 and come back in their input's dtype.
        An inner `torch.autograd.grad` runs with autocast off. There is no cache of weights cast to half. Parameters and
        buffers belong in float32: running statistics in half precision are not updated. The builtin `pow(x, y)` is
        hidden from the tables by torch.compile, which leaves it to native autocast (half precision on the CPU): write
        `x ** y`.

    Example:
        >>> product = autocast(torch.matmul, torch.bfloat16)
        >>> product(torch.ones(2, 2), torch.ones(2, 2)).dtype
        torch.bfloat16
    """
    if not isinstance(dtype, torch.dtype) or dtype not in (torch.float16, torch.bfloat16):
        raise ValueError(
            f"autocast: dtype must be torch.float16 or torch.bfloat16, found {dtype}. "
            "Call the function as it is for full precision."
        )
    if isinstance(f, Declared):
        return f.each(partial(autocast, dtype=dtype))
    followed = with_op_tables(f)

    @wraps(f)
    def run(*args: Any, **kwargs: Any) -> Any:
        with _switched(_devices(), enabled=True, dtype=dtype):
            return followed(*args, **kwargs)

    return run


def with_op_tables(
    f: Callable[..., Any],
    journal: StateJournal | None = None,
    where: str | None = None,
    *,
    examples: bool = False,
    inner: WatchingMode | None = None,
) -> Callable[..., Any]:
    """Make native autocast, inside a function or around it, follow the op tables; `autocast` says how.

    `with_op_tables(f)(x) = f(x)`, bit for bit, wherever native autocast is off.

    Args:
        f: any function of tensors, with or without `with torch.autocast(...)` in it; shapes and units stay.
        journal: notes what `f` changes in place, for `attempt`.
        where: the function in whose name reentrant checkpoints are refused; None lets them pass.
        examples: whether `f` is the loss of one example, in which batch normalization of a batch of one is refused.
        inner: a mode that is to see the ops first.

    Returns:
        A function with the signature of `f`.

    Raises:
        TypeError: `f` cannot be called.
        RuntimeError: when `f` calls `binary_cross_entropy` under autocast.
        ValueError: when `f` runs a reentrant checkpoint, with `where`; batch normalization, with `examples`.

    Laws:
        Idempotent. Composes with every transform, inside and outside. Nothing of a call stays in autocast's cache. What
        `torch.utils.checkpoint` runs again in a backward pass follows the tables too.

    Differs:
        From native autocast, in what `autocast` lists. An operator of one's own, which no table names, runs under
        native autocast: it reaches the ops inside. So does a compiled part of `f` that switches native autocast on
        itself; what is compiled as a whole, `with_op_tables(torch.compile(f))`, follows the tables.
    """
    if not callable(f):
        raise TypeError(
            f"autocast: expected a function, found {type(f).__name__}. Pass the function, not its value: "
            "autocast(losses), not autocast(losses(params))."
        )

    given: Any = f
    watched = examples and not isinstance(given, Declared)  # which watches the loss of one example itself

    @wraps(f)
    def run(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():  # which can be told of nothing
            with _OpTables(where or "per_example" if examples else None), inner or nullcontext():
                return f(*args, **kwargs)
        modes = _modes_needed(f, journal, where, watched)
        if inner is not None:
            if modes and isinstance(watch := modes[-1], Watch):
                inner.watch = watch
                modes.pop()
            modes.append(inner)
        with Noticing(where, _OpTables):
            return _under(modes, f, args, kwargs) if modes else f(*args, **kwargs)

    return run


def _modes_needed(
    f: Callable[..., Any], journal: StateJournal | None, where: str | None, examples: bool
) -> list[TorchFunctionMode]:
    """The modes that must see every op of a function, from the outermost to the innermost; mostly none.

    The tables are not among them before autocast is on: `Noticing` tells of it, unless torch.compile hides it.
    """
    enabled = any_autocast() and any(map(torch.is_autocast_enabled, _devices()))
    on = enabled or not can_notice or is_compiled(f)
    modes: list[TorchFunctionMode] = []
    repaired = not on and under_transform() and not has_mode(_OpTables)  # the tables repair ops too
    if journal is not None or examples or repaired:
        level = transform_level() if examples else None
        modes.append(Watch(journal, level, repaired=repaired, where=where or "per_example"))
    # A second mode of this kind would see every op and cast of the first: twice the price.
    if on and (modes or not isinstance(innermost_mode(), _OpTables)):
        modes.append(_OpTables())
    return modes


def _under(modes: list[TorchFunctionMode], f: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Call a function under modes, with nothing of it in autocast's cache."""
    cached = torch.is_autocast_cache_enabled()
    with ExitStack() as stack:
        for mode in modes:
            stack.enter_context(mode)
        torch.set_autocast_cache_enabled(False)
        try:
            return f(*args, **kwargs)
        finally:
            torch.set_autocast_cache_enabled(cached)


def autocast_disabled() -> AbstractContextManager[Any]:
    """A context in which native autocast is off, for the CPU and the accelerator.

    Returns:
        A context manager, to be entered at once and once.

    Laws:
        Inside, `x @ y` has the dtype of `x` and `y`, whatever autocast surrounds it; afterwards all is as it was.

    Example:
        >>> x = torch.ones(2, 2)
        >>> with torch.autocast("cpu", torch.bfloat16), autocast_disabled():
        ...     (x @ x).dtype
        torch.float32
    """
    if not (torch.compiler.is_compiling() or any_autocast()):  # nearly always
        return _NOTHING
    return _switched([device for device in _devices() if torch.is_autocast_enabled(device)], enabled=False)


def autocast_as_now() -> Callable[[], AbstractContextManager[Any]]:
    """What makes contexts in which native autocast is as it is now, for functions that run again in a backward pass."""
    dtypes = {device: torch.get_autocast_dtype(device) for device in _devices() if torch.is_autocast_enabled(device)}

    def again() -> AbstractContextManager[Any]:
        stack = ExitStack()
        stack.enter_context(autocast_disabled())
        for device, dtype in dtypes.items():
            stack.enter_context(_switched([device], enabled=True, dtype=dtype))
        return stack

    return again


_NOTHING = nullcontext()


class _OpTables(RecomputedMode):
    """Sees every op that Python calls, before the transforms do, and gives it the dtype of its table.

    Args:
        where: in whose name batch normalization of one example is refused, where nothing else sees the ops.
    """

    def __init__(self, where: str | None = None):
        super().__init__()
        self.where = where

    @untraced
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        func, kwargs = traceable(func), kwargs or {}
        self.note_checkpoints()
        name, func = function_name(func), REPAIRED.get(func, func)
        if name not in LISTED:
            return func(*args, **kwargs)
        if self.where is not None and func in BATCH_NORMS:
            refuse_statistics_of_one(args, kwargs, self.where)
        tensors = _tensors((*args, *kwargs.values()))
        device = _device_type(tensors)
        if device == "meta" or not torch.is_autocast_enabled(device) or is_foreign_operator(func):
            return func(*args, **kwargs)
        dtype = compute_dtype(name, device, tensors)
        if dtype is None or kwargs.get("out") is not None:
            return _without_autocast(device, func, args, kwargs)
        cast = {key: _cast(value, dtype) for key, value in kwargs.items()}
        result = _without_autocast(device, func, [_cast(value, dtype) for value in args], cast)
        return _cast(result, tensors[0].dtype) if name in WIDE else result


def _without_autocast(device: str, func: Any, args: Any, kwargs: Any) -> Any:
    """Native autocast must not see what a transform makes of the op, or it would change the dtypes again."""
    if torch.compiler.is_compiling():
        with torch.autocast(device, enabled=False):
            return func(*args, **kwargs)
    # The bare switch takes 0.3 us, torch.autocast 2.5: as much as a small op itself.
    torch.set_autocast_enabled(device, False)
    try:
        return func(*args, **kwargs)
    finally:
        torch.set_autocast_enabled(device, True)


def _switched(devices: list[str], enabled: bool, dtype: torch.dtype | None = None) -> AbstractContextManager[Any]:
    if not devices:
        return nullcontext()
    context = torch.autocast(devices[0], dtype=dtype, enabled=enabled, cache_enabled=False)
    return context if len(devices) == 1 else _nested(context, _switched(devices[1:], enabled, dtype))


@contextmanager
def _nested(outer: AbstractContextManager[Any], inner: AbstractContextManager[Any]) -> Generator[None]:
    """An ExitStack of two: the compiler traces this one."""
    with outer, inner:
        yield


def _tensors(values: Iterable[Any]) -> list[Tensor]:
    found: list[Tensor] = []
    for value in values:
        if isinstance(value, Tensor):
            found.append(value)
        elif isinstance(value, list | tuple):
            found += _tensors(value)
    return found


def _cast(value: Any, dtype: torch.dtype) -> Any:
    if isinstance(value, Tensor):
        return value.to(dtype) if value.dtype is not dtype and value.dtype in ELIGIBLE else value
    if isinstance(value, list):
        return [_cast(part, dtype) for part in value]
    return tuple(_cast(part, dtype) for part in value) if isinstance(value, tuple) else value


def _device_type(tensors: list[Tensor]) -> str:
    """The accelerator's, if there is one: single numbers on the CPU may join in."""
    for tensor in tensors:
        if not tensor.is_cpu:  # a fifth of what asking for the type takes
            return tensor.device.type
    return "cpu"


@constant_while_tracing
def _devices() -> list[str]:
    """The CPU, and the accelerator if there is one."""
    return _found_devices()


@cache
def _found_devices() -> list[str]:
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    return ["cpu"] if accelerator is None else ["cpu", accelerator.type]
