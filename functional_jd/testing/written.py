"""How an argument was written where a function was called, as code to paste."""

import ast
import builtins
import inspect
import linecache
import sys
from types import FrameType, ModuleType
from typing import Any, NamedTuple


class Written(NamedTuple):
    """An expression, and the imports of its names.

    Attributes:
        code: the expression, in one line.
        imports: lines that import the names in it; a name of the main module or of a notebook needs none.
    """

    code: str
    imports: tuple[str, ...]


def first_argument(frame: FrameType | None, function: str) -> Written | None:
    """Return how the first argument was written in the call of a function, by its name, that runs in this frame.

    `None`, if that says nothing elsewhere: its names include variables, whose values stand nowhere, or functions inside
    functions; or if there is no source, as in a file that is compiled without.
    """
    call = None if frame is None else _call(frame)
    if frame is None or call is None or not call.args or ast.unparse(call.func).rpartition(".")[2] != function:
        return None
    scope = {**vars(builtins), **frame.f_globals, **frame.f_locals}
    nodes = list(ast.walk(call.args[0]))
    own = {node.arg for node in nodes if isinstance(node, ast.arg)}  # of its lambdas
    names = {node.id for node in nodes if isinstance(node, ast.Name)} - own
    imports = [_import(name, scope.get(name)) for name in sorted(names)]
    if None in imports:
        return None
    return Written(ast.unparse(call.args[0]), tuple(line for line in imports if line))


def _call(frame: FrameType) -> ast.Call | None:
    place = inspect.getframeinfo(frame, context=0).positions
    if place is None or place.lineno is None or place.end_lineno is None:
        return None
    lines = linecache.getlines(frame.f_code.co_filename, frame.f_globals)[place.lineno - 1 : place.end_lineno]
    if not lines:
        return None
    parts = [line.encode() for line in lines]
    parts[-1] = parts[-1][: place.end_col_offset]
    parts[0] = parts[0][place.col_offset :]
    try:
        found = ast.parse(b"".join(parts).decode(), mode="eval").body
    except SyntaxError:  # the file has changed since
        return None
    return found if isinstance(found, ast.Call) else None


def _import(name: str, value: Any) -> str | None:
    """Return the line that imports the value, `""` where it needs none, and `None` where no line can."""
    if isinstance(value, ModuleType):
        return f"import {name}" if value.__name__ == name else f"import {value.__name__} as {name}"
    if getattr(builtins, name, None) is value:
        return ""
    for module in ("functional_jd", "functional_jd.views", "functional_jd.testing", getattr(value, "__module__", "")):
        if module in sys.modules and vars(sys.modules[module]).get(name) is value is not None:
            return "" if module == "__main__" else f"from {module} import {name}"
    return None  # a variable, a nested function, or another name for one
