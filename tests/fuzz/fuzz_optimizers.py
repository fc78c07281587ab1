"""Valid calls of optimizers, each with a step that it takes, and of clipping."""

from typing import Any

import torch
from fuzz_values import Argument, call, params
from garbage import NOT_NEGATIVE, OPTION, SWITCH, Call, kinds

import functional_jd as jd


def _optimizer(public: Any, build: Any = None, **own: Any) -> Call:
    """An optimizer is built, started, and takes a step."""

    def use(**hyper: Any) -> Any:
        optimizer = (build or public)(**hyper)
        return optimizer.update(params(), optimizer.init(params()), params())

    return call(use, public, **own)


def _searched(**hyper: Any) -> Any:
    optimizer = jd.line_search(**hyper)
    return optimizer.search(lambda found: found["w"], params(), optimizer.init(params()), params())


def _by_name(name: str, leaf: Any) -> str:
    return "small" if leaf.ndim == 0 else "large"


class _Transformation:
    def init(self, params):
        return ()

    def update(self, updates, state, params):
        return updates, state


NOT_NEGATIVE_NUMBER = NOT_NEGATIVE - {"true"}

OPTIMIZERS = {
    "sgd": _optimizer(jd.sgd, nesterov=Argument(False, SWITCH)),
    "adamw": _optimizer(jd.adamw),
    "alternating": _optimizer(
        jd.aggregators.alternating, lambda **hyper: jd.aggregators.alternating(**hyper)[1], objectives=2
    ),
    "from_torch": _optimizer(jd.from_torch, cls=lambda: torch.optim.SGD, lr=0.1),
    "from_transformation": _optimizer(jd.from_transformation, transformation=lambda: _Transformation()),
    "by_label": _optimizer(
        jd.by_label,
        optimizers=lambda: {"small": jd.sgd(0.1), "large": jd.adamw()},
        labels=Argument(lambda: _by_name, function=True),
    ),
    "noised": _optimizer(
        jd.noised, multiplier=Argument(1.0, NOT_NEGATIVE_NUMBER), max_norm=Argument(1.0, NOT_NEGATIVE_NUMBER)
    ),
    "line_search": call(
        _searched,
        jd.line_search,
        rates=Argument([1.0, 0.0], kinds({"nans"})),
        merit=Argument(lambda: torch.sum, OPTION, function=True),
    ),
    "global_norm": call(jd.optimizers.global_norm),
    "clip_by_norm": call(jd.optimizers.clip_by_norm, max_norm=Argument(1.0, NOT_NEGATIVE | {"inf"})),
}
