"""Valid calls of what is given losses: objectives, engines, and steps; and what those losses return."""

from functools import partial
from typing import Any

import torch
from fuzz_values import (
    BATCHES,
    EMPTY,
    NOT_NEGATIVE,
    OPTION,
    SWITCH,
    TREE,
    WHERE,
    key,
    kinds,
    loss_of_one,
    losses,
    method,
    ones,
    params,
    scale_state,
    state,
    x,
)
from garbage import CALLABLE, EVERYTHING, Call

import functional_jd as jd


def _module() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Linear(2, 1).to(WHERE["now"])


def _apply(module, params, buffers, x):
    return jd.functional(module)(params, buffers, x)


def _split():
    return jd.objectives.partition(params(), lambda name, _: name == "w")


OBJECTIVES = {
    "functional": Call(
        _apply,
        lambda: {"module": _module(), "params": dict(_module().named_parameters()), "buffers": {}, "x": x()},
        {"buffers": kinds({"dict"}), "module": kinds({"module"}), "x": EVERYTHING},
        kinds({"x"}),
    ),
    "partition": Call(
        jd.objectives.partition,
        lambda: {"tree": params(), "predicate": lambda name, _: name == "w"},
        {"tree": TREE | EMPTY},
        kinds({"predicate"}),
    ),
    "merge": Call(
        jd.objectives.merge,
        lambda: {"chosen": _split()[0], "rest": _split()[1]},
        dict.fromkeys(("chosen", "rest"), kinds({"dict"})),
    ),
    "per_example": Call(
        lambda loss, in_dims, params, x: jd.per_example(loss, in_dims)(params, x),
        lambda: {"loss": loss_of_one, "in_dims": 0, "params": params(), "x": ones(3, 2)},
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


def _products(f, losses, returned, params, x, weights, **options):
    found, values, pullback = f(_returning(returned, losses), **options)(params, x)
    return found, values, pullback(weights if returned is USUAL else ones(len(found)))


def _cross(losses, returned, params, batch_a, batch_b, scale):
    return jd.cross_gramian_fn(_returning(returned, losses), scale=scale)(params, batch_a, batch_b)


def _weighted(losses, returned, params, x, weights, last, **options):
    values, pullback = jd.weighted_fn(_returning(returned, losses), **options)(params, x)
    m = len(jd.objective_names(values))
    return values, pullback(weights if returned is USUAL else ones(m), last=last)


def _point():
    return x().clone().requires_grad_()


def _weigh(losses, parameters, **more):
    """The usual losses are those of the parameters, or, where these are garbage, of others."""
    usual = isinstance(parameters, list) and len(parameters) == 1
    point = parameters[0] if usual else _point()
    return jd.weigh(point * point if losses is USUAL else losses, parameters, **more)


def _weights(losses, returned, aggregator, params, x, group):
    return jd.weights_fn(_returning(returned, losses), aggregator, group=group)(params, x)


_OF_TWO = {"scale": OPTION | {"scalar", "nans"}, "x": EVERYTHING, "returned": CONSTANTS}
_LOSSES = kinds({"losses"})


def _given(**others: Any) -> dict[str, Any]:
    """Losses, what they return, and where: most of these functions take them."""
    return {"losses": losses, "returned": USUAL, "params": params(), "x": x()} | others


def _argument(**others: Any) -> dict[str, Any]:
    return _given(has_aux=False, scale=scale_state(), **others)


_ARGNUMS = kinds({"zero", "minus_one"})
_WEIGHTS = kinds({"nans", "meta"})


def _of_products(f: Any) -> Call:
    fine = _OF_TWO | {"argnums": _ARGNUMS, "weights": _WEIGHTS}
    return Call(partial(_products, f), lambda: _argument(argnums=0, weights=ones(2)), fine, _LOSSES)


ENGINES = {
    "jacobian_fn": Call(
        _jacobian,
        lambda: _argument(argnums=0, mode="loop", chunk_size=2),
        _OF_TWO | {"chunk_size": OPTION, "argnums": _ARGNUMS},
        _LOSSES,
    ),
    "gramian_fn": _of_products(jd.gramian_fn),
    "squared_norms_fn": _of_products(jd.squared_norms_fn),
    "cross_gramian_fn": Call(
        _cross,
        lambda: {
            "losses": losses,
            "returned": USUAL,
            "params": params(),
            "batch_a": (x(),),
            "batch_b": (x(),),
            "scale": scale_state(),
        },
        {"scale": OPTION | {"scalar"}, "returned": CONSTANTS},
        _LOSSES,
    ),
    "weighted_fn": Call(
        _weighted,
        lambda: _argument(weights=ones(2), last=False),
        _OF_TWO | {"weights": _WEIGHTS, "last": SWITCH},
        _LOSSES,
    ),
    "weigh": Call(
        _weigh,
        lambda: {
            "losses": USUAL,
            "parameters": [_point()],
            "aggregator": jd.upgrad(),
            "state": None,
            "scale": None,
            "features": None,
            "group": False,
        },
        {"state": OPTION, "scale": OPTION, "group": OPTION, "features": OPTION},
        kinds({"losses"}),
        names=("distributed",),
    ),
    "weights_fn": Call(
        _weights,
        lambda: _given(aggregator=jd.upgrad(), group=False),
        {"x": EVERYTHING, "returned": CONSTANTS, "group": OPTION},
        _LOSSES,
        names=("distributed",),
    ),
    "jacobian_engine": Call(
        jd.engines.jacobian_engine, lambda: {"mode": "loop", "chunk_size": 2}, {"chunk_size": OPTION}
    ),
    "gramian_engine": Call(jd.engines.gramian_engine, dict),
    "weighted_engine": Call(jd.engines.weighted_engine, dict),
    "features_engine": Call(jd.engines.features_engine, dict),
}


def _train_state(params, x, losses, returned, **others):
    return jd.train_state(params, x, losses=_returning(returned, losses), **others)


def _step(state, x, losses, returned, **others):
    return jd.step(state, x, losses=_returning(returned, losses), **others)


def _chosen(losses, state, x, aggregator):
    return jd.chosen_engine(state, x, losses=losses, aggregator=aggregator)


def _privately(**given):
    how, batch = jd.private(**given), ones(3, 2)
    return jd.step(jd.train_state(params(), batch, **how), batch, **how)


def _keep(info: Any) -> None:
    pass


def _accumulated(parts, params, losses, returned, **others):
    return jd.accumulate(_returning(returned, losses), parts, params=params, **others)


def _checked(params, x, losses, returned, **others):
    return jd.check(_returning(returned, losses), params, x, **others)


def _searched(f, losses, returned, params, x, **others):
    return f(_returning(returned, losses), params, x, **others)


SEARCHES = {
    "blame": Call(partial(_searched, jd.diagnostics.blame), lambda: _given(scale=scale_state()), _OF_TWO, _LOSSES)
}
TRAINING = {
    "accumulate": Call(
        _accumulated,
        lambda: {
            "parts": [(x(),), (2 * x(),)],
            "params": params(),
            "losses": losses,
            "returned": USUAL,
            "aggregator": jd.upgrad(),
            "state": None,
            "scale": scale_state(),
            "buffers": (),
            "skip": "part",
            "group": None,
        },
        {"scale": OPTION, "state": OPTION, "group": OPTION, "returned": CONSTANTS},
        _LOSSES,
    ),
    "check": Call(
        _checked,
        lambda: _argument(buffers=(), constant=()),
        {"x": EVERYTHING, "scale": OPTION, "constant": kinds({"list"})},
        _LOSSES,
    ),
    "train_state": Call(
        _train_state,
        lambda: _argument(buffers=(), constant=(), engine="auto") | method(),
        {"x": EVERYTHING, "scale": OPTION, "constant": kinds({"list"})},
        _LOSSES,
    ),
    "step": Call(
        _step,
        lambda: method(state=state(), x=x(), returned=USUAL, engine="auto", has_aux=False),
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
    "compiled": Call(
        lambda f, backend, donate, state, x: jd.compiled(f, backend=backend, donate=donate)(state, x),
        lambda: {"f": partial(jd.step, **method()), "backend": "eager", "donate": False, "state": state(), "x": x()},
        {"x": EVERYTHING, "backend": CALLABLE},
        kinds({"f", "backend"}),
        ("compiled", "step"),
    ),
    "chosen_engine": Call(
        _chosen,
        lambda: {"losses": losses, "state": state(), "x": x(), "aggregator": jd.upgrad()},
        {"x": EVERYTHING, "losses": CALLABLE},
        _LOSSES,
    ),
    "private": Call(
        _privately,
        lambda: {
            "loss": loss_of_one,
            "max_norm": 1.0,
            "noise_multiplier": 1.0,
            "batch_size": 4.0,
            "optimizer": jd.sgd(0.1),
            "key": key(0),
            "clipping": "flat",
        },
        dict.fromkeys(("max_norm", "batch_size"), kinds({"scalar"})) | {"noise_multiplier": NOT_NEGATIVE - {"true"}},
        kinds({"loss"}),
        ("train_state", "per_example"),
    ),
    "to_checkpoint": Call(
        jd.to_checkpoint,
        lambda: {"state": state(), "aggregator": jd.upgrad(), "optimizer": jd.sgd(0.1), "whole": False},
        {"state": TREE | EMPTY, "aggregator": OPTION, "optimizer": OPTION, "whole": SWITCH},
    ),
    "from_checkpoint": Call(
        jd.from_checkpoint,
        lambda: {"checkpoint": jd.to_checkpoint(state()), "like": state(), "aggregator": None, "optimizer": None},
        {"aggregator": OPTION, "optimizer": OPTION},
    ),
}
