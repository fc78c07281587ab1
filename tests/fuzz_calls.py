"""A valid call of every public function, and what else is valid in the place of each argument."""

from functools import partial
from typing import Any

import torch
from fuzz import CALLABLE, EVERYTHING, Call
from fuzz_rules import (
    AGGREGATION,
    BATCHES,
    EMPTY,
    FLOATS,
    NOT_NEGATIVE,
    OF_TWO,
    OPTION,
    RULES,
    SWITCH,
    TREE,
    kinds,
    loss_of_one,
    losses,
    method,
    params,
    rows,
    state,
    values,
    x,
)

import functional_jd as jd
from functional_jd import distributed, random


def _optimizer(build, fine: dict[str, Any], valid, functions: frozenset[str] = kinds()) -> Call:
    """An optimizer is built, started, and takes a step."""

    def use(**hyper: Any) -> None:
        optimizer = build(**hyper)
        optimizer.update(params(), optimizer.init(params()), params())

    return Call(use, valid, fine, functions)


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
        lambda: {
            "optimizer": jd.sgd(0.1),
            "key": random.key(0),
            "multiplier": 1.0,
            "max_norm": 1.0,
            "batch_size": 4.0,
        },
    ),
    "global_norm": Call(
        jd.global_norm,
        lambda: {"direction": params(), "norm_type": 2.0},
        {"direction": FLOATS, "norm_type": kinds({"inf"})},
    ),
    "clip_by_norm": Call(
        jd.clip_by_norm,
        lambda: {"direction": params(), "max_norm": 1.0, "norm_type": 2.0},
        {"direction": FLOATS, "max_norm": NOT_NEGATIVE | {"inf"}, "norm_type": kinds({"inf"})},
    ),
    "clip_by_value": Call(
        jd.clip_by_value,
        lambda: {"direction": params(), "limit": 1.0},
        {"direction": FLOATS, "limit": NOT_NEGATIVE | {"inf"}},
    ),
}


class _Transformation:
    def init(self, params):
        return ()

    def update(self, updates, state, params):
        return updates, state


def _scaled(**entries: Any) -> dict[str, Any]:
    return jd.scale_state_to_dict(jd.scale_state(shape=(2,))) | entries


class _Double(torch.autograd.Function):
    forward = staticmethod(lambda ctx, x: 2 * x)
    backward = staticmethod(lambda ctx, g: 2 * g)


def _called(build, *args: Any):
    """A function that is built is called too."""
    return lambda **given: build(**given)(*args)


PRECISION = {
    "autocast": Call(
        lambda f, dtype: jd.autocast(f, dtype)(x()),
        lambda: {"f": torch.sum, "dtype": torch.bfloat16},
        {"f": CALLABLE},
        kinds({"f"}),
    ),
    "custom": Call(
        lambda function, cast_inputs: jd.custom(function, cast_inputs=cast_inputs),
        lambda: {"function": _Double, "cast_inputs": torch.float32},
        {"function": OPTION, "cast_inputs": OPTION},
    ),
    "float32_island": Call(
        lambda f: jd.float32_island(f)(x()), lambda: {"f": torch.sum}, {"f": CALLABLE}, kinds({"f"})
    ),
    "policy": Call(lambda description: jd.policy(description), lambda: {"description": "compute=float16"}),
    "scale": Call(
        jd.scale,
        lambda: {"state": jd.scale_state(shape=2), "tree": values()},
        {"tree": OF_TWO | EMPTY | {"sparse"}, "state": kinds({"scalar", "nans", "meta"})},
    ),
    "unscale": Call(
        jd.unscale,
        lambda: {"state": jd.scale_state(shape=2), "tree": rows()},
        {"tree": OF_TWO | EMPTY | {"sparse"}, "state": kinds({"scalar", "nans", "meta"})},
    ),
    "update_scale": Call(
        jd.update_scale,
        lambda: {"state": jd.scale_state(), "finite": torch.tensor(True), "losses_finite": torch.tensor(True)},
        {"losses_finite": OPTION},
    ),
    "select": Call(jd.select, lambda: {"finite": torch.tensor(True), "new": params(), "old": params()}),
    "scale_state": Call(
        jd.scale_state,
        lambda: {
            "init_scale": 2.0,
            "growth_factor": 2.0,
            "backoff_factor": 0.5,
            "growth_interval": 5,
            "shape": 2,
            "device": "cpu",
        },
        {"growth_interval": kinds({"minus_one", "zero"}), "shape": kinds({"list"}), "device": OPTION},
    ),
    "no_scale": Call(jd.no_scale, lambda: {"device": "cpu"}, {"device": OPTION}),
    "scale_state_to_dict": Call(jd.scale_state_to_dict, lambda: {"state": jd.scale_state()}),
    "scale_state_from_dict": Call(
        jd.scale_state_from_dict, lambda: {"entries": _scaled(), "device": "cpu"}, {"device": OPTION}
    ),
}


def _module() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Linear(2, 1)


def _apply(module, params, buffers, x):
    return jd.functional(module)(params, buffers, x)


def _split():
    return jd.partition(params(), lambda name, _: name == "w")


OBJECTIVES = {
    "functional": Call(
        _apply,
        lambda: {"module": _module(), "params": dict(_module().named_parameters()), "buffers": {}, "x": x()},
        {"buffers": kinds({"dict"}), "module": kinds({"module"}), "x": EVERYTHING},
        kinds({"x"}),
    ),
    "partition": Call(
        jd.partition,
        lambda: {"tree": params(), "predicate": lambda name, _: name == "w"},
        {"tree": TREE | EMPTY},
        kinds({"predicate"}),
    ),
    "merge": Call(
        jd.merge,
        lambda: {"chosen": _split()[0], "rest": _split()[1]},
        dict.fromkeys(("chosen", "rest"), kinds({"dict"})),
    ),
    "per_example": Call(
        lambda loss, in_dims, params, x: jd.per_example(loss, in_dims)(params, x),
        lambda: {"loss": loss_of_one, "in_dims": 0, "params": params(), "x": torch.ones(3, 2)},
        {"in_dims": kinds({"zero"}), "x": EVERYTHING},
        kinds({"loss"}),
    ),
    "multitask": Call(
        lambda features, heads, params, x: jd.multitask(features, heads)(params, x),
        lambda: {
            "features": lambda shared, x: shared["w"] * x,
            "heads": lambda own, features, x: features.sum() + own["b"],
            "params": {"shared": params(), "heads": params()},
            "x": x(),
        },
        {"x": EVERYTHING},
        kinds({"features", "heads"}),
    ),
}


USUAL = object()
"""Stands for what losses usually return. Garbage in its place is what they return too."""

CONSTANTS = kinds({"wrong_shape", "scalar", "nans", "meta", "nested", "record"})


def _returning(returned: Any, losses: Any) -> Any:
    return losses if returned is USUAL else lambda params, x: returned


def _jacobian(losses, returned, params, x, **options):
    return jd.jacobian_fn(_returning(returned, losses), **options)(params, x)


def _gramian(losses, returned, params, x, weights, **options):
    found, _, pullback = jd.gramian_fn(_returning(returned, losses), **options)(params, x)
    return pullback(weights if returned is USUAL else torch.ones(len(found)))


def _squared_norms(losses, returned, params, x, weights, **options):
    found, _, pullback = jd.squared_norms_fn(_returning(returned, losses), **options)(params, x)
    return pullback(weights if returned is USUAL else torch.ones(len(found)))


def _cross(losses, returned, params, batch_a, batch_b, scale):
    return jd.cross_gramian_fn(_returning(returned, losses), scale=scale)(params, batch_a, batch_b)


def _weighted(losses, returned, params, x, weights, last, **options):
    values, pullback = jd.weighted_fn(_returning(returned, losses), **options)(params, x)
    m = len(jd.objective_names(values))
    return pullback(weights if returned is USUAL else torch.ones(m), last=last)


_OF_TWO = {"scale": OPTION | {"scalar", "nans"}, "x": EVERYTHING, "returned": CONSTANTS}
_LOSSES = kinds({"losses"})


def _argument() -> dict[str, Any]:
    return {
        "losses": losses,
        "returned": USUAL,
        "params": params(),
        "x": x(),
        "has_aux": False,
        "scale": jd.scale_state(),
    }


ENGINES = {
    "jacobian_fn": Call(
        _jacobian,
        lambda: {**_argument(), "argnums": 0, "mode": "loop", "chunk_size": 2},
        _OF_TWO | {"chunk_size": OPTION, "argnums": kinds({"zero", "minus_one"})},
        _LOSSES,
    ),
    "gramian_fn": Call(
        _gramian,
        lambda: {**_argument(), "argnums": 0, "weights": torch.ones(2)},
        _OF_TWO | {"argnums": kinds({"zero", "minus_one"}), "weights": kinds({"nans", "meta"})},
        _LOSSES,
    ),
    "squared_norms_fn": Call(
        _squared_norms,
        lambda: {**_argument(), "argnums": 0, "weights": torch.ones(2)},
        _OF_TWO | {"argnums": kinds({"zero", "minus_one"}), "weights": kinds({"nans", "meta"})},
        _LOSSES,
    ),
    "cross_gramian_fn": Call(
        _cross,
        lambda: {
            "losses": losses,
            "returned": USUAL,
            "params": params(),
            "batch_a": (x(),),
            "batch_b": (x(),),
            "scale": jd.scale_state(),
        },
        {"scale": OPTION | {"scalar"}, "returned": CONSTANTS},
        _LOSSES,
    ),
    "weighted_fn": Call(
        _weighted,
        lambda: {**_argument(), "weights": torch.ones(2), "last": False},
        _OF_TWO | {"weights": kinds({"nans", "meta"}), "last": SWITCH},
        _LOSSES,
    ),
    "jacobian_engine": Call(jd.jacobian_engine, lambda: {"mode": "loop", "chunk_size": 2}, {"chunk_size": OPTION}),
    "gramian_engine": Call(jd.gramian_engine, dict),
    "weighted_engine": Call(jd.weighted_engine, dict),
    "features_engine": Call(jd.features_engine, dict),
}


def _train_state(params, x, losses, returned, **others):
    return jd.train_state(params, x, losses=_returning(returned, losses), **others)


def _step(state, x, losses, returned, **others):
    return jd.step(state, x, losses=_returning(returned, losses), **others)


def _chosen(losses, state, x, aggregator):
    return jd.chosen_engine(losses, state, x, aggregator=aggregator)


def _keep(info: Any) -> None:
    pass


TRAINING = {
    "train_state": Call(
        _train_state,
        lambda: {
            "params": params(),
            "x": x(),
            **method(),
            "returned": USUAL,
            "scale": jd.scale_state(),
            "buffers": (),
            "engine": "auto",
            "has_aux": False,
        },
        {"x": EVERYTHING, "scale": OPTION},
        _LOSSES,
    ),
    "step": Call(
        _step,
        lambda: {"state": state(), "x": x(), **method(), "returned": USUAL, "engine": "auto", "has_aux": False},
        {"x": EVERYTHING, "returned": CONSTANTS},
        _LOSSES,
    ),
    "steps": Call(
        lambda **given: list(jd.steps(**given)),
        lambda: {"step": partial(jd.step, **method()), "state": state(), "batches": [x()], "patience": 5},
        {"patience": OPTION, "batches": BATCHES},
        kinds({"step"}),
        ("step",),
    ),
    "fit": Call(
        jd.fit,
        lambda: {
            "step": partial(jd.step, **method()),
            "state": state(),
            "batches": [x()],
            "on_step": _keep,
            "progress": False,
            "patience": 5,
        },
        {"patience": OPTION, "on_step": OPTION | {"class"}, "batches": BATCHES, "progress": SWITCH},
        kinds({"step", "on_step"}),
        ("step",),
    ),
    "chosen_engine": Call(
        _chosen,
        lambda: {"losses": losses, "state": state(), "x": x(), "aggregator": jd.upgrad()},
        {"x": EVERYTHING, "losses": CALLABLE},
        _LOSSES,
    ),
    "to_checkpoint": Call(jd.to_checkpoint, lambda: {"state": state()}, {"state": TREE | EMPTY}),
    "from_checkpoint": Call(jd.from_checkpoint, lambda: {"checkpoint": jd.to_checkpoint(state()), "like": state()}),
}

RANDOM = {
    "key": Call(
        random.key, lambda: {"seed": 0, "device": "cpu"}, {"seed": kinds({"minus_one", "zero"}), "device": OPTION}
    ),
    "split": Call(random.split, lambda: {"key": random.key(0), "n": 2}, {"n": kinds({"zero"})}),
    "uniform": Call(
        random.uniform,
        lambda: {"key": random.key(0), "shape": (2,), "dtype": torch.float32},
        {"shape": kinds({"list"})},
    ),
    "normal": Call(
        random.normal,
        lambda: {"key": random.key(0), "shape": (2,), "dtype": torch.float32},
        {"shape": kinds({"list"})},
    ),
    "permutation": Call(random.permutation, lambda: {"key": random.key(0), "n": 2}, {"n": kinds({"zero"})}),
    "keyed": Call(
        lambda f, key: random.keyed(f)(key, x()),
        lambda: {"f": torch.nn.functional.dropout, "key": random.key(0)},
        {"f": CALLABLE},
        kinds({"f"}),
    ),
}

DISTRIBUTED = {
    "mean_jacobian": Call(
        distributed.mean_jacobian,
        lambda: {"jacobian": rows(), "group": None},
        {"jacobian": FLOATS, "group": OPTION},
        names=("distributed",),
    ),
    "agree": Call(
        distributed.agree,
        lambda: {"finite": torch.tensor(True), "group": None},
        {"group": OPTION},
        names=("distributed",),
    ),
    "replicate": Call(
        distributed.replicate,
        lambda: {"tree": params(), "group": None},
        {"tree": TREE | EMPTY, "group": OPTION},
        names=("distributed",),
    ),
    "replicated": Call(
        lambda engine, group: jd.train_state(params(), x(), **method(), engine=distributed.replicated(engine, group)),
        lambda: {"engine": "auto", "group": None},
        {"group": OPTION},
        names=("distributed",),
    ),
}

CALLS: dict[str, dict[str, Call]] = {
    "functional_jd": {
        **RULES,
        **AGGREGATION,
        **OPTIMIZERS,
        **PRECISION,
        **OBJECTIVES,
        **ENGINES,
        **TRAINING,
    },
    "functional_jd.random": RANDOM,
    "functional_jd.distributed": DISTRIBUTED,
}
