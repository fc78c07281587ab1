"""Who called: the name that begins an error or a warning, and the line of the user to which a warning points."""

import contextlib
import re
import sys
from inspect import currentframe
from pathlib import Path
from traceback import walk_stack
from types import FrameType, ModuleType

import torch

_ROOT = __name__.partition(".")[0]
OURS = str(Path(__file__).parents[1])
TORCH = str(Path(torch.__file__).parent)
# Public functions that are called by what a step calls.
_SPEAK_FOR_OTHERS = {"require", "gramian", "norms", "cross_gramian", "full_jacobian", "select"}


class SlowPathWarning(UserWarning):
    """An engine gave up its fast way: the numbers are the same, and it takes longer."""


def here() -> str:
    """The name of the public function that the user called, for errors and warnings: the innermost on the stack.
    Results of `jacobian_fn` have its name, parts of a rule that of the caller, and traced code has no stack.
    """
    builder = other = ""
    for frame, _ in () if torch.compiler.is_dynamo_compiling() else walk_stack(currentframe()):
        file = frame.f_code.co_filename
        if file.startswith(OURS) and (name := _public_name(frame)):
            if name in _SPEAK_FOR_OTHERS:
                other = name
            elif frame.f_code.co_qualname == name:
                return name
            else:
                builder = name
        elif (builder or other) and not file.startswith((OURS, TORCH, contextlib.__file__)):
            break
    return builder or other or _ROOT


def _public_name(frame: FrameType) -> str:
    """The function or builder whose code runs in a frame, if a table of contents lists it; else `""`."""
    first = frame.f_code.co_qualname.partition(".")[0]
    name = re.sub(r"\B(?=[A-Z])", "_", first).lower()
    root = sys.modules[_ROOT]
    tables = [root, *(value for value in vars(root).values() if isinstance(value, ModuleType))]
    listed = [vars(table)[x] for table in tables for x in (first, name) if x in vars(table).get("__all__", ())]
    own = frame.f_globals.get(first), frame.f_globals.get(name)
    return name if any(x is y for x in listed for y in own) else ""


def user_level() -> int:
    """The `stacklevel` of the nearest caller outside this package and torch."""
    files = [frame.f_code.co_filename for frame, _ in walk_stack(currentframe())]
    return next(level for level, file in enumerate([*files, ""]) if not file.startswith((OURS, TORCH)))
