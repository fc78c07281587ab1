"""Custom autograd functions in mixed precision: `custom_fwd` and `custom_bwd` for torch.func."""

from collections.abc import Callable, Sequence
from functools import partial, wraps
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from functional_jd.core.tree import tree_map
from functional_jd.precision.autocast import autocast_disabled, with_op_tables

_DTYPES = (torch.float16, torch.bfloat16, torch.float32)


def custom(function: type[Function] | None = None, *, cast_inputs: torch.dtype | None = None) -> Callable[..., Any]:
    """Make a custom autograd function follow autocast: what `custom_fwd` and `custom_bwd` do, under every transform.

    `y = function.apply(*inputs)`, its backward in the autocast state of its forward.

    Args:
        function: a subclass of `torch.autograd.Function`, left as it is; any shapes and units. To be vmapped it needs
            `generate_vmap_rule = True` or a `vmap` rule of its own; under torch.func `setup_context`, as ever.
        cast_inputs: what the function needs its inputs in: under autocast they are cast to it, and autocast is off
            inside, forward and backward. float64 and integers stay. Where autocast is off, nothing is cast.

    Returns:
        A function that takes what `function.apply` takes; it is its own attribute `apply`, too. Without `function`, a
            decorator.

    Raises:
        TypeError: no subclass of `torch.autograd.Function`; a dtype other than float16, bfloat16, float32.

    Laws:
        Gradients come out in the inputs' dtypes, and can be differentiated as far as `backward` can. Ops inside follow
        the op tables of `autocast`, forward and backward, vmapped or not. Composes with grad, jacrev, vmap, compile,
        and, where the function has a `jvp`, with jvp and jacfwd.

    Source:
        `torch.amp.custom_fwd`, `torch.amp.custom_bwd`; pytorch#132388.

    Differs:
        Inputs are cast before the function, so that a second derivative sees what was saved. The inputs tell which
        device. A forward that takes `ctx` works where torch.func does not come in, as ever. A `vmap` rule that calls
        its own class should find the decorated one: `@custom` above the class. Compiled, derivatives are those that the
        class gives; torch 2.13 differentiates `forward` instead, under torch.func, so that a gradient passed straight
        through a rounding is zero there, and second derivatives can be.

    Example:
        >>> @custom(cast_inputs=torch.float32)
        ... class Exp(torch.autograd.Function):
        ...     generate_vmap_rule = True
        ...     forward = staticmethod(lambda x: x.exp())
        ...     setup_context = staticmethod(lambda ctx, inputs, output: ctx.save_for_backward(output))
        ...     backward = staticmethod(lambda ctx, g: g * ctx.saved_tensors[0])
        >>> with torch.autocast("cpu", torch.bfloat16):
        ...     Exp(torch.zeros(2, dtype=torch.bfloat16)).dtype
        torch.float32
    """
    if cast_inputs is not None and cast_inputs not in _DTYPES:
        raise TypeError(
            f"custom: cast_inputs must be torch.float16, torch.bfloat16, torch.float32 or None, found {cast_inputs!r}. "
            "float64 is left alone by autocast: cast such inputs yourself."
        )
    if function is None:
        return partial(custom, cast_inputs=cast_inputs)
    if not (isinstance(function, type) and issubclass(function, Function)):
        raise TypeError(
            f"custom: expected a subclass of torch.autograd.Function, found {function!r}. "
            "Hand over the class, not its `apply`; what you cannot get hold of goes into float32_island."
        )
    following = _following(function)
    # The compiler must not take it apart: it would differentiate the forward instead (see Differs).
    torch.compiler.allow_in_graph(following)

    def run(*args: Any, **kwargs: Any) -> Any:
        if cast_inputs is None or _autocast_dtype([*args, *kwargs.values()]) is None:
            return following.apply(*args, **kwargs)
        inputs = [_cast(value, cast_inputs) for value in args]
        named = {name: _cast(value, cast_inputs) for name, value in kwargs.items()}
        with autocast_disabled((args, kwargs)):
            return following.apply(*inputs, **named)

    run.__name__, run.__qualname__, run.__doc__ = function.__name__, function.__qualname__, function.__doc__
    run.apply = run  # pyright: ignore[reportFunctionMemberAccess]
    return run


def float32_island(f: Callable[..., Any]) -> Callable[..., Any]:
    """Run a function that cannot be changed in float32, whatever autocast or policy is around.

    `y = f(x)`, with half-precision tensors in x cast to float32 and autocast off.

    Args:
        f: any function of pytrees of tensors: the `apply` of an imported autograd function, an extension's kernel.

    Returns:
        A function with the signature of `f`. Its outputs keep the dtype that `f` gives them, mostly float32.

    Raises:
        TypeError: `f` cannot be called.

    Laws:
        Gradients come out in the inputs' dtypes. Idempotent; the same bits with autocast and without. Composes with
        every transform that `f` composes with.

    Source:
        PyTorch, "Automatic Mixed Precision examples": functions that need a particular dtype.

    Differs:
        float64 stays. The `apply` of an autograd function is off autocast in its backward too, wherever that runs; for
        the rest put autocast inside what is differentiated, `grad(autocast(f))`, as ever.
    """
    if not callable(f):
        raise TypeError(
            f"float32_island: expected a function, found {type(f).__name__}. "
            "Hand over the function, not its value: float32_island(Imported.apply)."
        )

    owner = getattr(f, "__self__", None)
    if isinstance(owner, type) and issubclass(owner, Function) and f == owner.apply:
        f = custom(owner)  # so that its backward finds autocast off wherever it runs

    def island(*args: Any, **kwargs: Any) -> Any:
        wide_args, wide_kwargs = tree_map(lambda x: _cast(x, torch.float32), (args, kwargs))
        with autocast_disabled((args, kwargs)):
            return f(*wide_args, **wide_kwargs)

    return wraps(f)(island) if hasattr(f, "__name__") else island


def _following(function: type[Function]) -> Any:
    """The same function; the op tables reach into its rules, and its backward takes the autocast state with it."""
    split = function.setup_context is not Function.setup_context
    forward, setup_context = with_op_tables(function.forward), with_op_tables(function.setup_context)
    # torch calls either name; under torch.func only the second.
    backward = with_op_tables(function.backward if function.vjp is Function.vjp else function.vjp)

    def whole(ctx: Any, *args: Any, **kwargs: Any) -> Any:
        ctx.autocast_dtype = _autocast_dtype([*args, *kwargs.values()])
        return forward(ctx, *args, **kwargs)

    def setup(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.autocast_dtype = _autocast_dtype(inputs)
        setup_context(ctx, inputs, output)

    def back(ctx: Any, *cotangents: Any) -> Any:
        dtype, device = ctx.autocast_dtype, _device(cotangents)
        with torch.autocast(device, dtype=dtype, enabled=dtype is not None, cache_enabled=False):
            return backward(ctx, *cotangents)

    rules: dict[str, Any] = {"backward": back, "vjp": Function.vjp}
    rules |= {"forward": forward, "setup_context": setup} if split else {"forward": wraps(function.forward)(whole)}
    for name in ("jvp", "vmap"):
        if getattr(function, name) is not getattr(Function, name):
            rules[name] = with_op_tables(getattr(function, name))
    return type(function.__name__, (function,), {name: staticmethod(rule) for name, rule in rules.items()})


def _autocast_dtype(values: Sequence[Any]) -> torch.dtype | None:
    """What autocast casts to where these tensors are, or `None`."""
    device = _device(values)
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None


def _device(values: Sequence[Any]) -> str:
    """Single numbers on the CPU may join an accelerator's tensors."""
    found = [value.device.type for value in values if isinstance(value, Tensor) and not value.is_cpu]
    return next((device for device in found if torch.amp.is_autocast_available(device)), "cpu")


def _cast(value: Any, dtype: torch.dtype) -> Any:
    return value.to(dtype) if isinstance(value, Tensor) and value.dtype in _DTYPES else value
