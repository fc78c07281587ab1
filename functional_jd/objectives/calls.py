"""The calls of modules as pure functions, for those who look at an evaluation."""

from collections.abc import Generator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import NamedTuple

import torch
from torch import Tensor

from functional_jd.torch_compat.torch_internals import is_wrapped


class Call(NamedTuple):
    """A call of a module.

    Attributes:
        params: the parameters that it was given, by name.
        buffers: the buffers that it was given, by name.
        returned: the buffers that it returned, by name.
    """

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
"""Where calls are noted; None where nobody looks."""


@contextmanager
def noting_calls() -> Generator[list[Call]]:
    """A context in which this thread notes the calls of modules as pure functions."""
    calls: list[Call] = []
    token = LOOKING.set(calls)
    try:
        yield calls
    finally:
        LOOKING.reset(token)


def _same(x: Tensor, y: Tensor) -> bool:
    return torch.equal(x, y) or (x.is_floating_point() and torch.equal(x.nan_to_num(), y.nan_to_num()))
