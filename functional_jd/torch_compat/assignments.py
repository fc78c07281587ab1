"""What losses assign to attributes of modules, noted before it is done."""

from collections.abc import Callable, Generator
from contextlib import contextmanager
from threading import Lock, local
from typing import Any

from torch import nn

from functional_jd.torch_compat.torch_internals import module_tensors


@contextmanager
def noting_assignments(note: Callable[[nn.Module, str], None]) -> Generator[None]:
    """A context in which this thread calls `note(module, name)` before it assigns to an attribute of a module."""
    around, _THREAD.note = _THREAD.note, note
    with _LOCK:
        if not _INSIDE[0]:
            _OWN[0] = nn.Module.__setattr__
            nn.Module.__setattr__ = _assign  # pyright: ignore[reportAttributeAccessIssue]
        _INSIDE[0] += 1
    try:
        yield
    finally:
        _THREAD.note = around
        with _LOCK:
            _INSIDE[0] -= 1
            if not _INSIDE[0]:
                nn.Module.__setattr__ = _OWN[0]


def put_back(module: nn.Module, name: str) -> Callable[[], None]:
    """A function that gives an attribute of a module the value that it has now."""
    homes = [*module_tensors(module), vars(module)]
    found = [(home, home[name]) for home in homes if name in home]

    def undo() -> None:
        for home in homes:
            if not any(home is other for other, _ in found):
                home.pop(name, None)
        for home, value in found:
            home[name] = value

    return undo


def _assign(module: Any, name: str, value: Any) -> None:
    if _THREAD.note is not None:
        _THREAD.note(module, name)
    _OWN[0](module, name, value)


class _Thread(local):
    note: Callable[[nn.Module, str], None] | None = None


_OWN: list[Any] = [nn.Module.__setattr__]
_THREAD, _LOCK = _Thread(), Lock()
_INSIDE = [0]  # how many contexts are entered
