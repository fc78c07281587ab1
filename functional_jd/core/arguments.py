"""Checks of arguments, by their types and never by values of tensors, with one form of errors."""

import math
from collections.abc import Callable, Mapping
from numbers import Complex, Integral, Real
from typing import Any, NamedTuple, NoReturn, TypeAlias

import torch
from torch import Tensor

from functional_jd.torch_compat.callers import here as here

Number: TypeAlias = float | Tensor
"""A hyper-parameter: a number, or a floating-point tensor `[]`, for instance one that `torch.vmap` maps over."""


class Domain(NamedTuple):
    """The valid numbers: a test of a number or of each entry of a tensor, and its words for errors."""

    contains: Callable[[Any], Any]
    expected: str
    cure: str = "Pass one number per objective."


POSITIVE = Domain(lambda x: (x > 0) & (x < math.inf), "positive and finite")
NOT_NEGATIVE = Domain(lambda x: (x >= 0) & (x < math.inf), "finite and not negative")
FROM_0_TO_1 = Domain(lambda x: (x >= 0) & (x <= 1), "in [0, 1]")
BELOW_1 = Domain(lambda x: (x >= 0) & (x < 1), "in [0, 1)")
ABOVE_0_TO_1 = Domain(lambda x: (x > 0) & (x <= 1), "in (0, 1]")


def at_least(least: float) -> Domain:
    """The numbers from `least` on, infinity among them."""
    return Domain(lambda x: x >= least, f"a number >= {least:g}")


def described(value: Any) -> str:
    """Return a value in a few words, for errors: a number itself, a tensor by its dtype and shape, else the type."""
    if isinstance(value, Tensor):
        unusual = "" if value.layout == torch.strided else f" ({str(value.layout).removeprefix('torch.')})"
        return f"{value.dtype} {list(value.shape)}{unusual}"
    if isinstance(value, type):
        return f"the class {value.__name__}"
    if value is None or isinstance(value, Complex | str):
        text = repr(value) if isinstance(value, str) else str(value)
        return text if len(text) <= 60 else f"{type(value).__name__} that is too long to show"
    return type(value).__name__


def refuse(name: str, expected: str, value: Any, cure: str, kind: type[Exception] = TypeError) -> NoReturn:
    """Raise the error of an argument: `FUNCTION: name must be expected, found value. cure`."""
    raise kind(f"{here()}: {name} must be {expected}, found {described(value)}. {cure}")


def is_size(value: Any) -> bool:
    """Whether a value is an integer that fits 64 bits, or one that torch.compile traces; `bool` is none."""
    if torch.compiler.is_compiling() or isinstance(value, torch.SymInt):  # a bound would be a guard
        return isinstance(value, int | torch.SymInt) and not isinstance(value, bool)
    return isinstance(value, Integral) and not isinstance(value, bool) and -(2**63) <= int(value) < 2**63


def check_flag(name: str, value: Any) -> None:
    """Refuse all but True and False: the truth of an array, or of a string, is seldom meant."""
    if not isinstance(value, bool):
        refuse(name, "True or False", value, f"Pass {name}=True, or leave it out.")


def check_integer(name: str, value: Any, least: int, cure: str) -> None:
    """Raise for what is not an integer of Python from `least` on that fits 32 bits; `bool` is none."""
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value < 2**31:
        refuse(name, f"an integer of at least {least}", value, cure, ValueError)


def number(name: str, value: Any, domain: Domain, cure: str) -> Any:
    """A hyper-parameter, once checked; a tensor `[]` in float64, NaN outside the domain, without waiting for it."""
    if not isinstance(value, Tensor):
        check_number(name, value, domain, cure, "a number or a tensor []")
        return value if type(value) is int and abs(value) < 2**53 else float(value)
    if not value.is_floating_point():
        refuse(name, "a number or a floating-point tensor", value, "Convert it with .double().")
    check_scalar(name, value, cure)
    values = value.double()
    return torch.where(domain.contains(values), values, torch.nan)


def check_number(name: str, value: Any, domain: Domain, cure: str, expected: str = "", tensors: bool = False) -> None:
    """Raise for what is not a number of Python in a domain; with `tensors`, a tensor `[]` is one, and is not read."""
    if tensors and isinstance(value, Tensor):
        check_scalar(name, value, cure)
        return
    if isinstance(value, bool) or not isinstance(value, Real):  # numpy.float32 is one
        refuse(name, expected or domain.expected, value, cure)
    if not domain.contains(float(value)):
        refuse(name, domain.expected, value, cure, ValueError)


def check_scalar(name: str, value: Tensor, cure: str) -> None:
    """Refuse a tensor that is not one real number, without reading it."""
    if value.ndim or value.is_complex() or value.dtype == torch.bool or value.layout != torch.strided:
        more = " For several values, use torch.vmap over a function that builds it." if value.ndim else ""
        refuse(name, "a number or a tensor []", value, cure + more, ValueError)


def check_function(name: str, value: Any, cure: str) -> None:
    """Refuse what cannot be called."""
    if not callable(value):
        raise TypeError(f"{here()}: {name} must be a function, found {type(value).__name__}. {cure}")


def check_type(name: str, value: Any, kind: type, cure: str) -> None:
    """Refuse what is not of a class, such as the record that another function returned."""
    if not isinstance(value, kind):
        refuse(name, f"a {kind.__name__}", value, cure)


def check_mapping(name: str, value: Any, cure: str) -> None:
    """Refuse all but a dict by names, and show the first key that is not a string."""
    for found in [x for x in value if not isinstance(x, str)] if isinstance(value, Mapping) else [value]:
        refuse(name, "a dict by names", found, cure)


def check_option(name: str, value: Any, options: tuple[str, ...], cure: str) -> None:
    """Refuse what is not one of some strings."""
    if not isinstance(value, str) or value not in options:
        refuse(name, f"one of {', '.join(options)}", value, cure, ValueError)
