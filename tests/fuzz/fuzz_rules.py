"""Valid calls of rules, and of what gives rules their input."""

import inspect
from typing import Any

import torch
from fuzz_values import (
    BELOW_1,
    EMPTY,
    FLOATS,
    NOT_NEGATIVE,
    OF_TWO,
    OPTION,
    POSITIVE,
    ROWS,
    SWITCH,
    TREE,
    key,
    kinds,
    ones,
    rows,
    three_rows,
    values,
)
from garbage import EVERYTHING, Call

import functional_jd as jd


def _rule(name: str, fine: dict[str, Any] | None = None, names: tuple[str, ...] = (), **hyper: Any) -> Call:
    """A rule is built, started, and takes two steps."""
    if "solver" in inspect.signature(getattr(jd, name)).parameters:
        hyper["solver"] = lambda: "host"

    def use(**hyper: Any) -> Any:
        rule, J = getattr(jd, name)(**hyper), three_rows()
        rule = rule[0] if name == "held" else rule
        first = jd.aggregate(rule, J, None, J, losses=J["b"])
        return jd.aggregate(rule, J, first.state, J, losses=J["b"])

    return Call(use, lambda: {key: make() for key, make in hyper.items()}, fine or {}, names=names)


def _number(x: Any):
    return lambda: x


_EACH = _number([1.0, 2.0, 1.0])

RULES = {
    "aligned_mtl": _rule("aligned_mtl", {"preference": OPTION}, preference=_EACH, scale_mode=_number("min")),
    "auto_clipped": _rule(
        "auto_clipped", {"gamma": POSITIVE, "max_norm": POSITIVE}, gamma=_number(0.1), max_norm=_number(1.0)
    ),
    "cagrad": _rule("cagrad", {"c": NOT_NEGATIVE}, c=_number(0.5)),
    "clipped": _rule("clipped", {"max_norm": POSITIVE}, max_norm=_number(1.0)),
    "config": _rule("config", {"preference": OPTION}, preference=_EACH),
    "constant": _rule("constant", {"weights": kinds({"nans", "meta"})}, weights=_EACH),
    "cosmos": _rule("cosmos", {"lambda_": NOT_NEGATIVE}, lambda_=_number(0.5), weights=_EACH),
    "cr_mogm": _rule("cr_mogm", {"momentum": BELOW_1}, rule=jd.upgrad, momentum=_number(0.5)),
    "db_mtl": _rule(
        "db_mtl", {"beta": BELOW_1, "beta_sigma": NOT_NEGATIVE}, beta=_number(0.5), beta_sigma=_number(0.5)
    ),
    "dualproj": _rule("dualproj", {"preference": OPTION}, preference=_EACH),
    "dwa": _rule("dwa", {"temperature": POSITIVE}, temperature=_number(2.0)),
    "epo": _rule("epo", {"tolerance": NOT_NEGATIVE}, preference=_EACH, tolerance=_number(1e-4)),
    "excess_mtl": _rule(
        "excess_mtl", {"rate": POSITIVE, "n_warmup": kinds({"zero"})}, rate=_number(1.0), n_warmup=_number(1)
    ),
    "fairgrad": _rule("fairgrad", {"alpha": NOT_NEGATIVE}, alpha=_number(1.0)),
    "famo": _rule("famo", {"rate": NOT_NEGATIVE, "decay": NOT_NEGATIVE}, rate=_number(0.1), decay=_number(0.1)),
    "geometric_mean": _rule("geometric_mean"),
    "graddrop": _rule("graddrop", {"leak": OPTION}, key=lambda: key(0), leak=_number([0.5, 0.5, 0.5])),
    "gradnorm": _rule("gradnorm", {"alpha": NOT_NEGATIVE, "rate": NOT_NEGATIVE}, alpha=_number(1.0), rate=_number(0.1)),
    "gradvac": _rule("gradvac", {"beta": NOT_NEGATIVE}, key=lambda: key(0), beta=_number(0.5)),
    "grouped": _rule(
        "grouped",
        {"rows": OPTION | kinds({"dict"})},
        rules=lambda: {"w": jd.upgrad(), "b": jd.mean()},
        rows=lambda: {"w": [0, 2]},
    ),
    "held": _rule("held", rule=jd.upgrad),
    "imtl_g": _rule("imtl_g"),
    "imtl_l": _rule("imtl_l", {"rate": POSITIVE}, rate=_number(0.1)),
    "krum": _rule("krum", {"n_byzantine": kinds({"zero"})}, n_byzantine=_number(0), n_selected=_number(1)),
    "mean": _rule("mean"),
    "mgda": _rule("mgda"),
    "moco": _rule(
        "moco",
        dict.fromkeys(("beta", "gamma", "rho", "beta_sigma", "gamma_sigma"), NOT_NEGATIVE),
        beta=_number(0.5),
        gamma=_number(0.1),
        rho=_number(0.1),
        beta_sigma=_number(0.5),
        gamma_sigma=_number(0.5),
    ),
    "modo": _rule("modo", {"rate": NOT_NEGATIVE, "ridge": NOT_NEGATIVE}, rate=_number(0.1), ridge=_number(0.1)),
    "nash_mtl": _rule("nash_mtl", {"max_norm": NOT_NEGATIVE}, max_norm=_number(1.0), every=_number(1)),
    "levenberg_marquardt": _rule("levenberg_marquardt", {"damping": POSITIVE}, damping=_number(0.5)),
    "natural_gradient": _rule(
        "natural_gradient",
        {"damping": NOT_NEGATIVE, "relative": SWITCH},
        damping=_number(0.1),
        relative=_number(False),
    ),
    "pbi": _rule(
        "pbi", {"theta": NOT_NEGATIVE, "reference": OPTION}, theta=_number(1.0), weights=_EACH, reference=_EACH
    ),
    "pcd": _rule("pcd", {"tau": NOT_NEGATIVE, "beta": NOT_NEGATIVE}, tau=_number(0.1), beta=_number(0.9)),
    "pcgrad": _rule("pcgrad", key=lambda: key(0)),
    "random_weights": _rule("random_weights", key=lambda: key(0)),
    "scalarized": _rule("scalarized", s=lambda: torch.amax)._replace(functions=kinds({"s"})),
    "sdmgrad": _rule(
        "sdmgrad",
        {"rate": POSITIVE, "momentum": NOT_NEGATIVE, "pull": NOT_NEGATIVE, "preference": OPTION},
        rate=_number(1.0),
        momentum=_number(0.5),
        n_steps=_number(3),
        pull=_number(0.1),
        preference=_EACH,
    ),
    "stateless": _rule(
        "stateless",
        {"on_host": SWITCH},
        view=lambda: jd.views.losses,
        weigh=lambda: torch.ones_like,
        on_host=lambda: False,
    )._replace(functions=kinds({"view", "weigh"}), names=("aggregate",)),
    "stch": _rule(
        "stch",
        {"mu": POSITIVE, "weights": OPTION, "reference": OPTION},
        mu=_number(1.0),
        weights=_EACH,
        reference=_EACH,
    ),
    "tchebycheff": _rule("tchebycheff", {"weights": OPTION, "reference": OPTION}, weights=_EACH, reference=_EACH),
    "total": _rule("total"),
    "trimmed_mean": _rule("trimmed_mean", {"trim": kinds({"zero"})}, trim=_number(0)),
    "upgrad": _rule("upgrad", {"preference": OPTION}, preference=_EACH),
    "uw": _rule("uw", {"rate": POSITIVE}, rate=_number(0.1)),
}


def _aggregate(aggregator, jacobian, state, other, losses):
    return jd.aggregate(aggregator, jacobian, state, other, losses=losses)


def _dwa_state():
    return jd.aggregate(jd.dwa(), rows(), losses=values()).state


def _famo_state():
    return jd.aggregate(jd.famo(), rows(), losses=values()).state


def _view(name: str, fine: dict[str, Any]) -> Call:
    def look(jacobian, other, losses):
        return getattr(jd.views, name)(jacobian, other, losses=losses)

    names = ("aggregate", "full_jacobian", "losses", "view", name.removesuffix("_and_losses"))
    return Call(look, lambda: {"jacobian": rows(), "other": rows(), "losses": values()}, fine, names=names)


AGGREGATION = {
    "aggregate": Call(
        _aggregate,
        lambda: {
            "aggregator": jd.dwa(),
            "jacobian": rows(),
            "state": _dwa_state(),
            "other": rows(),
            "losses": values(),
        },
        {"jacobian": ROWS, "state": OPTION, "other": ROWS, "losses": kinds({"nans", "nested"})},
    ),
    "combine": Call(
        lambda jacobian, weights: jd.aggregation.combine(jacobian, weights),
        lambda: {"jacobian": rows(), "weights": ones(2)},
        {"weights": kinds({"nans", "meta"}), "jacobian": OF_TWO},
    ),
    "from_part": Call(
        lambda rule, names: jd.aggregate(jd.aggregation.from_part(rule, names), rows()),
        lambda: {"rule": jd.upgrad(), "names": ["w"]},
    ),
    "regularized": Call(
        lambda rule, fixed: jd.aggregate(
            jd.regularized(rule, fixed), rows(), losses={"a": ones(1)[0], "b": ones(1)[0]}
        ),
        lambda: {"rule": jd.upgrad(), "fixed": {"b": 0.5}},
        names=("aggregate",),
    ),
    "full_jacobian": _view("full_jacobian", {"jacobian": ROWS, "other": EVERYTHING, "losses": EVERYTHING}),
    "no_gradients": _view("no_gradients", {"jacobian": ROWS, "other": EVERYTHING, "losses": EVERYTHING}),
    "losses": _view("losses", {"jacobian": EVERYTHING, "other": EVERYTHING, "losses": FLOATS}),
    "gramian": _view("gramian", {"jacobian": ROWS, "other": EVERYTHING, "losses": EVERYTHING}),
    "norms": _view("norms", {"jacobian": ROWS, "other": EVERYTHING, "losses": EVERYTHING}),
    "cross_gramian": _view("cross_gramian", {"losses": EVERYTHING}),
    **{
        f"{name}_and_losses": _view(f"{name}_and_losses", {"jacobian": ROWS, "other": EVERYTHING, "losses": FLOATS})
        for name in ("jacobian", "gramian", "norms")
    },
    "with_losses": Call(lambda view: jd.views.with_losses(view), lambda: {"view": jd.views.norms}),
    "dwa_end_epoch": Call(jd.dwa_end_epoch, lambda: {"state": _dwa_state()}),
    "famo_after_step": Call(
        jd.famo_after_step,
        lambda: {"state": _famo_state(), "losses": values()},
        {"losses": kinds({"nans", "nested"})},
    ),
    "objective_names": Call(jd.objective_names, lambda: {"losses": values()}, {"losses": TREE | EMPTY}),
    "diagnose": Call(
        jd.diagnostics.diagnose,
        lambda: {"jacobian_or_gramian": rows(), "direction_or_weights": ones(2), "gramian": False},
        {
            "jacobian_or_gramian": OF_TWO,
            "direction_or_weights": kinds({"none", "nans"}),
            "gramian": OPTION,
        },
    ),
    "advise": Call(
        jd.diagnostics.advise,
        lambda: {"diagnoses": [jd.diagnostics.diagnose(rows())] * 2},
    ),
    "describe": Call(
        jd.diagnostics.describe,
        lambda: {"diagnosis": jd.diagnostics.diagnose(rows()), "names": ["a", "b"]},
        {"names": OPTION | {"numpy"}},
    ),
}
