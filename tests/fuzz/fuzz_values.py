"""Valid values of arguments, and the kinds of garbage that are valid in the place of some."""

from typing import Any

import torch

import functional_jd as jd

kinds = frozenset

WHERE = {"now": "cpu"}
"""Where the values below are made."""


def _there(make: Any) -> Any:
    return lambda *args, **options: make(*args, device=WHERE["now"], **options)


tensor, ones, zeros, eye = map(_there, (torch.tensor, torch.ones, torch.zeros, torch.eye))
key, scale_state = _there(jd.random.key), _there(jd.scale_state)

# What is valid beside the number in the table.
SWITCH = kinds({"true"})
OPTION = kinds({"none"})
POSITIVE = kinds({"true", "scalar"})  # a bool is a number of Python
NOT_NEGATIVE = POSITIVE | {"zero"}
BELOW_1 = kinds({"zero", "scalar"})
TREE = kinds({"wrong_shape", "integers", "complex", "sparse", "scalar", "empty", "nans", "meta", "nested", "record"})
FLOATS = kinds({"wrong_shape", "scalar", "empty", "nans", "meta", "nested", "record"})
ROWS = kinds({"wrong_shape", "nans", "meta", "nested", "record"})

EMPTY = kinds({"none", "list", "dict"})  # pytrees without leaves
OF_TWO = kinds({"nans", "nested", "record", "meta"})
BATCHES = kinds({"list", "dict", "parameters", "sparse", "empty"})


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
