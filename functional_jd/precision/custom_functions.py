"""Custom autograd functions in mixed precision: `custom_fwd` and `custom_bwd` for torch.func."""

from collections.abc import Callable
from functools import partial, wraps
from typing import Any

import torch
from torch.autograd import Function

from functional_jd.precision.autocast import (
    autocast_as_now,
    autocast_disabled,
    cast,
    device_type,
    tensors_of,
    with_op_tables,
)
from functional_jd.precision.op_tables import ELIGIBLE


def custom(function: type[Function] | None = None, *, cast_inputs: torch.dtype | None = None) -> Callable[..., Any]:
    """Make a custom autograd function follow autocast, forward and backward, under every transform.

    It is `torch.amp.custom_fwd` and `custom_bwd` for torch.func. `y = function.apply(*inputs)`.

    Args:
        function: a subclass of `torch.autograd.Function`, which is not modified. vmap needs `generate_vmap_rule = True`
            or a `vmap` rule, and torch.func needs `setup_context`.
        cast_inputs: the dtype of the inputs. Under autocast, floating-point inputs other than float64 are cast to it,
            and autocast is off inside. Without autocast, nothing is cast.

    Returns:
        A function with the arguments of `function.apply`, and an attribute `apply` that is the function itself. Without
        `function`, a decorator.

    Guarantees:
        Gradients have the dtypes of the inputs, and are differentiable if `backward` is. The backward runs in the
        autocast state of the forward; ops inside both have the dtypes of `autocast`, also under vmap. Composes with
        grad, jacrev, vmap and compile, and with jvp and jacfwd if the function has a `jvp`.

    Source:
        `torch.amp.custom_fwd`, `torch.amp.custom_bwd`; pytorch#132388.

    Differences:
        Inputs are cast before the function. A `vmap` rule that calls its own class needs `@custom` on the class. Under
        compile, derivatives are those of the class; torch 2.13 differentiates `forward` instead, under torch.func.

    Example:
        >>> @precision.custom(cast_inputs=torch.float32)
        ... class Exp(torch.autograd.Function):
        ...     generate_vmap_rule = True
        ...     forward = staticmethod(lambda x: x.exp())
        ...     setup_context = staticmethod(lambda ctx, inputs, output: ctx.save_for_backward(output))
        ...     backward = staticmethod(lambda ctx, g: g * ctx.saved_tensors[0])
        >>> with torch.autocast("cpu", torch.bfloat16):
        ...     Exp(torch.zeros(2, dtype=torch.bfloat16)).dtype
        torch.float32
    """
    if cast_inputs is not None and not (isinstance(cast_inputs, torch.dtype) and cast_inputs in ELIGIBLE):
        raise TypeError(
            f"custom: cast_inputs must be torch.float16, torch.bfloat16, torch.float32 or None, found {cast_inputs!r}. "
            "Autocast does not cast to or from float64: cast such inputs yourself."
        )
    if function is None:
        return partial(custom, cast_inputs=cast_inputs)
    if not (isinstance(function, type) and issubclass(function, Function)):
        raise TypeError(
            f"custom: expected a subclass of torch.autograd.Function, found {function!r}. "
            "Pass the class, not its `apply`; it is apply.__self__."
        )
    with_autocast = _autocast_subclass(function)
    # Dynamo must not trace into it: it would differentiate the forward instead (see Differs).
    torch.compiler.allow_in_graph(with_autocast)

    def apply(*args: Any, **kwargs: Any) -> Any:
        device = device_type(tensors_of((*args, *kwargs.values())))
        if cast_inputs is None or not torch.is_autocast_enabled(device):
            return with_autocast.apply(*args, **kwargs)
        args, kwargs = cast(args, cast_inputs), {name: cast(x, cast_inputs) for name, x in kwargs.items()}
        with autocast_disabled():
            return with_autocast.apply(*args, **kwargs)

    apply.__name__, apply.__qualname__, apply.__doc__ = function.__name__, function.__qualname__, function.__doc__
    apply.apply = apply  # pyright: ignore[reportFunctionMemberAccess]
    return apply


def _autocast_subclass(function: type[Function]) -> Any:
    """Return a subclass that applies the op tables, and runs its backward in the autocast state of its forward."""
    # torch accepts `backward` or `vjp`; torch.func calls `vjp` only.
    backward = with_op_tables(function.backward if function.vjp is Function.vjp else function.vjp)

    def backward_as_forward(ctx: Any, *cotangents: Any) -> Any:
        with ctx.autocast():
            return backward(ctx, *cotangents)

    def noting(rule: Callable[..., Any]) -> Callable[..., Any]:
        followed = with_op_tables(rule)

        @wraps(rule)
        def run(ctx: Any, *args: Any, **kwargs: Any) -> Any:
            ctx.autocast = autocast_as_now()
            return followed(ctx, *args, **kwargs)

        return run

    rules: dict[str, Any] = {"backward": backward_as_forward, "vjp": Function.vjp}
    if function.setup_context is Function.setup_context:
        rules["forward"] = noting(function.forward)
    else:
        rules |= {"forward": with_op_tables(function.forward), "setup_context": noting(function.setup_context)}
    for name in ("jvp", "vmap"):
        if getattr(function, name) is not getattr(Function, name):
            rules[name] = with_op_tables(getattr(function, name))
    return type(function.__name__, (function,), {name: staticmethod(rule) for name, rule in rules.items()})
