"""From losses to a direction: Jacobian, Gramian, weighted pass, and the choice between them."""

from importlib import import_module
from typing import Any

from functional_jd.engines.choose import EngineChoice

# The engines by hand. They stand beside the step, which no file of this package imports: found when first named.
_BY_HAND = ["Engine", "features_engine", "gramian_engine", "jacobian_engine", "weighted_engine"]

__all__ = ["EngineChoice", *_BY_HAND]  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> Any:
    if name not in _BY_HAND:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module("functional_jd.training.engines"), name)
