"""Valid calls of the plots, and of the tools for testing rules."""

from functools import cache
from typing import Any

import torch
from fuzz_values import Argument, call, eye, infos, ones, rows, scale_state, tensor, zeros
from garbage import CALLABLE, EVERYTHING, FLOATS, OF_TWO, OPTION, SWITCH, Call, kinds
from hypothesis import Phase, settings
from matplotlib import pyplot as plt

import functional_jd as jd
from functional_jd import plotting, testing

OF_LOSSES = kinds({"nans", "nested", "meta"})
AX = Argument(lambda: _five_axes()[0], OPTION)


def _plot(f: Any, public: Any = None, **own: Any) -> Call:
    """A plot is closed again."""

    def use(**given: Any) -> None:
        try:
            f(**given)
        finally:
            plt.close("all")

    return call(use, public or f, **({"ax": AX} | own))


@cache
def _five_axes() -> list[Any]:
    return list(plt.figure().subplots(5))


@cache
def _infos() -> tuple[jd.StepInfo, ...]:
    return tuple(infos())


def _rules() -> dict[str, jd.Aggregator]:
    return {"mean": jd.mean()}


def _problem() -> plotting.Problem:
    return plotting.quadratics()._replace(steps=1)


PLOTTING = {
    "cone": _plot(
        plotting.cone,
        jacobian=Argument(lambda: {"w": rows()["w"]}, OF_TWO),
        rules=Argument(_rules, OPTION | {"dict"}),
        losses=Argument(lambda: ones(2), OPTION | OF_LOSSES),
    ),
    "descend": call(
        plotting.descend,
        problem=_problem,
        rule=jd.mean,
        optimizer=Argument(lambda: jd.sgd(0.1), OPTION),
        steps=Argument(1, OPTION | {"zero"}),
        starts=Argument(lambda: zeros(1, 2), OPTION),
    ),
    "front": _plot(
        plotting.front,
        points=lambda: tensor([[1.0, 2.0], [2.0, 1.0], [3.0, 3.0]]),
        reference=Argument(lambda: ones(2), OPTION),
    ),
    "history": _plot(
        plotting.history,
        infos=lambda: list(_infos()),
        states=Argument(lambda: [scale_state(), scale_state()], OPTION),
        ax=Argument(_five_axes, OPTION),
    ),
    "legend": _plot(lambda ax: plotting.legend(ax, loc="best"), ax=Argument(AX.value)),
    "quadratics": call(plotting.quadratics, condition=Argument(10.0, SWITCH)),
    "trajectories": _plot(
        plotting.trajectories,
        problem=_problem,
        rules=Argument(_rules, kinds({"dict"})),
        contours=Argument(False, SWITCH),
        legend=Argument(False, SWITCH),
    ),
}


def _law(name: str) -> Call:
    """A law of a rule that needs the losses, and gets another Jacobian too."""

    def use(rule, jacobian, other, losses):
        # A rule of one batch does not notice what is not finite in another.
        others = () if name == "non_finite" else (other,)
        getattr(testing, name)(rule, jacobian, *others, losses=losses)

    of_both, of_other = (OF_TWO, EVERYTHING) if name == "non_finite" else (kinds(), kinds())
    double = lambda make, *shape: lambda: make(*shape, dtype=torch.float64)
    return call(
        use,
        rule=jd.mean,
        jacobian=Argument(double(eye, 2), of_both),
        other=Argument(double(eye, 2), of_other),
        losses=Argument(double(ones, 2), OPTION | OF_LOSSES),
    )


_FAST = settings(max_examples=1, database=None, phases=[Phase.generate], deadline=None)


def _lawful(f: Any, law: frozenset[str], fine: frozenset[str]) -> Call:
    return call(
        lambda rule, law, **how: f(rule, law, **how),
        rule=Argument(lambda: jd.uw, function=True),
        law=Argument(lambda: testing.pure, law, function=True),
        jacobians=Argument(lambda: testing.jacobians(2, 2), OPTION),
        hyper=lambda: {"rate": testing.Range(0.1, 0.2)},
        settings=Argument(lambda: _FAST, fine),
    )


LAWS = [law.__name__ for law in (*testing.ALWAYS, *testing.BY_CLAIM, testing.differentiable) if law != testing.compiled]

TESTING = {
    **{name: _law(name) for name in LAWS},
    "obeys": _lawful(testing.obeys, CALLABLE, OPTION),
    "laws_of": _lawful(testing.laws_of, CALLABLE - {"module"}, kinds()),
    "hyper_parameters_are_values": call(
        testing.hyper_parameters_are_values,
        build=Argument(lambda: jd.uw, function=True),
        hyper=Argument(lambda: {"rate": 0.5}, kinds({"dict"})),
        jacobian=Argument(rows, OF_TWO),
        losses=Argument(lambda: ones(2), OF_LOSSES),
    ),
    "jacobians": call(
        testing.jacobians,
        rows=2,
        columns=(1, 2),
        dtype=torch.float64,
        like=Argument(None, OPTION | FLOATS),
        wide=Argument(True, SWITCH),
    ),
}
