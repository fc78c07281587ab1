"""Valid arguments by their names, and calls with them."""

import inspect
from functools import partial
from typing import Any

import torch
from garbage import BATCHES, EMPTY, EVERYTHING, FLOATS, NOT_NEGATIVE, OPTION, ROWS, SWITCH, TREE, Argument, Call, kinds

import functional_jd as jd

WHERE = {"now": "cpu"}
"""Where the values below are made."""


def _there(make: Any) -> Any:
    return lambda *args, **options: make(*args, device=WHERE["now"], **options)


tensor, ones, zeros, eye = map(_there, (torch.tensor, torch.ones, torch.zeros, torch.eye))
key, scale_state = _there(jd.random.key), _there(jd.scale_state)


def params() -> dict[str, Any]:
    return {"w": tensor([1.0, 2.0]), "b": tensor(0.5)}


def rows() -> dict[str, Any]:
    return {"w": tensor([[1.0, 2.0], [3.0, -1.0]]), "b": tensor([0.5, 1.0])}


def three_rows() -> dict[str, Any]:
    return {"w": tensor([[1.0, 2.0], [3.0, -1.0], [0.5, 0.5]]), "b": tensor([0.5, 1.0, 2.0])}


def x() -> torch.Tensor:
    return tensor([0.5, 1.5])


def losses(params, x):
    return {"fit": (params["w"] * x).sum().square(), "size": (params["w"].square().sum() + params["b"] - x[0]).square()}


def loss_of_one(params, x):
    return (params["w"] * x).sum() + params["b"]


def values() -> dict[str, Any]:
    return {"fit": tensor(1.0), "size": tensor(2.0)}


def method(**others: Any) -> dict[str, Any]:
    return {"losses": losses, "aggregator": jd.upgrad(), "optimizer": jd.sgd(0.1)} | others


def state(**others: Any) -> jd.TrainState:
    return jd.train_state(params(), x(), **method(), **others)


def infos(n: int = 2) -> list[jd.StepInfo]:
    return [jd.step(state(), x(), **method())[1] for _ in range(n)]


USUAL = object()
"""Stands for what losses usually return. Garbage in its place is what they return too."""


ARGUMENTS = {
    "aggregator": Argument(jd.upgrad),
    "argnums": Argument(0, kinds({"zero", "minus_one"})),
    "batch_size": Argument(4.0, kinds({"scalar"})),
    "batches": Argument(lambda: [x()], BATCHES),
    "betas": Argument((0.9, 0.99)),
    "buffers": Argument(()),
    "chunk_size": Argument(2, OPTION),
    "constant": Argument((), kinds({"list"})),
    "device": Argument(lambda: WHERE["now"], OPTION | {"zero"}),  # torch takes an index
    "direction": Argument(params, FLOATS),
    "dtype": Argument(torch.float32),
    "engine": Argument("auto"),
    "eps": Argument(1e-8, NOT_NEGATIVE),
    "finite": Argument(lambda: tensor(True)),
    "group": Argument(None, OPTION),
    "has_aux": Argument(False),
    "jacobian": Argument(rows, ROWS),
    "key": Argument(lambda: key(0)),
    "loss": Argument(lambda: loss_of_one, function=True),
    "losses": Argument(lambda: losses, function=True),
    "lr": Argument(0.1, NOT_NEGATIVE, function=True),
    "max_norm": Argument(1.0, kinds({"scalar"})),
    "mode": Argument("loop"),
    "momentum": Argument(0.9, kinds({"zero"})),
    "n": Argument(2, kinds({"zero"})),
    "names": Argument(["a", "b"], OPTION | {"numpy"}),
    "norm_type": Argument(2.0, kinds({"inf"})),
    "on_step": Argument(lambda: lambda info: None, OPTION | {"class"}, function=True),
    "optimizer": Argument(lambda: jd.sgd(0.1)),
    "other": Argument(rows, EVERYTHING),
    "params": Argument(params),
    "patience": Argument(5, OPTION),
    "preferences": Argument(lambda: jd.fronts.lattice(2, 2)),
    "progress": Argument(False, SWITCH),
    "returned": Argument(lambda: USUAL, kinds({"wrong_shape", "scalar", "nans", "meta", "nested", "record"})),
    "rule": Argument(jd.upgrad),
    "scale": Argument(scale_state, OPTION),
    "shape": Argument(2, kinds({"list"})),
    "state": Argument(state),
    "step": Argument(lambda: partial(jd.step, **method()), function=True),
    "tree": Argument(params, TREE | EMPTY),
    "weight_decay": Argument(0.1, NOT_NEGATIVE),
    "weights": Argument(lambda: ones(2), kinds({"nans", "meta"})),
    "whole": Argument(False, SWITCH),
    "x": Argument(x, EVERYTHING),
}
"""What is given for an argument of this name, unless a call says otherwise."""


def named(f: Any) -> list[str]:
    """The arguments of a function that have names."""
    several = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return [name for name, p in inspect.signature(f).parameters.items() if p.kind not in several]


def call(f: Any, public: Any = None, /, *, said_by: tuple[str, ...] = (), **own: Any) -> Call:
    """A call of `f` with all of its arguments, and with those of the public function that it calls.

    A value of its own is as fine, and as much a function of the user, as the usual one, unless it is an `Argument`.
    `said_by` are the other names that errors may begin with.
    """
    arguments: dict[str, Argument] = {}
    for name in dict.fromkeys([*named(f), *(named(public) if public else ()), *own]):
        given = own.get(name, ARGUMENTS.get(name))
        arguments[name] = (
            given if isinstance(given, Argument) else ARGUMENTS.get(name, Argument(0))._replace(value=given)
        )
    return Call(f, arguments, said_by)
