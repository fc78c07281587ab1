"""Mixed precision: `torch.autocast`, with the dtypes of CUDA on every device and under every transform.

On an accelerator, outside of transforms, it is `torch.autocast`. Elsewhere native autocast says whether, and in which
dtype; the tables of `op_tables.py` say which op. They act where Python calls the op, before a transform takes it apart:
vmap splits a biased `linear` into parts that native autocast treats differently.
"""

from collections.abc import Callable, Generator, Iterable
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache, partial, wraps
from typing import Any

import torch
from torch import Tensor

from functional_jd.core.tree import tree_leaves
from functional_jd.core.types import Declared
from functional_jd.precision.op_tables import ELIGIBLE, LISTED, WIDE, compute_dtype, is_foreign_operator
from functional_jd.torch_compat.recomputation import RecomputedMode
from functional_jd.torch_compat.repaired_ops import REPAIRED
from functional_jd.torch_compat.torch_internals import (
    constant_while_tracing,
    function_name,
    traceable,
    transform_level,
    transparent,
)
from functional_jd.torch_compat.watching import recorder_of_ops


def autocast(f: Callable[..., Any], dtype: torch.dtype = torch.float16) -> Callable[..., Any]:
    """Run a function in mixed precision, op by op as CUDA's autocast does.

    `y = f(x)`, where an op of `HALF` computes in `dtype`, one of `FLOAT32` in float32, one of `PROMOTE` in the widest
    dtype among its tensors; the others follow their inputs, and float64 stays float64.

    Args:
        f: any function of tensors; its shapes and units stay what they are. Losses made by `multitask` or `per_example`
            keep their structure.
        dtype: `torch.float16` or `torch.bfloat16`.

    Returns:
        A function with the signature of `f`. Inside, `torch.autocast` is on for the CPU and for the accelerator, if
        there is one, without a cache of cast weights. If an argument is on the accelerator and no transform is
        active, that is all. Else the tables give every op the dtype that CUDA's autocast gives it.

    Raises:
        RuntimeError: when `f` calls `binary_cross_entropy`, whose logarithms overflow in half precision.

    Guarantees:
        The dtype of every op is the same on every device and under vmap, grad, jacrev, jacfwd, jvp, vjp, hessian and
        compile. Gradients come out in the dtype of the differentiated tensors (`jacfwd` and `jvp`: the output's).
        `with torch.autocast(device, enabled=False)` inside is float32, forward and backward: put `autocast` inside what
        is differentiated, `grad(autocast(f))`, so that the backward pass runs as its forward pass did.
        A weight used twice gets its gradients added in its own dtype. Same inputs, same bits.

    Source:
        `ATen/autocast_mode.h` (the CUDA lists). PyTorch's page "Automatic Mixed Precision: Autocast Op Reference" lists
        `gelu` too, which CUDA's autocast leaves alone, and `rms_norm`, which it leaves alone before torch 2.12.

    Differences:
        If the tables act, fft and matrix decompositions, which have no half-precision kernels on a CPU, are computed
        in float32 too, and so are pools of three dimensions, batch_norm and instance_norm, which come back in their
        input's dtype. An inner `torch.autograd.grad` runs with autocast off. A `torch.vmap` inside `f`, on an
        accelerator, has the dtypes of native autocast under vmap: put `autocast` inside it. Parameters and buffers
        belong in float32: running statistics in half precision are not updated. The builtin `pow(x, y)` is hidden from
        the tables by torch.compile, which leaves it to native autocast (half precision on the CPU): write `x ** y`.
        It hides the softmax of attention with a `key_padding_mask` too: it is in half precision there.

    Example:
        >>> product = autocast(torch.matmul, torch.bfloat16)
        >>> product(torch.ones(2, 2), torch.ones(2, 2)).dtype
        torch.bfloat16
    """
    if not isinstance(dtype, torch.dtype) or dtype not in (torch.float16, torch.bfloat16):
        raise ValueError(
            f"autocast: dtype must be torch.float16 or torch.bfloat16, found {dtype}. "
            "For full precision, call the function itself."
        )
    if isinstance(f, Declared):
        return f.each(partial(autocast, dtype=dtype))
    if not callable(f):
        raise TypeError(
            f"autocast: expected a function, found {type(f).__name__}. Pass the function, not its value: "
            "autocast(losses), not autocast(losses(params))."
        )
    followed = with_op_tables(f)

    @wraps(f)
    def run(*args: Any, **kwargs: Any) -> Any:
        with _regions([(device, True, dtype) for device in _devices()]):
            return followed(*args, **kwargs)

    return run


def with_op_tables(f: Callable[..., Any]) -> Callable[..., Any]:
    """Make native autocast around a function or inside it have the dtypes of CUDA's; nothing changes if it is off."""

    @wraps(f)
    def run(*args: Any, **kwargs: Any) -> Any:
        if _is_native((args, kwargs)):
            return f(*args, **kwargs)
        with _OpTables(), recorder_of_ops():  # which recognises parameters before they are cast
            return f(*args, **kwargs)

    return run


def _is_native(given: Any) -> bool:
    """Whether native autocast has the dtypes of CUDA for these arguments: on an accelerator, outside of transforms."""
    if torch.compiler.is_compiling() or len(_devices()) == 1 or transform_level() != (None, -1):
        return False
    return any(isinstance(x, Tensor) and x.device.type == _devices()[1] for x in tree_leaves(given))


def autocast_disabled() -> AbstractContextManager[Any]:
    """A context in which native autocast is off, for the CPU and the accelerator, to be entered at once and once."""
    devices = _devices() if torch.compiler.is_compiling() else _found_devices()
    on = [*filter(torch.is_autocast_enabled, devices)]
    return _regions([(device, False, None) for device in on]) if on else _NOTHING


def autocast_as_now() -> Callable[[], AbstractContextManager[Any]]:
    """A maker of contexts with the present state of native autocast, for functions that run in a backward pass."""
    now: list[_Setting] = [
        (device, torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)) for device in _devices()
    ]
    return lambda: _regions(now)


def without_cache() -> AbstractContextManager[Any]:
    """A context in which native autocast, if it is on, keeps no weights that it has cast.

    The parameters that an engine differentiates are new tensors in each call: copies of them would never be read.
    """
    if torch.compiler.is_compiling() or not any(map(torch.is_autocast_enabled, _found_devices())):
        return _NOTHING
    return autocast_as_now()()


_NOTHING = nullcontext()
_Setting = tuple[str, bool, torch.dtype | None]
"""A device, whether native autocast is on there, and its dtype."""


class _OpTables(RecomputedMode):
    """Sees every op that Python calls, before the transforms do, and gives it the dtype of its table."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        func, kwargs = traceable(func), kwargs or {}
        self.note_checkpoints()
        if (form := transparent(func, kwargs)) is not None:
            with self:
                return form(*args, **kwargs)
        name, func = function_name(func), REPAIRED.get(func, func)
        if name not in LISTED:
            return func(*args, **kwargs)
        tensors = tensors_of((*args, *kwargs.values()))
        device = device_type(tensors)
        if device == "meta" or not torch.is_autocast_enabled(device) or is_foreign_operator(func):
            return func(*args, **kwargs)
        dtype = compute_dtype(name, device, tensors)
        if dtype is None or kwargs.get("out") is not None:
            return _without_autocast(device, func, args, kwargs)
        kwargs = {key: cast(value, dtype) for key, value in kwargs.items()}
        result = _without_autocast(device, func, [cast(value, dtype) for value in args], kwargs)
        return cast(result, tensors[0].dtype) if name in WIDE else result


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


@contextmanager
def _regions(settings: list[_Setting]) -> Generator[None]:
    """Native autocast as these settings have it, device by device: in a form that torch.compile traces."""
    device, enabled, dtype = settings[0]
    rest = _regions(settings[1:]) if settings[1:] else _NOTHING
    with torch.autocast(device, dtype, enabled, cache_enabled=False), rest:
        yield


def tensors_of(values: Iterable[Any]) -> list[Tensor]:
    """The tensors among arguments of an op, in lists and tuples too."""
    found: list[Tensor] = []
    for value in values:
        if isinstance(value, Tensor):
            found.append(value)
        elif isinstance(value, list | tuple):
            found += tensors_of(value)
    return found


def cast(value: Any, dtype: torch.dtype) -> Any:
    """The value with its half-precision and float32 tensors in this dtype, in lists and tuples too."""
    if isinstance(value, Tensor):
        return value.to(dtype) if value.dtype is not dtype and value.dtype in ELIGIBLE else value
    if isinstance(value, list):
        return [cast(part, dtype) for part in value]
    return tuple(cast(part, dtype) for part in value) if isinstance(value, tuple) else value


def device_type(tensors: list[Tensor]) -> str:
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
