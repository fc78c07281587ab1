"""Which of its own parameters a module computes with, in addition to those that it is given."""

import sys
from collections.abc import Generator, Iterable
from contextlib import contextmanager
from threading import Lock
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from functional_jd.torch_compat.autograd_graph import leaves_behind
from functional_jd.torch_compat.torch_internals import function_name, innermost, traceable
from functional_jd.torch_compat.watching import IN_PLACE_NAMES


class UsedParameters(TorchFunctionMode):
    """A mode that sees which `own` parameters a module computes with, frozen ones too. `start`: what it is given."""

    def __init__(self, own: dict[str, Tensor], start: Iterable[Tensor]):
        super().__init__()
        inside = [innermost(x) for x in start]
        given = set(map(id, inside))
        self.names = {id(x): name for name, x in own.items() if id(x) not in given}
        self.ends = {x.grad_fn for x in inside}
        self.used: list[str] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if func not in _CONSTANTS and isinstance(result, Tensor | tuple | list):
            several = (x if isinstance(x, tuple | list) else (x,) for x in (*args, *kwargs.values()))
            given = (x for some in several for x in some if isinstance(x, Tensor))
            self.used += [self.names[id(x)] for x in given if id(x) in self.names]
        return result

    def found(self, outputs: Iterable[Tensor]) -> list[str]:
        """The names of those that were used, or that the graph of these outputs reaches, as in scripted layers."""
        leaves = leaves_behind((innermost(x).grad_fn for x in outputs), self.ends)
        return self.used + [self.names[x] for x in leaves if x in self.names]


@contextmanager
def eagerly() -> Generator[None]:
    """A time without compiled code, in which a mode sees nothing. Torch has one stance for all threads: the first to
    enter sets it, and the last to leave puts it back. Before the slow import of the compiler there is none.
    """
    with _LOCK:
        needed = "torch._dynamo" in sys.modules and not any(_STANCES)
        _STANCES.append(torch.compiler.set_stance("force_eager") if needed else None)
    try:
        yield
    finally:
        with _LOCK:
            if (stance := _STANCES.pop()) is not None:
                stance.__exit__(None, None, None)


_LOCK, _STANCES = Lock(), list[Any]()


class UnchangedParameters(TorchFunctionMode):
    """A mode, for torch.compile, that raises where an op changes one of these parameters in place."""

    def __init__(self, params: dict[str, Tensor]):
        super().__init__()
        self.params = params

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        func = traceable(func)
        for name, x in self.params.items():  # first: torch.compile cannot read the name of a checkpoint
            if args and args[0] is x and function_name(func) in IN_PLACE_NAMES:
                raise changed_parameter(name)
        return func(*args, **(kwargs or {}))


def changed_parameter(name: str) -> ValueError:
    return ValueError(
        f"functional: forward must leave its parameters, found that it has changed {name!r} in place. Make it a "
        "buffer, which comes back as a result, or compute with another tensor."
    )


# A parameter that is detached is meant as a constant.
_CONSTANTS: set[Any] = {Tensor.detach, Tensor.data.__get__, Tensor.grad.__get__}  # pyright: ignore
