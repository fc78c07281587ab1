"""Valid calls of optimizers, each with a step that it takes, and of clipping."""

from typing import Any

import torch
from fuzz_values import key, params
from garbage import FLOATS, NOT_NEGATIVE, OPTION, SWITCH, Call, kinds

import functional_jd as jd


def _optimizer(build, fine: dict[str, Any], valid, functions: frozenset[str] = kinds()) -> Call:
    """An optimizer is built, started, and takes a step."""

    def use(**hyper: Any) -> Any:
        optimizer = build(**hyper)
        return optimizer.update(params(), optimizer.init(params()), params())

    return Call(use, valid, fine, functions)


def _searched(**hyper: Any) -> Any:
    optimizer = jd.line_search(**hyper)
    return optimizer.search(lambda found: found["w"], params(), optimizer.init(params()), params())


def _by_name(name: str, leaf: Any) -> str:
    return "small" if leaf.ndim == 0 else "large"


OPTIMIZERS = {
    "sgd": _optimizer(
        jd.sgd,
        {"lr": NOT_NEGATIVE, "momentum": kinds({"zero"}), "nesterov": SWITCH, "weight_decay": NOT_NEGATIVE},
        lambda: {"lr": 0.1, "momentum": 0.9, "nesterov": False, "weight_decay": 0.1},
        kinds({"lr"}),
    ),
    "adamw": _optimizer(
        jd.adamw,
        {"lr": NOT_NEGATIVE, "eps": NOT_NEGATIVE, "weight_decay": NOT_NEGATIVE},
        lambda: {"lr": 0.1, "betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.1},
        kinds({"lr"}),
    ),
    "alternating": _optimizer(
        lambda **hyper: jd.aggregators.alternating(**hyper)[1],
        {"lr": NOT_NEGATIVE, "eps": NOT_NEGATIVE},
        lambda: {"rule": jd.upgrad(), "objectives": 2, "lr": 0.1, "betas": (0.9, 0.99), "eps": 1e-8},
        kinds({"lr"}),
    ),
    "from_torch": _optimizer(
        jd.from_torch, {"lr": NOT_NEGATIVE}, lambda: {"cls": torch.optim.SGD, "lr": 0.1}, kinds({"lr"})
    ),
    "from_transformation": _optimizer(jd.from_transformation, {}, lambda: {"transformation": _Transformation()}),
    "by_label": _optimizer(
        jd.by_label,
        {},
        lambda: {"optimizers": {"small": jd.sgd(0.1), "large": jd.adamw()}, "labels": _by_name},
        kinds({"labels"}),
    ),
    "noised": _optimizer(
        jd.noised,
        {"multiplier": NOT_NEGATIVE - {"true"}, "max_norm": NOT_NEGATIVE - {"true"}, "batch_size": kinds({"scalar"})},
        lambda: {"optimizer": jd.sgd(0.1), "key": key(0), "multiplier": 1.0, "max_norm": 1.0, "batch_size": 4.0},
    ),
    "line_search": Call(
        _searched,
        lambda: {"optimizer": jd.sgd(0.1), "rates": [1.0, 0.0], "merit": torch.sum},
        {"merit": OPTION, "rates": kinds({"nans"})},
        kinds({"merit"}),
    ),
    "global_norm": Call(
        jd.optimizers.global_norm,
        lambda: {"direction": params(), "norm_type": 2.0},
        {"direction": FLOATS, "norm_type": kinds({"inf"})},
    ),
    "clip_by_norm": Call(
        jd.optimizers.clip_by_norm,
        lambda: {"direction": params(), "max_norm": 1.0, "norm_type": 2.0},
        {"direction": FLOATS, "max_norm": NOT_NEGATIVE | {"inf"}, "norm_type": kinds({"inf"})},
    ),
}


class _Transformation:
    def init(self, params):
        return ()

    def update(self, updates, state, params):
        return updates, state
