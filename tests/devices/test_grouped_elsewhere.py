"""`grouped` off the CPU, with rules that run on the host and one that needs no gradients."""

import torch
from bounds import check_same
from simulated import simulated

import functional_jd as jd

PARAMS = {name: torch.ones(size, dtype=torch.float64) for name, size in (("a", 3), ("b", 2), ("c", 2))}


def losses(p):
    first = sum(x.square().sum() for x in p.values())
    second = (p["a"] - 2).square().sum() + p["b"].sum() * p["c"].sum()
    return {"x": first, "y": second, "z": (p["b"] + p["c"]).exp().sum()}


def test_the_step_is_that_of_the_cpu():
    rule = jd.grouped({"a": jd.upgrad(), "b": jd.config(), "c": jd.mean()}, rows={"a": [0, 1]})
    how = {"losses": losses, "aggregator": rule, "optimizer": jd.sgd(0.05)}
    expected, _ = jd.step(jd.train_state(PARAMS, **how), **how)
    with simulated() as device:
        found, _ = jd.step(jd.train_state(device.put(PARAMS), **how), **how)
        check_same(device.get(found.params), expected.params)
