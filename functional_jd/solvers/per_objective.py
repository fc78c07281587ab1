"""Numbers that the user gives, one per objective, checked where a rule is built."""

from collections.abc import Callable, Sequence
from typing import TypeAlias

import torch
from torch import Tensor

from functional_jd.transforms import transformed

Numbers: TypeAlias = Tensor | Sequence[float]
"""One number per objective."""


def one_each(given: Numbers, where: str, name: str, *, shares: bool = False) -> Callable[[Tensor], Tensor]:
    """Check numbers, one per objective, and make them a function of the losses.

    Args:
        given: `[m]`, floating-point, finite. Copied: what happens to the tensor afterwards is not seen.
        where: the rule's name, for its errors.
        name: the argument's name, for its errors.
        shares: whether they must be non-negative, at least one positive.

    Returns:
        A function of the losses `[m]` that gives the numbers, float64 `[m]`, on the losses' device. Differentiable with
        respect to those given.

    Raises:
        TypeError: a tensor that is not floating-point.
        ValueError: not one-dimensional, empty, or out of range (values are not checked under a transform, where they
            are not known); at the call, not one per loss.
    """
    if isinstance(given, Tensor) and not given.is_floating_point():
        raise TypeError(
            f"{where}: {name} must be a floating-point tensor, found {given.dtype}. Convert with .double()."
        )
    numbers = torch.as_tensor(given, dtype=torch.float64).clone()
    if numbers.ndim != 1 or len(numbers) == 0:
        raise ValueError(
            f"{where}: {name} must have shape [m], one per objective, found {list(numbers.shape)}. "
            "Flatten them in the order of the losses."
        )
    if not transformed():
        if not numbers.isfinite().all():
            raise ValueError(f"{where}: {name} must be finite, found {numbers.tolist()}. Leave out what has no number.")
        if shares and not (numbers.min() >= 0 and numbers.max() > 0):
            raise ValueError(
                f"{where}: {name} must not be negative, and one must be positive, found {numbers.tolist()}. "
                "Give every objective its share, and 0 to those without one."
            )

    def of(losses: Tensor) -> Tensor:
        if len(losses) != len(numbers):
            raise ValueError(
                f"{where}: expected one of {name} per loss, found {len(numbers)} and {len(losses)} losses. "
                "Give as many as there are losses."
            )
        return numbers.to(losses.device)

    return of
