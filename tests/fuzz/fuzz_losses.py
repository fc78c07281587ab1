"""Valid calls of what is given losses: objectives, engines, and steps; and what those losses return."""

from functools import partial
from typing import Any

import torch
from fuzz_values import USUAL, WHERE, given, loss_of_one, method, ones, params, state, x
from garbage import BATCHES, CALLABLE, EMPTY, EVERYTHING, NOT_NEGATIVE, OPTION, SWITCH, TREE, Call, kinds

import functional_jd as jd


def _module() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Linear(2, 1).to(WHERE["now"])


def _apply(module, params, buffers, x):
    return jd.functional(module)(params, buffers, x)


def _split():
    return jd.objectives.partition(params(), lambda name, _: name == "w")


def _features(shared, x):
    return shared["w"] * x


def _heads(own, features, x):
    return features.sum() + own["b"]


OBJECTIVES = {
    "functional": Call(
        _apply,
        given("x", module=_module, params=lambda: dict(_module().named_parameters()), buffers=dict),
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
        lambda: dict(zip(("chosen", "rest"), _split(), strict=True)),
        dict.fromkeys(("chosen", "rest"), kinds({"dict"})),
    ),
    "per_example": Call(
        lambda loss, in_dims, params, x: jd.per_example(loss, in_dims)(params, x),
        given("params", loss=lambda: loss_of_one, in_dims=0, x=lambda: ones(3, 2)),
        {"in_dims": kinds({"zero"}), "x": EVERYTHING},
        kinds({"loss"}),
    ),
    "multitask": Call(
        lambda features, heads, params, x: jd.multitask(features, heads)(params, x),
        lambda: {"features": _features, "heads": _heads, "params": {"shared": params(), "heads": params()}, "x": x()},
        {"x": EVERYTHING},
        kinds({"features", "heads"}),
    ),
}
CONSTANTS = kinds({"wrong_shape", "scalar", "nans", "meta", "nested", "record"})


def _returning(returned: Any, losses: Any) -> Any:
    return losses if returned is USUAL else lambda params, x: returned


def _searched(f, losses, returned, params, x, **others):
    return f(_returning(returned, losses), params, x, **others)


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
_ARGNUMS = kinds({"zero", "minus_one"})
_WEIGHTS = kinds({"nans", "meta"})
_GIVEN = "losses returned params x"
_ARGUMENT = f"{_GIVEN} has_aux scale"


def _of_products(f: Any) -> Call:
    fine = _OF_TWO | {"argnums": _ARGNUMS, "weights": _WEIGHTS}
    return Call(partial(_products, f), given(_ARGUMENT, argnums=0, weights=lambda: ones(2)), fine, _LOSSES)


ENGINES = {
    "jacobian_fn": Call(
        _jacobian,
        given(_ARGUMENT, argnums=0, mode="loop", chunk_size=2),
        _OF_TWO | {"chunk_size": OPTION, "argnums": _ARGNUMS},
        _LOSSES,
    ),
    "gramian_fn": _of_products(jd.gramian_fn),
    "squared_norms_fn": _of_products(jd.squared_norms_fn),
    "cross_gramian_fn": Call(
        _cross,
        given("losses returned params scale", batch_a=lambda: (x(),), batch_b=lambda: (x(),)),
        {"scale": OPTION | {"scalar"}, "returned": CONSTANTS},
        _LOSSES,
    ),
    "weighted_fn": Call(
        _weighted,
        given(_ARGUMENT, weights=lambda: ones(2), last=False),
        _OF_TWO | {"weights": _WEIGHTS, "last": SWITCH},
        _LOSSES,
    ),
    "weigh": Call(
        _weigh,
        given(
            "aggregator",
            losses=USUAL,
            parameters=lambda: [_point()],
            state=None,
            scale=None,
            features=None,
            group=False,
        ),
        dict.fromkeys(("state", "scale", "group", "features"), OPTION),
        _LOSSES,
        names=("distributed",),
    ),
    "weights_fn": Call(
        _weights,
        given(f"{_GIVEN} aggregator", group=False),
        {"x": EVERYTHING, "returned": CONSTANTS, "group": OPTION},
        _LOSSES,
        names=("distributed",),
    ),
    "jacobian_engine": Call(jd.engines.jacobian_engine, given(mode="loop", chunk_size=2), {"chunk_size": OPTION}),
    **{
        f"{name}_engine": Call(getattr(jd.engines, f"{name}_engine"), dict)
        for name in ("gramian", "weighted", "features")
    },
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


def _stepping():
    return partial(jd.step, **method())


SEARCHES = {"blame": Call(partial(_searched, jd.diagnostics.blame), given(f"{_GIVEN} scale"), _OF_TWO, _LOSSES)}
_STARTED = {"x": EVERYTHING, "scale": OPTION, "constant": kinds({"list"})}
TRAINING = {
    "accumulate": Call(
        _accumulated,
        given(
            "params losses returned aggregator scale buffers group",
            parts=lambda: [(x(),), (2 * x(),)],
            state=None,
            skip="part",
        ),
        {"scale": OPTION, "state": OPTION, "group": OPTION, "returned": CONSTANTS},
        _LOSSES,
    ),
    "check": Call(partial(_searched, jd.check), given(f"{_ARGUMENT} buffers constant"), _STARTED, _LOSSES),
    "train_state": Call(
        _train_state, given(f"{_ARGUMENT} buffers constant engine aggregator optimizer"), _STARTED, _LOSSES
    ),
    "step": Call(
        _step,
        given("state x losses returned aggregator optimizer engine has_aux"),
        {"x": EVERYTHING, "returned": CONSTANTS},
        _LOSSES,
    ),
    "steps": Call(
        lambda **given: list(jd.steps(**given)),
        given("state", step=_stepping, batches=lambda: [x()], patience=5),
        {"patience": OPTION, "batches": BATCHES},
        kinds({"step"}),
        ("step",),
    ),
    "fit": Call(
        jd.fit,
        given("state", step=_stepping, batches=lambda: [x()], on_step=lambda: _keep, progress=False, patience=5),
        {"patience": OPTION, "on_step": OPTION | {"class"}, "batches": BATCHES, "progress": SWITCH},
        kinds({"step", "on_step"}),
        ("step",),
    ),
    "compiled": Call(
        lambda f, backend, donate, state, x: jd.compiled(f, backend=backend, donate=donate)(state, x),
        given("state x", f=_stepping, backend="eager", donate=False),
        {"x": EVERYTHING, "backend": CALLABLE},
        kinds({"f", "backend"}),
        ("compiled", "step"),
    ),
    "chosen_engine": Call(_chosen, given("losses state x aggregator"), {"x": EVERYTHING, "losses": CALLABLE}, _LOSSES),
    "private": Call(
        _privately,
        given(
            "optimizer key",
            loss=lambda: loss_of_one,
            **{"max_norm": 1.0, "noise_multiplier": 1.0, "batch_size": 4.0, "clipping": "flat"},
        ),
        dict.fromkeys(("max_norm", "batch_size"), kinds({"scalar"})) | {"noise_multiplier": NOT_NEGATIVE - {"true"}},
        kinds({"loss"}),
        ("train_state", "per_example"),
    ),
    "to_checkpoint": Call(
        jd.to_checkpoint,
        given("state aggregator optimizer", whole=False),
        {"state": TREE | EMPTY, "aggregator": OPTION, "optimizer": OPTION, "whole": SWITCH},
    ),
    "from_checkpoint": Call(
        jd.from_checkpoint,
        given(checkpoint=lambda: jd.to_checkpoint(state()), like=state, aggregator=None, optimizer=None),
        {"aggregator": OPTION, "optimizer": OPTION},
    ),
}
