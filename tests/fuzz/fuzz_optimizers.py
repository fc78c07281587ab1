"""Valid calls of optimizers, each with a step that it takes, and of clipping."""

from typing import Any

import torch
from fuzz_values import given, key, params
from garbage import FLOATS, NOT_NEGATIVE, OPTION, SWITCH, Call, kinds

import functional_jd as jd

# What is valid beside the values below, by the name of the argument; and the arguments that are functions of the user.
FINE = {
    **dict.fromkeys(("lr", "eps", "weight_decay"), NOT_NEGATIVE),
    **dict.fromkeys(("multiplier", "max_norm"), NOT_NEGATIVE - {"true"}),
    **{"momentum": kinds({"zero"}), "nesterov": SWITCH, "batch_size": kinds({"scalar"}), "merit": OPTION},
    **{"rates": kinds({"nans"}), "direction": FLOATS, "norm_type": kinds({"inf"})},
}
FUNCTIONS = kinds({"lr", "labels", "merit"})


def _call(f: Any, **fine: Any) -> Any:
    def of(**values: Any) -> Call:
        named = {name: FINE[name] for name in values if name in FINE} | fine
        return Call(f, given(**values), named, FUNCTIONS.intersection(values))

    return of


def _optimizer(build: Any) -> Any:
    """An optimizer is built, started, and takes a step."""

    def use(**hyper: Any) -> Any:
        optimizer = build(**hyper)
        return optimizer.update(params(), optimizer.init(params()), params())

    return _call(use)


def _searched(**hyper: Any) -> Any:
    optimizer = jd.line_search(**hyper)
    return optimizer.search(lambda found: found["w"], params(), optimizer.init(params()), params())


def _by_name(name: str, leaf: Any) -> str:
    return "small" if leaf.ndim == 0 else "large"


OPTIMIZERS = {
    "sgd": _optimizer(jd.sgd)(lr=0.1, momentum=0.9, nesterov=False, weight_decay=0.1),
    "adamw": _optimizer(jd.adamw)(lr=0.1, betas=(0.9, 0.99), eps=1e-8, weight_decay=0.1),
    "alternating": _optimizer(lambda **hyper: jd.aggregators.alternating(**hyper)[1])(
        rule=jd.upgrad, objectives=2, lr=0.1, betas=(0.9, 0.99), eps=1e-8
    ),
    "from_torch": _optimizer(jd.from_torch)(cls=lambda: torch.optim.SGD, lr=0.1),
    "from_transformation": _optimizer(jd.from_transformation)(transformation=lambda: _Transformation()),
    "by_label": _optimizer(jd.by_label)(
        optimizers=lambda: {"small": jd.sgd(0.1), "large": jd.adamw()}, labels=lambda: _by_name
    ),
    "noised": _optimizer(jd.noised)(
        optimizer=lambda: jd.sgd(0.1), key=lambda: key(0), multiplier=1.0, max_norm=1.0, batch_size=4.0
    ),
    "line_search": _call(_searched)(optimizer=lambda: jd.sgd(0.1), rates=[1.0, 0.0], merit=lambda: torch.sum),
    "global_norm": _call(jd.optimizers.global_norm)(direction=params, norm_type=2.0),
    "clip_by_norm": _call(jd.optimizers.clip_by_norm, max_norm=NOT_NEGATIVE | {"inf"})(
        direction=params, max_norm=1.0, norm_type=2.0
    ),
}


class _Transformation:
    def init(self, params):
        return ()

    def update(self, updates, state, params):
        return updates, state
