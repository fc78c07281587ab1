"""A preference: how much each objective matters to the user, checked where a rule is built."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor


def preferred(preference: Tensor | Sequence[float] | None, where: str) -> Callable[[Tensor], Tensor]:
    """Check a preference, and make it a function of what a rule looks at.

    Args:
        preference: `[m]`, non-negative, finite, floating-point, at least one positive; `None` means `1 / m`. Copied:
            what happens to the tensor afterwards is not seen.
        where: the rule's name, for its errors.

    Returns:
        A function of a matrix `[m, m]` that gives the preference, float64 `[m]`, on the matrix's device.

    Raises:
        TypeError: a preference that is not floating-point.
        ValueError: a preference of another shape, negative, not finite, or zero (not checked under a transform, where
            values are not known); at the call, not one per row.
    """
    chosen = None if preference is None else _checked(preference, where)

    def of(matrix: Tensor) -> Tensor:
        m = len(matrix)
        if chosen is None:
            return torch.full_like(matrix[0], 1 / m)
        if len(chosen) != m:
            raise ValueError(
                f"{where}: expected one preference per row of the Jacobian, found {len(chosen)} preferences and {m} "
                "rows. Give as many preferences as there are losses."
            )
        return chosen.to(matrix.device)

    return of


def _checked(preference: Tensor | Sequence[float], where: str) -> Tensor:
    if isinstance(preference, Tensor) and not preference.is_floating_point():
        raise TypeError(
            f"{where}: preference must be a floating-point tensor, found {preference.dtype}. Convert it with .double()."
        )
    u = torch.as_tensor(preference, dtype=torch.float64).clone()
    if u.ndim != 1 or len(u) == 0:
        raise ValueError(
            f"{where}: preference must have shape [m], one per objective, found {list(u.shape)}. "
            "Flatten it in the order of the losses."
        )
    if _values_are_known(u) and not (u.isfinite().all() and u.min() >= 0 and u.max() > 0):
        raise ValueError(
            f"{where}: preference must be finite and non-negative, with a positive element, found {u.tolist()}. "
            "Give every objective its share, and 0 to those without one."
        )
    return u


def _values_are_known(x: Tensor) -> bool:
    functorch: Any = torch._C._functorch  # pyright: ignore[reportPrivateUsage, reportAttributeAccessIssue]
    return not (torch.compiler.is_compiling() or functorch.is_functorch_wrapped_tensor(x))
