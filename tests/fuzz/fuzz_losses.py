"""Valid calls of what is given losses: objectives, engines, and steps; and what those losses return."""

from functools import partial
from typing import Any

import torch
from fuzz_values import ARGUMENTS, USUAL, WHERE, Argument, call, ones, params, scale_state, state, x
from garbage import CALLABLE, EMPTY, EVERYTHING, NOT_NEGATIVE, OPTION, SWITCH, TREE, kinds

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
    "functional": call(
        _apply,
        module=Argument(_module, kinds({"module"})),
        params=lambda: dict(_module().named_parameters()),
        buffers=Argument(dict, kinds({"dict"})),
        x=Argument(x, EVERYTHING, function=True),
    ),
    "partition": call(jd.objectives.partition, predicate=Argument(lambda: lambda name, _: name == "w", function=True)),
    "merge": call(
        jd.objectives.merge,
        chosen=Argument(lambda: _split()[0], kinds({"dict"})),
        rest=Argument(lambda: _split()[1], kinds({"dict"})),
    ),
    "per_example": call(
        lambda loss, in_dims, params, x: jd.per_example(loss, in_dims)(params, x),
        in_dims=Argument(0, kinds({"zero"})),
        x=lambda: ones(3, 2),
    ),
    "multitask": call(
        lambda features, heads, params, x: jd.multitask(features, heads)(params, x),
        features=Argument(lambda: _features, function=True),
        heads=Argument(lambda: _heads, function=True),
        params=lambda: {"shared": params(), "heads": params()},
    ),
}


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


SCALE = Argument(scale_state, OPTION | {"scalar", "nans"})
NONE = Argument(None, OPTION)
BATCH = lambda: (x(),)

ENGINES = {
    "jacobian_fn": call(_jacobian, jd.jacobian_fn, scale=SCALE),
    "gramian_fn": call(partial(_products, jd.gramian_fn), jd.gramian_fn, scale=SCALE),
    "squared_norms_fn": call(partial(_products, jd.squared_norms_fn), jd.squared_norms_fn, scale=SCALE),
    "cross_gramian_fn": call(_cross, batch_a=BATCH, batch_b=BATCH, scale=Argument(SCALE.value, OPTION | {"scalar"})),
    "weighted_fn": call(_weighted, jd.weighted_fn, scale=SCALE, last=Argument(False, SWITCH)),
    "weigh": call(
        _weigh,
        jd.weigh,
        losses=lambda: USUAL,
        parameters=lambda: [_point()],
        state=NONE,
        scale=NONE,
        features=NONE,
        group=False,
        said_by=("distributed",),
    ),
    "weights_fn": call(_weights, group=False, said_by=("distributed",)),
    "jacobian_engine": call(jd.engines.jacobian_engine),
    **{f"{name}_engine": call(getattr(jd.engines, f"{name}_engine")) for name in ("gramian", "weighted", "features")},
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


def _accumulated(parts, params, losses, returned, **others):
    return jd.accumulate(_returning(returned, losses), parts, params=params, **others)


SEARCHES = {"blame": call(partial(_searched, jd.diagnostics.blame), jd.diagnostics.blame, scale=SCALE)}
WHATEVER = Argument(lambda: USUAL)  # nothing that losses return is right to begin with
TRAINING = {
    "accumulate": call(_accumulated, jd.accumulate, parts=lambda: [(x(),), (2 * x(),)], state=NONE, skip="part"),
    "check": call(partial(_searched, jd.check), jd.check, returned=WHATEVER),
    "train_state": call(_train_state, jd.train_state, returned=WHATEVER),
    "step": call(_step, jd.step),
    "steps": call(lambda **given: list(jd.steps(**given)), jd.steps, said_by=("step",)),
    "fit": call(jd.fit, said_by=("step",)),
    "compiled": call(
        lambda f, backend, donate, state, x: jd.compiled(f, backend=backend, donate=donate)(state, x),
        f=ARGUMENTS["step"],
        backend=Argument("eager", CALLABLE, function=True),
        donate=False,
        said_by=("compiled", "step"),
    ),
    "chosen_engine": call(_chosen, losses=ARGUMENTS["losses"]._replace(fine=CALLABLE)),
    "private": call(
        _privately,
        jd.private,
        noise_multiplier=Argument(1.0, NOT_NEGATIVE - {"true"}),
        clipping="flat",
        said_by=("train_state", "per_example"),
    ),
    "to_checkpoint": call(
        jd.to_checkpoint,
        state=Argument(state, TREE | EMPTY),
        aggregator=Argument(jd.upgrad, OPTION),
        optimizer=Argument(lambda: jd.sgd(0.1), OPTION),
    ),
    "from_checkpoint": call(
        jd.from_checkpoint, checkpoint=lambda: jd.to_checkpoint(state()), like=state, aggregator=NONE, optimizer=NONE
    ),
}
