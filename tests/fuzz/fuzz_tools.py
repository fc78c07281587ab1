"""Valid calls of the plots, and of the tools for testing rules."""

from functools import cache
from typing import Any

import torch
from fuzz_values import eye, given, infos, ones, rows, scale_state, tensor, zeros
from garbage import CALLABLE, EVERYTHING, FLOATS, OF_TWO, OPTION, SWITCH, Call, kinds
from hypothesis import Phase, settings
from matplotlib import pyplot as plt

import functional_jd as jd
from functional_jd import plotting, testing

OF_LOSSES = kinds({"nans", "nested", "meta"})
NAMES = OPTION | {"numpy"}


def _plot(f, valid, fine: dict[str, Any] | None = None, names: tuple[str, ...] = ()) -> Call:
    """A plot is closed again."""

    def use(**given: Any) -> None:
        try:
            f(**given)
        finally:
            plt.close("all")

    return Call(use, valid, {"ax": OPTION, **(fine or {})}, names=names)


@cache
def _five_axes() -> list[Any]:
    return list(plt.figure().subplots(5))


def _axes() -> Any:
    return _five_axes()[0]


@cache
def _infos() -> tuple[jd.StepInfo, ...]:
    return tuple(infos())


def _points() -> torch.Tensor:
    return tensor([[1.0, 2.0], [2.0, 1.0], [3.0, 3.0]])


def _rules() -> dict[str, jd.Aggregator]:
    return {"mean": jd.mean()}


def _problem() -> plotting.Problem:
    return plotting.quadratics()._replace(steps=1)


PLOTTING = {
    "cone": _plot(
        plotting.cone,
        given(jacobian=lambda: {"w": rows()["w"]}, rules=_rules, ax=_axes, names=["a", "b"], losses=lambda: ones(2)),
        {"jacobian": OF_TWO, "rules": OPTION | {"dict"}, "names": NAMES, "losses": OPTION | OF_LOSSES},
    ),
    "descend": Call(
        plotting.descend,
        lambda: {"problem": _problem(), "rule": jd.mean(), "optimizer": jd.sgd(0.1), "steps": 1, "starts": zeros(1, 2)},
        {"optimizer": OPTION, "steps": OPTION | {"zero"}, "starts": OPTION},
    ),
    "front": _plot(
        plotting.front,
        lambda: {"points": _points(), "names": ["a", "b"], "ax": _axes(), "reference": ones(2)},
        {"names": NAMES, "reference": OPTION},
    ),
    "history": _plot(
        plotting.history,
        lambda: {"infos": list(_infos()), "states": [scale_state(), scale_state()], "ax": _five_axes()},
        {"states": OPTION},
    ),
    "legend": _plot(lambda ax: plotting.legend(ax, loc="best"), lambda: {"ax": _axes()}, {"ax": kinds()}),
    "quadratics": Call(plotting.quadratics, lambda: {"condition": 10.0}, {"condition": kinds({"true"})}),
    "trajectories": _plot(
        plotting.trajectories,
        given(problem=_problem, rules=_rules, ax=_axes, contours=False, legend=False),
        {"rules": kinds({"dict"}), "contours": SWITCH, "legend": SWITCH},
    ),
}


def _law(name: str) -> Call:
    """A law of a rule that needs the losses, and gets another Jacobian too."""

    def use(rule, jacobian, other, losses):
        # A rule of one batch does not notice what is not finite in another.
        others = () if name == "non_finite" else (other,)
        getattr(testing, name)(rule, jacobian, *others, losses=losses)

    def valid() -> dict[str, Any]:
        J = eye(2, dtype=torch.float64)
        return {"rule": jd.mean(), "jacobian": J, "other": J, "losses": ones(2, dtype=torch.float64)}

    fine = {"losses": OPTION | OF_LOSSES}
    if name == "non_finite":
        fine |= {"jacobian": OF_TWO, "other": EVERYTHING}
    return Call(use, valid, fine)


_FAST = settings(max_examples=1, database=None, phases=[Phase.generate], deadline=None)


def _lawful(f: Any, fine: dict[str, Any]) -> Call:
    return Call(lambda rule, law, **how: f(rule, law, **how), _subject, fine, kinds({"rule", "law"}))


def _subject() -> dict[str, Any]:
    return {
        "rule": jd.uw,
        "law": testing.pure,
        "jacobians": testing.jacobians(2, 2),
        "hyper": {"rate": testing.Range(0.1, 0.2)},
        "settings": _FAST,
    }


LAWS = [law.__name__ for law in (*testing.ALWAYS, *testing.BY_CLAIM, testing.differentiable) if law != testing.compiled]

TESTING = {
    **{name: _law(name) for name in LAWS},
    "obeys": _lawful(testing.obeys, {"law": CALLABLE, "jacobians": OPTION, "settings": OPTION}),
    "laws_of": _lawful(testing.laws_of, {"law": CALLABLE - {"module"}, "jacobians": OPTION}),
    "hyper_parameters_are_values": Call(
        testing.hyper_parameters_are_values,
        lambda: {"build": jd.uw, "hyper": {"rate": 0.5}, "jacobian": rows(), "losses": ones(2)},
        {"hyper": kinds({"dict"}), "jacobian": OF_TWO, "losses": OF_LOSSES},
        kinds({"build"}),
    ),
    "jacobians": Call(
        testing.jacobians,
        lambda: {"rows": 2, "columns": (1, 2), "dtype": torch.float64, "like": None, "wide": True},
        {"like": OPTION | FLOATS, "wide": SWITCH},
    ),
}
