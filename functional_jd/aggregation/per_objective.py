"""Numbers that the user gives, one per objective: preferences, weights, leaks. Checked where a rule is built."""

from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from functional_jd.core.torch_internals import is_wrapped

Numbers: TypeAlias = Tensor | Sequence[float]
"""One number per objective."""


class Domain(NamedTuple):
    """Which numbers will do: a test, and the two halves of the error."""

    holds: Callable[[Tensor], Tensor]
    expected: str
    cure: str


FINITE = Domain(lambda u: u.isfinite().all(), "finite", "Leave out what has no number.")


PREFERENCES = Domain(
    lambda u: u.isfinite().all() & (u.min() >= 0) & (u.max() > 0),
    "finite and non-negative, with a positive element",
    "Give every objective its share, and 0 to those without one.",
)


def per_objective(
    given: Numbers | None,
    where: str,
    name: str,
    domain: Domain | None = FINITE,
    *,
    otherwise: Callable[[int], float] | None = None,
) -> Callable[[Tensor], Tensor]:
    """Check numbers, one per objective, and make them a function of what a rule looks at.

    Args:
        given: `[m]`, floating-point. Copied: what happens to the tensor afterwards is not seen.
        where: the rule's name, for its errors.
        name: the argument's name, for its errors.
        domain: which numbers will do; `None`: all.
        otherwise: what `given=None` means for each of m objectives; `None` where numbers must be given.

    Returns:
        A function of a tensor with m entries along its first dimension, losses `[m]` for instance, that gives the
        numbers, float64 `[m]`, on its device. Differentiable with respect to those given.

    Raises:
        TypeError: a tensor that is not floating-point.
        ValueError: not one-dimensional, empty, or outside the domain (not checked under a transform, where values are
            not known); at the call, not one per row.
    """
    if given is None and otherwise is not None:
        value = otherwise
        return lambda rows: torch.full((len(rows),), value(len(rows)), dtype=torch.float64, device=rows.device)
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
    if domain is not None and _values_are_known(numbers) and not domain.holds(numbers):
        raise ValueError(f"{where}: {name} must be {domain.expected}, found {numbers.tolist()}. {domain.cure}")

    def of(rows: Tensor) -> Tensor:
        if len(rows) != len(numbers):
            raise ValueError(
                f"{where}: {name} must be one per row, found {len(numbers)} and {len(rows)} rows. "
                "Give as many as there are losses."
            )
        return numbers.to(rows.device)

    return of


def preferences(given: Numbers | None, where: str, name: str = "preference") -> Callable[[Tensor], Tensor]:
    """How much each objective matters: `one_each` of non-negative numbers, `None` meaning `1 / m`."""
    return per_objective(given, where, name, PREFERENCES, otherwise=lambda m: 1 / m)


def _values_are_known(x: Tensor) -> bool:
    return not (torch.compiler.is_compiling() or is_wrapped(x))
