"""Valid calls of rules, and of what gives rules their input."""

import inspect
from typing import Any

import torch
from fuzz_values import given, key, ones, rows, three_rows, values
from garbage import EMPTY, EVERYTHING, FLOATS, NOT_NEGATIVE, OF_TWO, OPTION, POSITIVE, SWITCH, TREE, Call, kinds

import functional_jd as jd

BELOW_1 = kinds({"zero", "scalar"})
ROWS = kinds({"wrong_shape", "nans", "meta", "nested", "record"})
# What is valid beside the numbers below, by the name of the parameter, and where a rule differs.
FINE = {
    **dict.fromkeys(("alpha", "beta", "c", "decay", "gamma", "lambda_", "pull", "rho", "ridge"), NOT_NEGATIVE),
    **dict.fromkeys(("tau", "theta", "tolerance", "beta_sigma", "gamma_sigma", "momentum"), NOT_NEGATIVE),
    **dict.fromkeys(("damping", "max_norm", "mu", "rate", "temperature"), POSITIVE),
    **dict.fromkeys(("leak", "preference", "reference"), OPTION),
    **dict.fromkeys(("clip", "on_host", "relative"), SWITCH),
    **dict.fromkeys(("n_byzantine", "n_warmup", "primary", "trim"), kinds({"zero"})),
}
OTHERS = {
    "auto_clipped": {"gamma": POSITIVE},
    "constant": {"weights": kinds({"nans", "meta"})},
    "constrained": {"damping": NOT_NEGATIVE},
    "cr_mogm": {"momentum": BELOW_1},
    "db_mtl": {"beta": BELOW_1},
    "epo": {"preference": kinds()},
    "grouped": {"rows": OPTION | kinds({"dict"})},
    "mgda": {"cap": kinds({"scalar"})},
    "nash_mtl": {"max_norm": NOT_NEGATIVE},
    "natural_gradient": {"damping": NOT_NEGATIVE, "rank": OPTION, "momentum": BELOW_1},
    **{name: {"momentum": BELOW_1} for name in ("learning_rate_annealing", "unit_sum")},
    **{name: {"rate": NOT_NEGATIVE} for name in ("famo", "gradnorm", "modo")},
    **{name: {"weights": OPTION} for name in ("stch", "tchebycheff")},
}
EACH = [1.0, 2.0, 1.0]
# Numbers for each rule, and functions that make what is no number.
NUMBERS: dict[str, dict[str, Any]] = {
    "aligned_mtl": {"preference": EACH, "scale_mode": "min"},
    "auto_clipped": {"gamma": 0.1, "max_norm": 1.0},
    "cagrad": {"c": 0.5, "preference": EACH, "clip": True},
    "clipped": {"max_norm": 1.0},
    "config": {"preference": EACH},
    "constant": {"weights": EACH},
    "constrained": {"bounds": EACH, "rate": 0.1, "damping": 1.0},
    "cosmos": {"lambda_": 0.5, "weights": EACH},
    "cr_mogm": {"rule": jd.upgrad, "momentum": 0.5},
    "db_mtl": {"beta": 0.5, "beta_sigma": 0.5},
    "dualproj": {"preference": EACH},
    "dwa": {"temperature": 2.0},
    "epo": {"preference": EACH, "tolerance": 1e-4},
    "excess_mtl": {"rate": 1.0, "n_warmup": 1},
    "fairgrad": {"alpha": 1.0},
    "famo": {"rate": 0.1, "decay": 0.1},
    "geometric_mean": {},
    "graddrop": {"key": lambda: key(0), "leak": [0.5, 0.5, 0.5]},
    "gradnorm": {"alpha": 1.0, "rate": 0.1},
    "gradvac": {"key": lambda: key(0), "beta": 0.5},
    "grouped": {"rules": lambda: {"w": jd.upgrad(), "b": jd.mean()}, "rows": lambda: {"w": [0, 2]}},
    "held": {"rule": jd.upgrad},
    "imtl_g": {},
    "imtl_l": {"rate": 0.1},
    "krum": {"n_byzantine": 0, "n_selected": 1},
    "learning_rate_annealing": {"primary": 0, "momentum": 0.5},
    "levenberg_marquardt": {"damping": 0.5},
    "mean": {},
    "mgda": {"cap": 0.5},
    "moco": {"beta": 0.5, "gamma": 0.1, "rho": 0.1, "beta_sigma": 0.5, "gamma_sigma": 0.5},
    "modo": {"rate": 0.1, "ridge": 0.1},
    "nash_mtl": {"max_norm": 1.0, "every": 1},
    "natural_gradient": {"damping": 0.1, "relative": False, "rank": 2, "momentum": 0.5},
    "normalized": {"rule": jd.mgda, "by": "norm"},
    "ntk_weights": {},
    "pbi": {"theta": 1.0, "weights": EACH, "reference": EACH},
    "pcd": {"tau": 0.1, "beta": 0.9},
    "pcgrad": {"key": lambda: key(0)},
    "protect": {"rule": jd.mean, "primary": [0]},
    "random_weights": {"key": lambda: key(0)},
    "relobralo": {"key": lambda: key(0), "temperature": 1.0, "alpha": 0.5, "rho": 0.5},
    "scalarized": {"s": lambda: torch.amax},
    "sdmgrad": {"rate": 1.0, "momentum": 0.5, "n_steps": 3, "pull": 0.1, "preference": EACH},
    "softadapt": {"beta": 0.1, "variant": "normalized"},
    "stateless": {"view": lambda: jd.views.losses, "weigh": lambda: torch.ones_like, "on_host": False},
    "stch": {"mu": 1.0, "weights": EACH, "reference": EACH},
    "tchebycheff": {"weights": EACH, "reference": EACH},
    "total": {},
    "trimmed_mean": {"trim": 0},
    "unit_sum": {"preference": EACH, "momentum": 0.5},
    "upgrad": {"preference": EACH},
    "uw": {"rate": 0.1},
    "uw_so": {"temperature": 1.0},
}


def _named(name: str) -> Any:
    return getattr(jd.aggregators if name in jd.aggregators.__all__ else jd, name)


def _rule(name: str) -> Call:
    """A rule is built, started, and takes two steps."""
    hyper = NUMBERS[name] | ({"solver": "host"} if "solver" in inspect.signature(_named(name)).parameters else {})

    def use(**hyper: Any) -> Any:
        rule, J = _named(name)(**hyper), three_rows()
        rule = rule[0] if name == "held" else rule
        first = jd.aggregate(rule, J, None, J, losses=J["b"])
        return jd.aggregate(rule, J, first.state, J, losses=J["b"])

    fine = {parameter: FINE[parameter] for parameter in hyper if parameter in FINE} | OTHERS.get(name, {})
    return Call(use, given(**hyper), fine)


RULES = {name: _rule(name) for name in NUMBERS}
RULES["scalarized"] = RULES["scalarized"]._replace(functions=kinds({"s"}))
for _name in ("learning_rate_annealing", "protect"):  # which look for their objectives when they are called
    RULES[_name] = RULES[_name]._replace(names=("aggregate",))
RULES["stateless"] = RULES["stateless"]._replace(functions=kinds({"view", "weigh"}), names=("aggregate",))


def _state_of(rule: Any) -> Any:
    return jd.aggregate(rule, rows(), losses=values()).state


def _view(name: str, fine: dict[str, Any]) -> Call:
    def look(jacobian, other, losses):
        return getattr(jd.views, name)(jacobian, other, losses=losses)

    names = ("aggregate", "full_jacobian", "losses", "view", name.removesuffix("_and_losses"))
    return Call(look, given(jacobian=rows, other=rows, losses=values), fine, names=names)


AGGREGATION = {
    "aggregate": Call(
        lambda aggregator, jacobian, state, other, losses: jd.aggregate(
            aggregator, jacobian, state, other, losses=losses
        ),
        given(aggregator=jd.dwa, jacobian=rows, state=lambda: _state_of(jd.dwa()), other=rows, losses=values),
        {"jacobian": ROWS, "state": OPTION, "other": ROWS, "losses": kinds({"nans", "nested"})},
    ),
    "combine": Call(
        jd.aggregation.combine,
        lambda: {"jacobian": rows(), "weights": ones(2)},
        {"weights": kinds({"nans", "meta"}), "jacobian": OF_TWO},
    ),
    "from_part": Call(
        lambda rule, names: jd.aggregate(jd.aggregation.from_part(rule, names), rows()),
        lambda: {"rule": jd.upgrad(), "names": ["w"]},
    ),
    "regularized": Call(
        lambda rule, fixed: jd.aggregate(
            jd.regularized(rule, fixed), rows(), losses=dict(zip("ab", ones(2), strict=True))
        ),
        lambda: {"rule": jd.upgrad(), "fixed": {"b": 0.5}},
        {"fixed": kinds({"dict"})},  # an empty one
        names=("aggregate",),
    ),
    **{
        name: _view(name, {"jacobian": ROWS, "other": EVERYTHING, "losses": EVERYTHING})
        for name in ("full_jacobian", "no_gradients", "gramian", "norms")
    },
    "losses": _view("losses", {"jacobian": EVERYTHING, "other": EVERYTHING, "losses": FLOATS}),
    "cross_gramian": _view("cross_gramian", {"losses": EVERYTHING}),
    **{
        f"{name}_and_losses": _view(f"{name}_and_losses", {"jacobian": ROWS, "other": EVERYTHING, "losses": FLOATS})
        for name in ("jacobian", "gramian", "norms")
    },
    "with_losses": Call(jd.views.with_losses, lambda: {"view": jd.views.norms}),
    "dwa_end_epoch": Call(jd.dwa_end_epoch, given(state=lambda: _state_of(jd.dwa()))),
    "famo_after_step": Call(
        jd.famo_after_step,
        given(state=lambda: _state_of(jd.famo()), losses=values),
        {"losses": kinds({"nans", "nested"})},
    ),
    "objective_names": Call(jd.objective_names, lambda: {"losses": values()}, {"losses": TREE | EMPTY}),
    "diagnose": Call(
        jd.diagnostics.diagnose,
        lambda: {"jacobian_or_gramian": rows(), "direction_or_weights": ones(2), "gramian": False},
        {"jacobian_or_gramian": OF_TWO, "direction_or_weights": kinds({"none", "nans"}), "gramian": OPTION},
    ),
    "advise": Call(jd.diagnostics.advise, lambda: {"diagnoses": [jd.diagnostics.diagnose(rows())] * 2}),
    "describe": Call(
        jd.diagnostics.describe,
        lambda: {"diagnosis": jd.diagnostics.diagnose(rows()), "names": ["a", "b"]},
        {"names": OPTION | {"numpy"}},
    ),
}
