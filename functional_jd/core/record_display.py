"""How records show themselves: structure, shapes, counts and the few numbers that fit, never pages of them."""

import math
from collections.abc import Callable, Mapping
from html import escape
from typing import Any, TypeAlias, TypeVar

import torch
from torch import Tensor

from functional_jd.core.torch_internals import has_values, pytree_nodes

Table: TypeAlias = tuple[str, list[str], list[list[str]]]
"""A title; the heads of the columns, or none; rows of cells, leading spaces showing what belongs to what."""


Record = TypeVar("Record")


# As many numbers stand in a cell, as many children beneath their parent, as many objectives in a table.
_NUMBERS, _CHILDREN, MOST_ROWS = 6, 8, 20


def displayed_as(table: Callable[[Any], Table]) -> Callable[[type[Record]], type[Record]]:
    """A decorator: the records of this class show themselves as a table, in a terminal and in a notebook.

    Args:
        table: `table(record) -> Table`: `outline`, `one_line`, or one that knows what the fields mean. It must take
            whatever a transform puts into the fields; `readable` says where numbers can be had.

    Returns:
        A decorator that adds `__repr__`, `__str__` and `_repr_html_`; all else about the class stays.
    """

    def decorate(record: type[Record]) -> type[Record]:
        def __repr__(self: Any) -> str:  # noqa: N807
            # While torch.compile traces there are no values to show, and walking them would be traced too.
            return f"{record.__name__}(...)" if torch.compiler.is_compiling() else as_text(table(self))

        def _repr_html_(self: Any) -> str:
            return as_html(table(self))

        setattr(record, "__repr__", __repr__)  # noqa: B010
        # From torch 2.14 on, torch.compile traces str of a named tuple through `__str__`, and never through `__repr__`.
        setattr(record, "__str__", __repr__)  # noqa: B010
        setattr(record, "_repr_html_", _repr_html_)  # noqa: B010
        return record

    return decorate


def children(value: Any) -> list[tuple[str, Any]] | None:
    """What a container holds, by name; `None` for all else."""
    if isinstance(value, Mapping):
        return [(str(key), child) for key, child in value.items()]
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return list(zip(getattr(value, "_fields"), value, strict=True))  # noqa: B009
    if isinstance(value, list | tuple):
        return [(str(place), child) for place, child in enumerate(value)]
    node = pytree_nodes.get(type(value))
    if node is None:
        return None
    if node.flatten_with_keys_fn is None:
        return [(str(place), child) for place, child in enumerate(node.flatten_fn(value)[0])]
    keyed: Any = node.flatten_with_keys_fn(value)[0]
    return [(str(key).strip(".[]'"), child) for key, child in keyed]


def outline(value: Any) -> Table:
    """What a pytree holds, two levels deep: shapes and dtypes, how many numbers, and those that fit in a cell.

    Only shapes and small tensors are looked at: what 10^7 parameters cost is what ten cost.
    """
    rows: list[list[str]] = []
    for name, child in children(value) or []:
        rows.append([name, *_content(child)])
        within = [] if isinstance(child, Tensor) else children(child) or []
        rows += [["  " + key, *_content(grandchild)] for key, grandchild in within[:_CHILDREN]]
        if within[_CHILDREN:]:
            rows.append([f"  ... {len(within) - _CHILDREN} more", "", ""])
    return type(value).__name__, [], rows


def one_line(value: Any) -> Table:
    """A record of a few numbers in one line; of long vectors the range."""
    fields = [f"{name}={_brief(child)}" for name, child in children(value) or []]
    return f"{type(value).__name__}({', '.join(fields)})", [], []


def number(value: Any) -> str:
    """A number in four digits; large and small powers of two, as scales are, exactly."""
    if not isinstance(value, float):
        return str(value)
    mantissa, exponent = math.frexp(value)
    return f"2**{exponent - 1}" if mantissa == 0.5 and not -8 <= exponent <= 12 else f"{value:.4g}"


def shortened(rows: list[list[str]], most: int = MOST_ROWS) -> list[list[str]]:
    """The first and the last rows of a table, if there are too many."""
    if len(rows) <= most:
        return rows
    return [*rows[: most - 3], [f"... {len(rows) - most + 1} more", *[""] * (len(rows[0]) - 1)], *rows[-2:]]


def as_text(table: Table) -> str:
    """The table in aligned columns: numbers, which stand beneath heads, to the right."""
    title, heads, rows = table
    lines = [heads, *rows] if heads else rows
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    padded = [
        "  ".join(
            cell.rjust(width) if heads and place else cell.ljust(width)
            for place, (cell, width) in enumerate(zip(line, widths, strict=True))
        )
        for line in lines
    ]
    return "\n".join([title, *("  " + line.rstrip() for line in padded)])


def as_html(table: Table) -> str:
    """The table for a notebook, without colours of its own: they are the theme's, light or dark."""
    title, heads, rows = table
    if not rows:
        return f"<code>{escape(title)}</code>"
    right, left = ' style="text-align: right"', ' style="text-align: left"'

    def line(cells: list[str], tag: str) -> str:
        sides = [right if heads and place else left for place in range(len(cells))]
        inside = [escape(cell.lstrip(" ")) for cell in cells]
        steps = ["&emsp;" * (len(cell) - len(cell.lstrip(" "))) for cell in cells]
        made = [f"<{tag}{s}>{step}{cell}</{tag}>" for s, step, cell in zip(sides, steps, inside, strict=True)]
        return f"<tr>{''.join(made)}</tr>"

    head = f"<thead>{line(heads, 'th')}</thead>" if heads else ""
    body = "".join(line(row, "td") for row in rows)
    return f"<div>{escape(title)}</div><table>{head}<tbody>{body}</tbody></table>"


def _content(value: Any) -> list[str]:
    """Two cells: how much there is, and of which dtype."""
    if isinstance(value, Tensor):
        return [_brief(value) if value.numel() <= _NUMBERS else _shape(value), _kind([value])]
    if children(value) is None:
        return [getattr(value, "__qualname__", type(value).__name__), ""]
    leaves = _tensors(value)
    if not leaves:
        return ["empty", ""]
    count = sum(leaf.numel() for leaf in leaves)
    tensors = "1 tensor" if len(leaves) == 1 else f"{len(leaves)} tensors"
    return [f"{tensors}, {count:,} {'number' if count == 1 else 'numbers'}", _kind(leaves)]


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    return [leaf for _, child in children(value) or [] for leaf in _tensors(child)]


def _kind(tensors: list[Tensor]) -> str:
    dtypes = {str(tensor.dtype).removeprefix("torch.") for tensor in tensors}
    devices = {str(tensor.device) for tensor in tensors} - {"cpu"}
    return ", ".join(sorted(dtypes)) + "".join(f" on {device}" for device in sorted(devices))


def _brief(value: Any) -> str:
    """The numbers of a vector, or their range; the shape of all else."""
    if not has_values(value) or value.ndim > 1:
        return _shape(value) if isinstance(value, Tensor) else _content(value)[0]
    numbers = value.detach().reshape(-1).tolist()
    if value.ndim == 0:
        return number(numbers[0])
    if len(numbers) <= _NUMBERS:
        return f"[{', '.join(map(number, numbers))}]"
    least, most = number(min(numbers)), number(max(numbers))
    return f"{len(numbers)} times {least}" if least == most else f"{len(numbers)} from {least} to {most}"


def _shape(tensor: Tensor) -> str:
    return f"tensor {list(tensor.shape)}"  # the bare shape could be taken for values
