"""Which parameters modules were given that were called as pure functions, and which of their own they used beside."""

from collections.abc import Generator, Iterable, Mapping
from contextlib import contextmanager
from threading import local
from typing import Any, NamedTuple

from torch import Tensor

from functional_jd.torch_compat.autograd_graph import nodes_from
from functional_jd.torch_compat.vmap_levels import innermost


class Noted(NamedTuple):
    """What is noted of modules that are called as pure functions.

    Attributes:
        own: the names of parameters that they used beside those that they were given.
        given: the parameters that they were given, each with its name.
    """

    own: list[str]
    given: list[tuple[str, Tensor]]


@contextmanager
def noting_parameters() -> Generator[Noted]:
    """A context in which the parameters of modules are noted that are called as pure functions in this thread."""
    around, _THREAD.noted = _THREAD.noted, Noted([], [])
    try:
        yield _THREAD.noted
    finally:
        _THREAD.noted = around


def are_noted() -> bool:
    """Whether somebody asks."""
    return _THREAD.noted is not None


def note_parameters(output: Iterable[Any], replaced: dict[str, Tensor], given: Mapping[str, Tensor]) -> None:
    """Note the parameters that were given, and those from which the output was computed beside.

    Args:
        output: the leaves of what the module returned.
        replaced: by name, the module's own parameters in the places of which others stood.
        given: by name, the parameters that the caller gave.
    """
    if _THREAD.noted is not None:
        inside = [innermost(x) for x in output if isinstance(x, Tensor)]  # whose graph is that of plain autograd
        roots = [x.grad_fn for x in inside if x.grad_fn is not None]
        found = {id(getattr(node, "variable", None)) for node in nodes_from(roots)}
        _THREAD.noted.own.extend(name for name, own in replaced.items() if id(own) in found)
        _THREAD.noted.given.extend((name, innermost(x)) for name, x in given.items())


class _Thread(local):
    noted: Noted | None = None


_THREAD = _Thread()
