"""Valid calls of rules, and of what gives rules their input."""

import inspect
from typing import Any

import torch
from fuzz_values import Argument, call, ones, rows, three_rows, values
from garbage import EMPTY, EVERYTHING, FLOATS, NOT_NEGATIVE, OF_TWO, OPTION, POSITIVE, ROWS, SWITCH, TREE, Call, kinds

import functional_jd as jd
from functional_jd import aggregation, aggregators, diagnostics, views

BELOW_1 = kinds({"zero", "scalar"})
ZERO = kinds({"zero"})
EACH = [1.0, 2.0, 1.0]
# By the name of the parameter.
HYPER: dict[str, Any] = {
    **{"bounds": EACH, "by": "norm", "scale_mode": "min", "solver": "host", "variant": "normalized"},
    **{"every": 1, "n_selected": 1, "n_steps": 3},
    **dict.fromkeys(("alpha", "beta", "beta_sigma", "c", "gamma_sigma", "lambda_"), Argument(0.5, NOT_NEGATIVE)),
    **dict.fromkeys(("decay", "gamma", "pull", "rho", "ridge", "tau", "theta"), Argument(0.1, NOT_NEGATIVE)),
    **dict.fromkeys(("damping", "max_norm", "mu", "rate", "temperature"), Argument(1.0, POSITIVE)),
    **dict.fromkeys(("on_host", "relative"), Argument(False, SWITCH)),
    **dict.fromkeys(("n_byzantine", "primary", "trim"), Argument(0, ZERO)),
    **dict.fromkeys(("preference", "reference"), Argument(EACH, OPTION)),
    "cap": Argument(0.5, kinds({"scalar"})),
    "clip": Argument(True, SWITCH),
    "leak": Argument([0.5, 0.5, 0.5], OPTION),
    "momentum": Argument(0.5, BELOW_1),
    "n_warmup": Argument(1, ZERO),
    "rank": Argument(2, OPTION),
    "rows": Argument(lambda: {"w": [0, 2]}, OPTION | {"dict"}),
    "rules": Argument(lambda: {"w": jd.upgrad(), "b": jd.mean()}),
    "s": Argument(lambda: torch.amax, function=True),
    "tolerance": Argument(1e-4, NOT_NEGATIVE),
    "view": Argument(lambda: views.losses, function=True),
    "weigh": Argument(lambda: torch.ones_like, function=True),
    "weights": Argument(EACH),
}
# Where a rule differs.
OTHERS: dict[str, dict[str, Any]] = {
    "auto_clipped": {"gamma": Argument(0.1, POSITIVE)},
    "constant": {"weights": Argument(EACH, kinds({"nans", "meta"}))},
    "constrained": {"damping": Argument(1.0, NOT_NEGATIVE)},
    "db_mtl": {"beta": Argument(0.5, BELOW_1)},
    "epo": {"preference": Argument(EACH)},
    "nash_mtl": {"max_norm": Argument(1.0, NOT_NEGATIVE)},
    "natural_gradient": {"damping": Argument(0.1, NOT_NEGATIVE)},
    "protect": {"rule": jd.mean, "primary": Argument([0], ZERO)},
    "sdmgrad": {"momentum": Argument(0.5, NOT_NEGATIVE)},
    **{name: {"rate": Argument(0.1, NOT_NEGATIVE)} for name in ("famo", "gradnorm", "modo")},
    **{name: {"weights": Argument(EACH, OPTION)} for name in ("stch", "tchebycheff")},
}
# These look for their objectives, or at what they were given, when they are called.
LATER = dict.fromkeys(("learning_rate_annealing", "protect", "stateless"), ("aggregate",))


def _rule(name: str, build: Any) -> Call:
    """A rule is built, started, and takes two steps."""

    def use(**hyper: Any) -> Any:
        rule, J = build(**hyper), three_rows()
        rule = rule[0] if name == "held" else rule
        first = jd.aggregate(rule, J, None, J, losses=J["b"])
        return jd.aggregate(rule, J, first.state, J, losses=J["b"])

    own = {hyper: HYPER[hyper] for hyper in inspect.signature(build).parameters if hyper in HYPER}
    return call(use, build, said_by=LATER.get(name, ()), **(own | OTHERS.get(name, {})))


def _returns_a_rule(f: Any) -> bool:
    return inspect.isfunction(f) and "aggregate.Aggregator" in str(inspect.signature(f).return_annotation)


PUBLIC = {name: getattr(place, name) for place in (jd, aggregators) for name in place.__all__}
RULES = {
    name: _rule(name, f)
    for name, f in PUBLIC.items()
    if _returns_a_rule(f) and name not in ("alternating", "from_part", "regularized")  # which are called elsewhere
}


def _state_of(rule: Any) -> Any:
    return jd.aggregate(rule, rows(), losses=values()).state


def _view(name: str, **fine: frozenset[str]) -> Call:
    def look(jacobian, other, losses):
        return getattr(views, name)(jacobian, other, losses=losses)

    names = ("aggregate", "full_jacobian", "losses", "view", name.removesuffix("_and_losses"))
    given = {"jacobian": rows, "other": rows, "losses": values}
    return call(look, said_by=names, **{a: Argument(make, fine.get(a, kinds())) for a, make in given.items()})


def _aggregate(aggregator, jacobian, state, other, losses):
    return jd.aggregate(aggregator, jacobian, state, other, losses=losses)


def _regularized(rule, fixed):
    return jd.aggregate(jd.regularized(rule, fixed), rows(), losses=dict(zip("ab", ones(2), strict=True)))


AGGREGATION = {
    "aggregate": call(
        _aggregate,
        aggregator=jd.dwa,
        state=Argument(lambda: _state_of(jd.dwa()), OPTION),
        other=Argument(rows, ROWS),
        losses=Argument(values, kinds({"nans", "nested"})),
    ),
    "combine": call(aggregation.combine, jacobian=Argument(rows, OF_TWO)),
    "from_part": call(
        lambda rule, names: jd.aggregate(aggregation.from_part(rule, names), rows()), names=Argument(["w"])
    ),
    "regularized": call(_regularized, fixed=Argument(lambda: {"b": 0.5}, kinds({"dict"})), said_by=("aggregate",)),
    **{
        name: _view(name, jacobian=ROWS, other=EVERYTHING, losses=EVERYTHING)
        for name in ("full_jacobian", "no_gradients", "gramian", "norms")
    },
    "losses": _view("losses", jacobian=EVERYTHING, other=EVERYTHING, losses=FLOATS),
    "cross_gramian": _view("cross_gramian", losses=EVERYTHING),
    **{
        f"{name}_and_losses": _view(f"{name}_and_losses", jacobian=ROWS, other=EVERYTHING, losses=FLOATS)
        for name in ("jacobian", "gramian", "norms")
    },
    "with_losses": call(views.with_losses, view=lambda: views.norms),
    "dwa_end_epoch": call(jd.dwa_end_epoch, state=lambda: _state_of(jd.dwa())),
    "famo_after_step": call(
        jd.famo_after_step, state=lambda: _state_of(jd.famo()), losses=Argument(values, kinds({"nans", "nested"}))
    ),
    "objective_names": call(jd.objective_names, losses=Argument(values, TREE | EMPTY)),
    "diagnose": call(
        diagnostics.diagnose,
        jacobian_or_gramian=Argument(rows, OF_TWO),
        direction_or_weights=Argument(lambda: ones(2), kinds({"none", "nans"})),
        gramian=Argument(False, OPTION),
    ),
    "advise": call(diagnostics.advise, diagnoses=lambda: [diagnostics.diagnose(rows())] * 2),
    "describe": call(diagnostics.describe, diagnosis=lambda: diagnostics.diagnose(rows())),
}
