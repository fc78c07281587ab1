"""Short `repr`s of records as tables: structure, shapes, element counts and the values that fit."""

import math
from collections.abc import Callable
from typing import Any, TypeAlias, TypeVar

import torch
from torch import Tensor

from functional_jd.core.tree import tree_leaves
from functional_jd.torch_compat.torch_internals import has_values

Table: TypeAlias = tuple[str, list[str], list[list[str]]]
"""A title, the column headers (may be empty), and rows of cells. Leading spaces in a cell indent it."""

Record = TypeVar("Record")

# The maximum number of values in a cell, of rows in a table, and of the values of a vector whose range is shown.
_MAX_VALUES, MAX_ROWS, _LONGEST = 6, 20, 1000


def displayed_as(table: Callable[[Any], Table]) -> Callable[[type[Record]], type[Record]]:
    """Class decorator: display records by a table, whatever transforms put into their fields (see `has_values`)."""

    def decorate(record: type[Record]) -> type[Record]:
        def __repr__(self: Any) -> str:  # noqa: N807
            # Under torch.compile there are no values to show, and reading the fields would be traced.
            return f"{record.__name__}(...)" if torch.compiler.is_compiling() else as_text(table(self))

        setattr(record, "__repr__", __repr__)  # noqa: B010
        # From torch 2.14 on, torch.compile traces str of a named tuple through `__str__`, and never through `__repr__`.
        setattr(record, "__str__", __repr__)  # noqa: B010
        return record

    return decorate


def outline(value: Any) -> Table:
    """Return a table with one row for each field; only the values of numbers and of short vectors are read."""
    return type(value).__name__, [], [[name, *_cells(field)] for name, field in value._asdict().items()]


def number(value: Any) -> str:
    """Format a number with four digits; large and small powers of two, such as loss scales, exactly."""
    if not isinstance(value, float):
        return str(value)
    mantissa, exponent = math.frexp(value)
    return f"2**{exponent - 1}" if mantissa == 0.5 and not -8 <= exponent <= 12 else f"{value:.4g}"


def shortened(rows: list[list[str]]) -> list[list[str]]:
    """Return the rows of a table; if there are more than `MAX_ROWS`, only the first and the last ones."""
    if len(rows) <= MAX_ROWS:
        return rows
    return [*rows[: MAX_ROWS - 3], [f"... {len(rows) - MAX_ROWS + 1} more", *[""] * (len(rows[0]) - 1)], *rows[-2:]]


def as_text(table: Table) -> str:
    """Return the table as text with aligned columns; below headers, all but the first column are right-aligned."""
    title, headers, rows = table
    lines = [headers, *rows] if headers else rows
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    text = [title]
    for line in lines:
        pairs = enumerate(zip(line, widths, strict=True))
        cells = [cell.rjust(width) if headers and column else cell.ljust(width) for column, (cell, width) in pairs]
        text.append("  " + "  ".join(cells).rstrip())
    return "\n".join(text)


def _cells(value: Any) -> list[str]:
    """The values of a short vector, the shape of another tensor, or how much a pytree has; and the dtypes."""
    leaves: list[Any] = tree_leaves(value)
    tensors = [x for x in leaves if isinstance(x, Tensor)]
    kinds = ", ".join(sorted({str(x.dtype).removeprefix("torch.") for x in tensors}))
    kinds += "".join(f" on {device}" for device in sorted({str(x.device) for x in tensors} - {"cpu"}))
    if isinstance(value, Tensor):
        return [_numbers(value), kinds]
    if value is None or any(leaf is value for leaf in leaves):
        return [getattr(value, "__qualname__", type(value).__name__), ""]
    count = sum(x.numel() for x in tensors)
    several, many = "" if len(tensors) == 1 else "s", "" if count == 1 else "s"
    return [f"{len(tensors)} tensor{several}, {count:,} number{many}" if tensors else "empty", kinds]


def _numbers(x: Tensor) -> str:
    if x.ndim > 1 or x.numel() > _LONGEST or not has_values(x):
        return f"tensor {list(x.shape)}"  # without the word, a shape could be read as values
    numbers = x.detach().reshape(-1).tolist()
    if x.ndim == 0:
        return number(numbers[0])
    return f"[{', '.join(map(number, numbers))}]" if len(numbers) <= _MAX_VALUES else ranged(numbers)


def ranged(numbers: list[Any]) -> str:
    """Return one number, or how many there are, and their range."""
    if len(numbers) < 2:
        return "".join(map(number, numbers))
    known = [x for x in numbers if x == x]
    lost = f", {len(numbers) - len(known)} nan" if len(known) < len(numbers) else ""
    if not known:
        return f"{len(numbers)} times nan"
    least, most = number(min(known)), number(max(known))
    return f"{len(numbers)} {f'times {least}' if least == most else f'from {least} to {most}'}{lost}"
