"""Optimizers as pairs of pure functions."""

from functional_jd.optimizers.adamw import adamw
from functional_jd.optimizers.adapters import from_torch, from_transformation
from functional_jd.optimizers.base import Optimizer
from functional_jd.optimizers.by_label import by_label
from functional_jd.optimizers.clipping import clip_by_norm, global_norm
from functional_jd.optimizers.line_search import line_search
from functional_jd.optimizers.noised import noised
from functional_jd.optimizers.sgd import sgd

__all__ = [
    "Optimizer",
    "adamw",
    "by_label",
    "clip_by_norm",
    "from_torch",
    "from_transformation",
    "global_norm",
    "line_search",
    "noised",
    "sgd",
]
