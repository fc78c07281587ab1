"""Valid values of arguments."""

from typing import Any

import torch

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

VALID: dict[str, Any] = {
    **{"aggregator": jd.upgrad, "losses": lambda: losses, "optimizer": lambda: jd.sgd(0.1), "params": params},
    **{"returned": lambda: USUAL, "scale": scale_state, "state": state, "x": x, "key": lambda: key(0)},
    **{"buffers": (), "constant": (), "engine": "auto", "has_aux": False, "group": None},
}


def given(names: str = "", /, **own: Any) -> Any:
    """A function that makes valid arguments: the usual ones of these names, and others. A callable makes its value."""
    makers = {name: VALID[name] for name in names.split()} | own
    return lambda: {name: make() if callable(make) else make for name, make in makers.items()}
