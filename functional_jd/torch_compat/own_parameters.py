"""Which outputs of modules were computed with the modules' own parameters, while others stood in their places."""

from collections.abc import Generator, Iterable
from contextlib import contextmanager
from threading import local
from typing import Any

from torch import Tensor

from functional_jd.torch_compat.autograd_graph import nodes_from
from functional_jd.torch_compat.vmap_levels import innermost


@contextmanager
def noting_own_parameters() -> Generator[list[str]]:
    """A context in which the names of parameters are noted that a module, called as a pure function in this thread,
    used beside those that it was given.
    """
    around, _THREAD.names = _THREAD.names, []
    try:
        yield _THREAD.names
    finally:
        _THREAD.names = around


def are_noted() -> bool:
    """Whether somebody asks."""
    return _THREAD.names is not None


def note_own_parameters(output: Iterable[Any], replaced: dict[str, Tensor]) -> None:
    """Note the parameters from which the output was computed.

    Args:
        output: the leaves of what the module returned.
        replaced: by name, the module's own parameters in the places of which others stood.
    """
    if _THREAD.names is not None:
        inside = [innermost(x) for x in output if isinstance(x, Tensor)]  # whose graph is that of plain autograd
        roots = [x.grad_fn for x in inside if x.grad_fn is not None]
        found = {id(getattr(node, "variable", None)) for node in nodes_from(roots)}
        _THREAD.names += [name for name, own in replaced.items() if id(own) in found]


class _Thread(local):
    names: list[str] | None = None


_THREAD = _Thread()
