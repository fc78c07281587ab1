"""Names of torch without a promise: a torch that no longer has one breaks only what needs it, with one sentence."""

from importlib import import_module
from typing import Any

import torch

SUPPORTED = "torch>=2.11"
"""What `pyproject.toml` asks for."""


def private(name: str, feature: str, *parts: str, otherwise: Any = None) -> Any:
    """An object of torch by its dotted name, as it is: bound once, it costs no call more.

    Args:
        name: below `torch`.
        feature: what needs it, for the error.
        parts: attributes that it must have.
        otherwise: what takes its place where torch has no such name. None: a stand-in that raises as soon as it is
            called or asked for an attribute.
    """
    try:
        found = _resolved(name)
        lacking = [f"{name}.{part}" for part in parts if not hasattr(found, part)]
    except (AttributeError, ImportError):
        found, lacking = None, [name]
    if not lacking:
        return found
    return Missing(lacking[0], feature) if otherwise is None else otherwise


def missing(name: str, feature: str) -> RuntimeError:
    """The error of a feature that needs a name which this torch does not have."""
    name = name.removesuffix(".__get__").removesuffix(".default")
    return RuntimeError(
        f"functional_jd: expected torch.{name} for {feature}, found torch {torch.__version__} "
        f'without it; install another: pip install "{SUPPORTED}".'
    )


def _resolved(name: str) -> Any:
    found, path = torch, "torch"
    for part in name.split("."):
        path = f"{path}.{part}"
        try:
            found = getattr(found, part)
        except AttributeError:
            found = import_module(path)
    return found


class Missing:
    """Stands in for a name that torch does not have, until it is called or asked for an attribute."""

    def __init__(self, name: str, feature: str):
        self.absent = name, feature

    def __call__(self, *_: Any, **__: Any) -> Any:
        raise missing(*self.absent)

    def __getattr__(self, _: str) -> Any:
        raise missing(*self.absent)
