"""Garbage of 29 kinds, and the judgement of a call that is given one of them in the place of an argument."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from traceback import walk_tb
from typing import Any, NamedTuple

import numpy as np
import torch

import functional_jd as jd

PACKAGE = Path(jd.__file__).parent


@dataclass
class Unregistered:
    """A container that no pytree knows."""

    weight: Any


def no_arguments():
    return torch.ones(2)


GARBAGE: dict[str, Callable[[], Any]] = {
    "none": lambda: None,
    "true": lambda: True,
    "minus_one": lambda: -1,
    "zero": lambda: 0,
    "inf": lambda: float("inf"),
    "nan": lambda: float("nan"),
    "huge": lambda: 10**400,  # no float holds it
    "text": lambda: "garbage",
    "list": list,
    "dict": dict,
    "set": lambda: {1, 2},
    "object": object,
    "class": lambda: Unregistered,
    "function": lambda: no_arguments,
    "module": lambda: torch.nn.Linear(2, 2),
    "parameters": lambda: torch.nn.Linear(2, 2).parameters(),
    "wrong_shape": lambda: torch.ones(3, 5),
    "integers": lambda: torch.arange(6).reshape(2, 3),
    "complex": lambda: torch.ones(2, dtype=torch.complex64),
    "sparse": lambda: torch.eye(2).to_sparse(),
    "scalar": lambda: torch.tensor(0.5),
    "empty": lambda: torch.empty(0),
    "nans": lambda: torch.full((2,), torch.nan),
    "meta": lambda: torch.ones(2, device="meta"),
    "numpy": lambda: np.ones(2),
    "nested": lambda: {1: {(2, 3): torch.ones(2)}},
    "dataclass": lambda: Unregistered(torch.ones(2)),
    "builder": lambda: jd.upgrad,
    "record": lambda: jd.aggregation.Aggregation(torch.ones(2), torch.ones(2), ()),
}

EVERYTHING = frozenset(GARBAGE)
CALLABLE = frozenset({"class", "function", "module", "builder"})
kinds = frozenset

# What is valid beside the number in the table.
SWITCH = kinds({"true"})
OPTION = kinds({"none"})
POSITIVE = kinds({"true", "scalar"})  # a bool is a number of Python
NOT_NEGATIVE = POSITIVE | {"zero"}
TREE = kinds({"wrong_shape", "integers", "complex", "sparse", "scalar", "empty", "nans", "meta", "nested", "record"})
FLOATS = kinds({"wrong_shape", "scalar", "empty", "nans", "meta", "nested", "record"})
EMPTY = kinds({"none", "list", "dict"})  # pytrees without leaves
OF_TWO = kinds({"nans", "nested", "record", "meta"})
ROWS = OF_TWO | {"wrong_shape"}
BATCHES = kinds({"list", "dict", "parameters", "sparse", "empty"})


class Argument(NamedTuple):
    """A valid value, or a function that makes it; the kinds of garbage that are valid too; a function of the user?"""

    value: Any
    fine: frozenset[str] = frozenset()
    function: bool = False  # whose own errors pass


class Call(NamedTuple):
    """A valid call of a public function.

    Attributes:
        f: calls the function with its arguments by name, and what it returns, so that what is accepted is also used.
        arguments: by name.
        names: what an error message may begin with, beside the name of the function.
    """

    f: Callable[..., Any]
    arguments: Mapping[str, Argument]
    names: tuple[str, ...] = ()

    def valid(self) -> dict[str, Any]:
        """New valid arguments."""
        return {name: a.value() if callable(a.value) else a.value for name, a in self.arguments.items()}


def outcome(name: str, call: Call, argument: str, kind: str) -> str:
    """`"good"`, or what is wrong: `"accepted"`, or the error that is none of ours."""
    garbage = GARBAGE[kind]()
    try:
        call.f(**{**call.valid(), argument: garbage})
    except Exception as error:
        if _is_ours(error, (name, *call.names)) or _is_of_the_user(error, call.arguments[argument].function, kind):
            return "good"
        if isinstance(error, AssertionError) and _frames(error)[-1].startswith(f"{PACKAGE}/testing/"):
            return "good"  # a law that is broken
        # Python's own words, that no float is as large; and torch's, of a device.
        if isinstance(error, OverflowError) or argument == "device":
            return "good"
        # What has no values passes by its shape and dtype, until torch sees it beside tensors of another device.
        if kind == "meta" and "meta" in str(error) and "Boolean" not in str(error):
            return "good"
        return f"{type(error).__name__}: {error}"
    return "good" if kind in call.arguments[argument].fine else "accepted"


def _is_ours(error: Exception, names: tuple[str, ...]) -> bool:
    """Whether an error names the function, what was found, and the cure."""
    starts = "|".join(re.escape(name) for name in names)
    form = rf"({starts})\b[^\n]*?:? .*(found|takes|asks) .*[.:;,] .*\S"
    if isinstance(error, TypeError | ValueError) and re.match(form, str(error), re.DOTALL):
        return True
    # An error of Python or torch whose note names the function, and what to pass.
    return any(re.match(rf"({starts})\b.*[.:;,] .*\S", note, re.DOTALL) for note in getattr(error, "__notes__", ()))


def _frames(error: BaseException) -> list[str]:
    """The files through which an error came, the innermost last."""
    return [frame.f_code.co_filename for frame, _ in walk_tb(error.__traceback__)]


def _is_of_the_user(error: BaseException, is_function: bool, kind: str) -> bool:
    """Whether an error comes out of a function that the user passed."""
    frames = _frames(error)
    ours = [index for index, file in enumerate(frames) if file.startswith(f"{PACKAGE}/")]
    below = frames[ours[0] :] if ours else []
    if any("/tests/fuzz/" in file or "/torch/nn/modules/" in file for file in below):
        return True
    if re.match(r"(losses|loss_of_one|no_arguments)\(\) (takes|missing|got)", str(error)):  # it has no frame of its own
        return True
    if not (is_function and kind in CALLABLE):
        return False
    return re.match(r"Unregistered\.__init__\(\) |Linear\.forward\(\) |upgrad(\(\) |: )", str(error)) is not None
