"""Which buffers modules moved that were called as pure functions."""

from collections.abc import Generator, Mapping
from contextlib import contextmanager
from threading import local

import torch
from torch import Tensor

from functional_jd.torch_compat.torch_internals import is_wrapped


@contextmanager
def noting_moved_buffers() -> Generator[dict[str, Tensor]]:
    """A context in which buffers are noted, by name, that a module, called as a pure function in this thread, returns
    with other values than it was given.
    """
    around, _THREAD.moved = _THREAD.moved, {}
    try:
        yield _THREAD.moved
    finally:
        _THREAD.moved = around


def note_moved_buffers(given: Mapping[str, Tensor], returned: Mapping[str, Tensor]) -> None:
    """Note the buffers that differ, where somebody asks, and where no transform hides their values."""
    if _THREAD.moved is not None:
        for name, x in returned.items():
            old = given[name]
            if not (is_wrapped(x) or is_wrapped(old) or (x.shape == old.shape and _same(x, old))):
                _THREAD.moved[name] = x


def _same(x: Tensor, y: Tensor) -> bool:
    return torch.equal(x, y) or (x.is_floating_point() and torch.equal(x.nan_to_num(), y.nan_to_num()))


class _Thread(local):
    moved: dict[str, Tensor] | None = None


_THREAD = _Thread()
