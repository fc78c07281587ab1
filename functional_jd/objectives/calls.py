"""The calls of modules as pure functions: for a look at an evaluation, and for what torch.compile traces."""

from collections.abc import Callable, Generator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.torch_version import TorchVersion

from functional_jd.torch_compat.torch_internals import is_wrapped


class Call(NamedTuple):
    """A call of a module: the parameters and buffers that it was given, by name, and the buffers that it returned."""

    params: dict[str, Tensor]
    buffers: dict[str, Tensor]
    returned: dict[str, Tensor]

    def moved(self) -> dict[str, Tensor]:
        """The buffers that were returned with other values, as far as no transform hides them."""
        found: dict[str, Tensor] = {}
        for name, x in self.returned.items():
            old = self.buffers[name]
            if not (is_wrapped(x) or is_wrapped(old) or (x.shape == old.shape and _same(x, old))):
                found[name] = x
        return found


LOOKING: ContextVar[list[Call] | None] = ContextVar("LOOKING", default=None)
"""Where calls are noted; None if they are not."""


@contextmanager
def noting_calls() -> Generator[list[Call]]:
    """A context in which this thread notes the calls of modules as pure functions."""
    calls: list[Call] = []
    token = LOOKING.set(calls)
    try:
        yield calls
    finally:
        LOOKING.reset(token)


TRACED: list[list[tuple[nn.Module, dict[str, Any]]]] = []
"""The parts of modules that losses called, with their attributes before, while torch.compile traces them."""

READS_MODULES = TorchVersion(torch.__version__) >= "2.13"
"""Whether torch.compile traces a look at the attributes of a module."""


def run_traced(losses: Callable[..., Any], *args: Any) -> Any:
    """The result of losses while torch.compile traces them. A transform does not let values out: attributes of modules
    that hold some have their old values afterwards.
    """
    parts: list[tuple[nn.Module, dict[str, Any]]] = []
    TRACED.append(parts)
    result = losses(*args)
    TRACED.pop()
    while parts:
        part, before = parts.pop()
        for name, x in list(part.__dict__.items()):
            if name not in before:
                delattr(part, name)
            elif isinstance(x, Tensor | list | dict) and x is not before[name]:
                setattr(part, name, before[name])
    return result


def _same(x: Tensor, y: Tensor) -> bool:
    return torch.equal(x, y) or (x.is_floating_point() and torch.equal(x.nan_to_num(), y.nan_to_num()))
