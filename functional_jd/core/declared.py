"""Losses with a declared structure: records of functions that the engines read, and that wrappers must keep."""

from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any


class Declared:
    """What `multitask` and `per_example` return: a dataclass of functions and settings."""

    def each(self, wrap: Callable[[Callable[..., Any]], Callable[..., Any]]) -> Any:
        """The same structure, with each of its functions wrapped."""
        record: Any = self
        parts = {field.name: getattr(record, field.name) for field in fields(record)}
        return replace(record, **{name: wrap(part) for name, part in parts.items() if callable(part)})
