"""Which objective and which parameter is not finite."""

import pytest
import torch

import functional_jd as jd
from functional_jd.diagnostics import blame

PARAMS = {"w": torch.ones(2), "b": torch.ones(2)}


def losses(params, x):
    return {"calm": params["w"].sum() * x, "both": (params["w"] * params["b"]).sum(), "wild": (x * params["b"]).sum()}


def test_an_overflow_is_found_by_objective_and_parameter():
    found = blame(losses, PARAMS, torch.tensor(1e30), scale=jd.scale_state(2.0**40, shape=3))
    assert jd.objective_names(losses(PARAMS, torch.ones(()))) == ["both", "calm", "wild"]
    assert {name: x.tolist() for name, x in found.items()} == {"w": [True, False, True], "b": [True, True, False]}
    assert all(x.all() for x in blame(losses, PARAMS, torch.tensor(1e30)).values())


def test_losses_do_not_spoil_one_another():
    """Rows that are differentiated together are NaN here, as 0 x inf."""
    root = lambda params: {"root": (params["w"] - 1).sum().sqrt(), "line": (params["w"] - 1).sum()}
    assert blame(root, {"w": torch.ones(1)})["w"].tolist() == [True, False]


def test_tasks_and_examples():
    tasks = jd.multitask(lambda s, x: s["w"] * x, lambda own, h, x: {n: (own[n] * h).sum() for n in "ab"})
    params = {"shared": {"w": torch.ones(2)}, "heads": {"a": torch.ones(2), "b": torch.full((2,), 1e30)}}
    scale = jd.scale_state(shape=2)._replace(scale=torch.tensor([1.0, 2.0**40]))
    assert blame(tasks, params, torch.ones(2), scale=scale)["w"].tolist() == [True, False]
    loss = jd.per_example(lambda params, x: (x * params["w"]).sum().sqrt())
    assert blame(loss, {"w": torch.ones(1)}, torch.tensor([[1.0], [0.0]]))["w"].tolist() == [True, False]


def test_what_is_refused():
    with pytest.raises(TypeError, match="blame: losses must be"):
        blame(3, PARAMS)
    with pytest.raises(ValueError, match=r"blame: the scale must be of shape \[\] or \[3\]"):
        blame(losses, PARAMS, torch.ones(()), scale=jd.scale_state(shape=2))
