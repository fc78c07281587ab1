"""How far a warm step walks: Python calls inside the package, and changes from one of its files to another."""

import sys
from itertools import pairwise
from pathlib import Path

import pytest
import torch

import functional_jd as jd
from functional_jd.core.float64 import has_float64

PACKAGE = str(Path(jd.__file__).parent)


def network(params, x):
    return torch.tanh(x @ params["w1"] + params["b1"]) @ params["w2"] + params["b2"]


def flat():
    return {"w1": torch.randn(8, 16), "b1": torch.zeros(16), "w2": torch.randn(16, 2), "b2": torch.zeros(2)}


def plain():
    return flat(), lambda params, x, y: (network(params, x) - y).square().mean(0)


def multitask():
    heads = {name: {"w": torch.randn(16, 1)} for name in "ab"}
    return {"shared": {"w": torch.randn(8, 16), "b": torch.zeros(16)}, "heads": heads}, jd.multitask(
        lambda shared, x, y: torch.tanh(x @ shared["w"] + shared["b"]),
        lambda own, h, x, y: {
            name: (h @ own[name]["w"] - y[:, i : i + 1]).square().mean() for i, name in enumerate("ab")
        },
    )


def per_example():
    return flat(), jd.per_example(lambda params, x, y: (network(params, x) - y).square().mean())


def walk(step):
    """The number of calls, and how often the next one stands in another file."""
    files = []

    def note(frame, event, _):
        if event == "call" and frame.f_code.co_filename.startswith(PACKAGE):
            files.append(frame.f_code.co_filename)

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        step()
    finally:
        sys.setprofile(before)
    return len(files), sum(a != b for a, b in pairwise(files))


# What was counted with Python 3.11, whose comprehensions are calls, and two calls more.
@pytest.mark.parametrize(
    ("make", "rule", "engine", "calls", "changes"),
    [
        (plain, jd.upgrad, "auto", 160, 71),
        (plain, jd.mean, "auto", 104, 56),
        (multitask, jd.upgrad, "auto", 228, 112),
        (per_example, jd.upgrad, "gramian", 273, 108),
    ],
)
def test_a_warm_step_takes_a_short_way(make, rule, engine, calls, changes):
    torch.manual_seed(0)
    params, losses = make()
    batch = torch.randn(32, 8), torch.randn(32, 2)
    method = {"losses": losses, "aggregator": rule(), "optimizer": jd.adamw(1e-3), "engine": engine}
    state = jd.train_state(params, *batch, **method)
    for _ in range(2):
        state, _ = jd.step(state, *batch, **method)
    found = walk(lambda: jd.step(state, *batch, **method))
    assert found[0] <= calls
    assert found[1] <= changes


def test_what_is_walked_is_counted():
    assert walk(lambda: (jd.precision.no_scale(), has_float64(torch.device("cpu")))) == (2, 1)
