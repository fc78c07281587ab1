"""Checks of arguments, by their types and never by what a tensor holds: one way to say what was expected and found."""

import sys
from collections.abc import Mapping
from numbers import Integral, Number, Real
from typing import Any, NoReturn

import torch
from torch import Tensor

_MOST = 2**31 - 1
_LARGEST = int(sys.float_info.max)
_SHOWN = 60


def described(value: Any) -> str:
    """Return a value in a few words, for errors: a number as it is, a tensor by its dtype and shape, else the type."""
    if isinstance(value, Tensor):
        unusual = "" if value.layout == torch.strided else f" ({str(value.layout).removeprefix('torch.')})"
        return f"{value.dtype} {list(value.shape)}{unusual}"
    if isinstance(value, type):
        return f"the class {value.__name__}"
    if value is None or isinstance(value, Number | str):
        try:
            text = repr(value) if isinstance(value, str) else str(value)
        except ValueError:  # Python writes no integers of thousands of digits
            text = ""
        return text if 0 < len(text) <= _SHOWN else f"{type(value).__name__} that is too long to show"
    return type(value).__name__


def dtype_or_type(value: Any) -> str:
    """Return the dtype of a tensor, for errors: its layout, if it is not dense; of another value, the type."""
    if isinstance(value, Tensor):
        return str(value.dtype if value.layout == torch.strided else value.layout)
    return type(value).__name__


def refuse(where: str, name: str, expected: str, value: Any, cure: str, kind: type[Exception] = TypeError) -> NoReturn:
    """Raise the error of an argument: `where: name must be expected, found value. cure`."""
    raise kind(f"{where}: {name} must be {expected}, found {described(value)}. {cure}")


def is_too_large(value: Any) -> bool:
    """Whether a number is an integer that no float holds."""
    return isinstance(value, int) and abs(value) > _LARGEST


def is_size(value: Any) -> bool:
    """Whether a value is a size: an integer that fits 64 bits, of Python, or one that torch.compile traces."""
    if isinstance(value, bool):
        return False
    if torch.compiler.is_compiling():  # a bound would be a guard
        return isinstance(value, int | torch.SymInt)
    return isinstance(value, torch.SymInt) or (isinstance(value, Integral) and -(2**63) <= int(value) < 2**63)


def check_flag(where: str, name: str, value: Any) -> None:
    """Refuse what is neither True nor False: the truth of an array, or of a string, is seldom what was meant."""
    if not isinstance(value, bool):
        refuse(where, name, "True or False", value, f"Pass {name}=True, or leave it out.")


def check_integer(where: str, name: str, value: Any, least: int, cure: str) -> None:
    """Refuse what is not an integer of Python from `least` on that fits 32 bits; `bool` is none.

    Raises:
        TypeError: a tensor.
        ValueError: another value.
    """
    if isinstance(value, Tensor):
        refuse(where, name, "a Python integer, as loops and shapes depend on it", value, cure)
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= _MOST:
        refuse(where, name, f"an integer of at least {least}", value, cure, ValueError)


def check_number(where: str, name: str, value: Any, least: float, cure: str) -> None:
    """Refuse what is not a number of at least `least`; it may be infinite. NaN and `bool` are none.

    Raises:
        TypeError: not a number.
        ValueError: a smaller number.
    """
    if isinstance(value, bool) or not isinstance(value, Real):
        refuse(where, name, f"a number >= {least:g}", value, cure)
    if is_too_large(value) or not value >= least:  # pyright: ignore[reportOperatorIssue]
        refuse(where, name, f"a number >= {least:g}", value, cure, ValueError)


def check_scalar(where: str, name: str, value: Tensor, cure: str) -> None:
    """Refuse a tensor that is not one real number, without reading it."""
    if value.ndim or value.is_complex() or value.dtype == torch.bool or value.layout != torch.strided:
        refuse(where, name, "a number or a tensor []", value, cure, ValueError)


def check_function(where: str, name: str, value: Any, cure: str) -> None:
    """Refuse what cannot be called."""
    if not callable(value):
        raise TypeError(f"{where}: {name} must be a function, found {type(value).__name__}. {cure}")


def check_type(where: str, name: str, value: Any, kind: type, cure: str) -> None:
    """Refuse what is not of a class, such as the record that another function returned."""
    if not isinstance(value, kind):
        refuse(where, name, f"a {kind.__name__}", value, cure)


def check_mapping(where: str, name: str, value: Any, cure: str) -> None:
    """Refuse what is no dict by names."""
    if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):  # pyright: ignore[reportUnknownVariableType]
        refuse(where, name, "a dict by names", value, cure)


def check_option(where: str, name: str, value: Any, options: tuple[str, ...], cure: str) -> None:
    """Refuse what is not one of some strings."""
    if not isinstance(value, str) or value not in options:
        refuse(where, name, f"one of {', '.join(options)}", value, cure, ValueError)


def check_device(where: str, value: Any) -> None:
    """Refuse what names no device of torch."""
    if value is None or isinstance(value, torch.device):
        return
    expected, cure = "None, a torch.device or its name", 'Pass for instance device="cpu".'
    if not isinstance(value, str):  # an index would mean another device on each machine
        refuse(where, "device", expected, value, cure)
    try:
        torch.device(value)
    except (RuntimeError, ValueError) as error:
        raise ValueError(f"{where}: device must be {expected}, found {described(value)}. {cure}") from error
