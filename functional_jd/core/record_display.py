"""Short `repr`s of records as tables: structure, shapes, element counts and the values that fit."""

import math
from collections.abc import Callable
from typing import Any, TypeAlias, TypeVar

import torch
from torch import Tensor

from functional_jd.core.tree import children, tree_leaves
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
    """Return a table with one row for each child; only the values of numbers and of short vectors are read."""
    rows = [[name, _summary(child), _dtypes_and_devices(child)] for name, child in children(value) or []]
    return type(value).__name__, [], rows


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
    padded = [
        "  ".join(
            cell.rjust(width) if headers and column else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(line, widths, strict=True))
        )
        for line in lines
    ]
    return "\n".join([title, *("  " + line.rstrip() for line in padded)])


def _summary(value: Any) -> str:
    """Return the values of a short vector or their range, the shape of another tensor, or how much a container has."""
    if isinstance(value, Tensor):
        if value.ndim > 1 or value.numel() > _LONGEST or not has_values(value):
            return f"tensor {list(value.shape)}"  # without the word, a shape could be read as values
        numbers = value.detach().reshape(-1).tolist()
        if value.ndim == 0:
            return number(numbers[0])
        return f"[{', '.join(map(number, numbers))}]" if len(numbers) <= _MAX_VALUES else ranged(numbers)
    if children(value) is None:
        return getattr(value, "__qualname__", type(value).__name__)
    leaves = _tensors(value)
    count = sum(leaf.numel() for leaf in leaves)
    tensors = "1 tensor" if len(leaves) == 1 else f"{len(leaves)} tensors"
    return f"{tensors}, {count:,} {'number' if count == 1 else 'numbers'}" if leaves else "empty"


def _tensors(value: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]  # pyright: ignore[reportUnnecessaryIsInstance]


def _dtypes_and_devices(value: Any) -> str:
    tensors = _tensors(value)
    dtypes = {str(tensor.dtype).removeprefix("torch.") for tensor in tensors}
    devices = {str(tensor.device) for tensor in tensors} - {"cpu"}
    return ", ".join(sorted(dtypes)) + "".join(f" on {device}" for device in sorted(devices))


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
