"""A loss scale for derivatives inside losses, such as the forces of a potential."""

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch import Tensor

from functional_jd.core.arguments import POSITIVE, check_flag, check_function, check_number, refuse
from functional_jd.core.rows import at_least_float32
from functional_jd.core.tree import tree_map


def scaled_grad(
    f: Callable[..., Any], factor: float | Tensor, argnums: int | tuple[int, ...] = 0, *, has_aux: bool = False
) -> Callable[..., Any]:
    """`torch.func.grad` for losses that contain it, in half precision: with a scale of its own.

    `grad(factor f) / factor`, divided in at least float32. A loss scale multiplies the gradients of the losses, but not
    a gradient inside them: forces of an energy in units of 1e-7 are below what float16 holds.

    Args:
        f: a function that returns a scalar, an energy for instance; with `has_aux`, `(scalar, aux)`.
        factor: about 1 / the size of the gradients of the scalar with respect to the numbers in half precision,
            mostly 1 / the unit of the scalar; positive. A power of two rounds nothing. A number or a tensor `[]`.
        argnums: which arguments to differentiate, as for `torch.func.grad`.
        has_aux: whether `f` returns `(scalar, aux)`.

    Returns:
        A function of the arguments of `f`: the gradient, in at least float32; with `has_aux`, `(gradient, aux)`.

    Guarantees:
        Equals `torch.func.grad` to rounding wherever nothing underflows. An overflow inside is not finite in the
        result, and `step` is skipped. Composes with transforms as `torch.func.grad` does.

    Differences:
        From a loss scale, which backs off when rows overflow: a factor that overflows at the start overflows in every
        step. Take a smaller one. If `f` returns float16, the factor must be below 65504: multiply by the unit in
        float32.

    Example:
        >>> energy = autocast(lambda x, w: 1e-7 * (x @ w).square().float().sum())
        >>> x, w = torch.ones(2, 3), torch.ones(3, 4)
        >>> torch.func.grad(energy)(x, w)[0], precision.scaled_grad(energy, 2.0**20)(x, w)[0]
        (tensor([2.3842e-06, 2.3842e-06, 2.3842e-06]), tensor([2.3991e-06, 2.3991e-06, 2.3991e-06]))
    """
    check_function("f", f, "Pass the function, not its value: scaled_grad(energy, 2.0**14).")
    check_flag("has_aux", has_aux)
    check_number("factor", factor, POSITIVE, "A power of two, such as 2.0**14.", tensors=True)
    positions = argnums if isinstance(argnums, tuple) else (argnums,)
    if not positions or any(isinstance(at, bool) or not isinstance(at, int) for at in positions):  # pyright: ignore[reportUnnecessaryIsInstance]
        refuse("argnums", "a position, or several in a tuple", argnums, "Count from 0.")

    def scaled(*args: Any, **kwargs: Any) -> Any:
        found = f(*args, **kwargs)
        if has_aux and not (isinstance(found, tuple) and len(found) == 2):  # pyright: ignore[reportUnknownArgumentType]
            refuse("f", "a function that returns (scalar, aux)", found, "Or leave has_aux out.")
        value, aux = found if has_aux else (found, ())
        if not isinstance(value, Tensor) or value.ndim or not value.is_floating_point():
            refuse("f", "a function that returns one real number", value, "Sum it up.", ValueError)
        return at_least_float32(value) * factor, aux

    gradient = torch.func.grad(scaled, argnums=argnums, has_aux=True)

    @wraps(f)
    def run(*args: Any, **kwargs: Any) -> Any:
        if not all(-len(args) <= at < len(args) for at in positions):
            expected = f"positions among the {len(args)} arguments"
            refuse("argnums", expected, argnums, "Pass by position what is differentiated.", ValueError)
        large, aux = gradient(*args, **kwargs)
        small = tree_map(lambda g: at_least_float32(g) / factor, large)
        return (small, aux) if has_aux else small

    return run
