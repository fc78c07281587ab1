"""Policies: mixed precision by casting arguments and results, an alternative to autocast."""

from collections.abc import Callable
from functools import wraps
from typing import Any, NamedTuple

import torch
from torch import Tensor

from functional_jd.core.declared import Declared
from functional_jd.core.tree import tree_map
from functional_jd.core.types import Tree
from functional_jd.precision.op_tables import LOSS_FUNCTIONS, NORM_LAYERS
from functional_jd.torch_compat.recomputation import RecomputedMode
from functional_jd.torch_compat.torch_internals import function_name, traceable

_DTYPES = {
    **dict.fromkeys(("half", "f16", "float16"), torch.float16),
    **dict.fromkeys(("bf16", "bfloat16"), torch.bfloat16),
    **dict.fromkeys(("full", "f32", "float32"), torch.float32),
    **dict.fromkeys(("f64", "float64"), torch.float64),
}


_ROLES = {"p": "params", "c": "compute", "o": "output"}


class Policy(NamedTuple):
    """Three casts, and a decorator that applies them.

    Attributes:
        cast_to_param: casts the floating-point tensors of a pytree to the dtype of the parameters.
        cast_to_compute: casts them to the dtype of the computation.
        cast_to_output: casts them to the dtype of the results.
    """

    cast_to_param: Callable[[Tree], Tree]
    cast_to_compute: Callable[[Tree], Tree]
    cast_to_output: Callable[[Tree], Tree]

    def __call__(self, f: Callable[..., Any]) -> Callable[..., Any]:
        """Apply the policy to a function.

        `y = cast_to_output(f(*cast_to_compute(args)))`, with norm layers and losses in float32.

        Args:
            f: any function of pytrees of tensors.

        Returns:
            A function with the signature of `f`.

        Raises:
            TypeError: `f` is not callable.
        """
        if not callable(f):
            raise TypeError(
                f"policy: expected a function, found {type(f).__name__}. "
                "Pass the function, not its value: policy(...)(losses), not policy(...)(losses(params))."
            )

        if isinstance(f, Declared):
            return f.each(self)

        def with_casts(*args: Any, **kwargs: Any) -> Any:
            cast_args, cast_kwargs = self.cast_to_compute((args, kwargs))
            with _Float32NormsAndLosses():
                result = f(*cast_args, **cast_kwargs)
            return self.cast_to_output(result)

        return wraps(f)(with_casts) if hasattr(f, "__name__") else with_casts


def policy(description: str) -> Policy:
    """Create a policy: the dtypes of the parameters, of the computation and of the results.

    `policy("params=float32,compute=float16,output=float32")(losses)`

    Args:
        description: `params=`, `compute=` and `output=` (`p`, `c`, `o`), separated by commas. Defaults: params are
            float32, compute is params, output is compute. Or one dtype for all three. Dtypes: float16 (f16, half),
            bfloat16 (bf16), float32 (f32, full), float64 (f64).

    Returns:
        A `Policy`: call it on a function of params and batch, or use its three casts. Integers, booleans and objects
            that are not tensors are not cast. Any shapes and units.

    Raises:
        TypeError: the description is not a string.
        ValueError: an unknown role or dtype, a repeated role, or a part that is not `role=dtype`.

    Laws:
        Gradients have the dtype of the params passed in; in forward mode, that of the output. Norm layers are computed
        in float32 and return the dtype of their input. The losses of `torch.nn.functional` are computed in float32 and
        returned in float32, so that a mean of huge losses does not overflow. Composes with every transform. A policy
        with the dtype of all arguments changes nothing.

    Source:
        jmp, `get_policy`.

    Differs:
        From jmp: norm layers and losses run in float32 by default, repeated roles are refused, half is always float16.
        From `autocast`: only norm layers and losses are recognised, so a hand-written loss computes in half, sums
        included (apply `cast_to_output` before it); the whole batch is cast, targets too; the gradients of a weight
        used twice are added in half; the weight of a norm is rounded to half first. Keep running statistics in the
        module: passed as arguments they would be cast, and their update lost.
    """
    if not isinstance(description, str):
        raise TypeError(
            f"policy: expected a string, found {type(description).__name__}. "
            'Write policy("params=float32,compute=float16,output=float32").'
        )
    if "=" not in description:
        params = compute = output = _dtype(description, description)
    else:
        found = _parse(description)
        params = found.get("params", torch.float32)
        compute = found.get("compute", params)
        output = found.get("output", compute)
    return Policy(_cast_to(params), _cast_to(compute), _cast_to(output))


def _parse(description: str) -> dict[str, torch.dtype]:
    found: dict[str, torch.dtype] = {}
    for part in description.split(","):
        role, equals, name = (piece.strip() for piece in part.partition("="))
        role = _ROLES.get(role, role)
        if not equals or role not in _ROLES.values():
            raise ValueError(
                f"policy: expected params=, compute= or output= and a dtype, found {part!r} in {description!r}. "
                "Write for instance 'params=float32,compute=float16,output=float32'."
            )
        if role in found:
            raise ValueError(f"policy: expected {role} once, found it twice in {description!r}. Leave one out.")
        found[role] = _dtype(name, description)
    return found


def _dtype(name: str, description: str) -> torch.dtype:
    dtype = _DTYPES.get(name.strip())
    if dtype is None:
        raise ValueError(
            f"policy: expected a dtype among {', '.join(_DTYPES)}, found {name!r} in {description!r}. "
            "Write for instance 'params=float32,compute=float16,output=float32'."
        )
    return dtype


def _cast_to(dtype: torch.dtype) -> Callable[[Tree], Tree]:
    def cast(tree: Tree) -> Tree:
        return tree_map(lambda x: x.to(dtype) if isinstance(x, Tensor) and x.is_floating_point() else x, tree)

    return cast


class _Float32NormsAndLosses(RecomputedMode):
    """Run norm layers and losses in float32. A function mode sees them before the transforms decompose them."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.note_checkpoints()
        func, kwargs = traceable(func), kwargs or {}
        name = function_name(func)
        if name not in NORM_LAYERS and name not in LOSS_FUNCTIONS:
            return func(*args, **kwargs)
        x = args[0] if args else kwargs["input"]
        result = func(*map(_half_to_float32, args), **{key: _half_to_float32(value) for key, value in kwargs.items()})
        return result.to(x.dtype) if name in NORM_LAYERS else result


def _half_to_float32(value: Any) -> Any:
    half = isinstance(value, Tensor) and value.dtype in (torch.float16, torch.bfloat16)
    return value.float() if half else value
