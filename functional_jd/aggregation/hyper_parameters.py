"""Parts that rules share: one number per objective, where a rule is solved, and orders of a key."""

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

from functional_jd.core.arguments import Domain, check_option, described, here, refuse
from functional_jd.core.safe import nan_unless
from functional_jd.random import uniform
from functional_jd.solvers.search import Solver
from functional_jd.torch_compat.torch_internals import dispatch_modes, is_concrete, is_wrapped

Numbers: TypeAlias = Tensor | Sequence[float] | Sequence[Tensor]
"""One number per objective."""

FINITE = Domain(lambda u: abs(u) < torch.inf, "finite", "Replace NaN and infinity.")
PREFERENCES = Domain(
    lambda u: u.isfinite() & (u >= 0) & (u.amax() > 0),
    "finite and non-negative, with a positive element",
    "Use 0 for objectives without weight.",
)


def runs_on_host(solver: Solver, *given: Any, auto: bool = False) -> Any:
    """Check where a rule is solved, and whether all of it can go to the host: its tensors `[]` may stand elsewhere."""
    options = ("auto",) * auto + ("host", "device")
    check_option("solver", solver, options, f'The default is "{options[0]}".')
    can_move = all(not isinstance(x, Tensor) or x.is_cpu for x in given)
    return can_move and {"auto": "auto", "host": True, "device": False}[solver]


def per_objective(
    name: str, given: Numbers | None, domain: Domain | None = FINITE, *, default: Callable[[int], float] | None = None
) -> Callable[[Tensor], Tensor]:
    """Check one number per objective and return them as a function of the view.

    `given` is `[m]`, floating-point, or a sequence of numbers and of tensors `[]`, and is copied; for None there is the
    `default`, a function of m. All are NaN if one is outside the domain, but not checked: under a transform and on an
    accelerator. The function takes a tensor with first dimension m, and returns the numbers, float64 `[m]`, on its
    device; it raises ValueError unless there is one per row.
    """
    if given is None and default is not None:
        value = default
        return lambda rows: torch.full((len(rows),), value(len(rows)), dtype=_dtype_beside(rows), device=rows.device)
    numbers, rule = _checked(name, given, domain), here()
    concrete = _values_are_known(numbers) and not numbers.requires_grad and is_concrete(numbers)
    values = numbers.tolist() if concrete else None
    copies: dict[tuple[torch.device, torch.dtype], Tensor] = {}

    def numbers_for(rows: Tensor) -> Tensor:
        if len(rows) != len(numbers):
            raise ValueError(
                f"{rule}: {name} must be one per row, found {len(numbers)} and {len(rows)} rows. "
                "Pass one number per loss."
            )
        place = rows.device, _dtype_beside(rows)
        if torch.compiler.is_compiling():
            return numbers.to(*place)
        if values is not None and dispatch_modes():
            return torch.tensor(values, dtype=place[1], device=place[0])  # of which a tracer makes what it takes
        if rows.device == numbers.device:
            return numbers
        if place in copies:
            return copies[place]
        copy = numbers.to(*place)
        if is_concrete(copy) and not (copy.requires_grad or copy.is_inference()):
            copies[place] = copy  # which the next call need not make again
        return copy

    return numbers_for


def preferences(name: str, given: Numbers | None) -> Callable[[Tensor], Tensor]:
    """The importance of each objective: `per_objective` for non-negative numbers, where `None` means `1 / m`."""
    return per_objective(name, given, PREFERENCES, default=lambda m: 1 / m)


def _checked(name: str, given: Any, domain: Domain | None) -> Tensor:
    """The numbers as a tensor float64 `[m]`: NaN where they are outside the domain and their values are not known."""
    order = "in the order of objective_names(losses): keys of a dict are sorted."
    if isinstance(given, Tensor) and not given.is_floating_point():
        refuse(name, "a floating-point tensor", given, "Convert with .double().")
    try:
        numbers = _as_tensor(given)
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:
        raise TypeError(
            f"{here()}: {name} must be one number per objective, found {described(given)}. Pass numbers, or a "
            f"floating-point tensor [m], {order}"
        ) from error
    if numbers.ndim != 1 or len(numbers) == 0:
        raise ValueError(
            f"{here()}: {name} must have shape [m], one per objective, found {list(numbers.shape)}. Pass them {order}"
        )
    if domain is not None and not _values_are_known(numbers):
        numbers = nan_unless(domain.contains(numbers).all(), numbers)
    elif domain is not None and not domain.contains(numbers).all():
        raise ValueError(f"{here()}: {name} must be {domain.expected}, found {numbers.tolist()}. {domain.cure}")
    return numbers


def _as_tensor(given: Any) -> Tensor:
    """The numbers as a new tensor, float64."""
    if isinstance(given, Sequence) and any(isinstance(number, Tensor) for number in given):
        return torch.stack([_as_tensor(number) for number in given])
    if isinstance(given, Tensor):  # which stays on its device, whichever is the default
        return given.to(torch.float64, copy=True)
    return torch.as_tensor(given, dtype=torch.float64).clone()


def _dtype_beside(rows: Tensor) -> torch.dtype:
    """float64, but next to float32 on an accelerator, which may have no float64."""
    return torch.float64 if rows.is_cpu else torch.promote_types(rows.dtype, torch.float32)


def _values_are_known(x: Tensor) -> bool:
    return x.device.type == "cpu" and not (torch.compiler.is_compiling() or is_wrapped(x))


def random_visit_orders(key: Tensor, m: int) -> Tensor:
    """For every row, an independent random order of all other rows: int64 `[m, m - 1]`, row i with all indices but i.

    All orders are equally likely, up to ties of 53-bit numbers, which are broken by index. Do not use the key again.
    """
    if m <= 2:
        return torch.arange(m, device=key.device).flip(0).unsqueeze(1)[:, : m - 1]
    numbers = uniform(key, (m, m), dtype=torch.float64)
    # The numbers are below one, so that every row comes last in its own order.
    return (numbers + torch.eye(m, dtype=numbers.dtype, device=numbers.device)).argsort(dim=1, stable=True)[:, :-1]
