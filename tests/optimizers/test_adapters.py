"""Learning rates of `from_torch`: numbers, tensors and schedules, as torch's own schedulers set them."""

import math

import numpy
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from functional_jd.core.tree import tree_map
from functional_jd.optimizers.adamw import adamw
from functional_jd.optimizers.adapters import from_torch
from functional_jd.optimizers.sgd import sgd

CLASSES = {
    "SGD": (torch.optim.SGD, {"momentum": 0.9, "dampening": 0.3}),
    "Adam": (torch.optim.Adam, {}),
    "AdamW-fused": (torch.optim.AdamW, {"fused": True}),
    "AdamW-foreach": (torch.optim.AdamW, {"foreach": True}),
    "Adagrad": (torch.optim.Adagrad, {}),
    "Adadelta": (torch.optim.Adadelta, {}),
    "Adamax": (torch.optim.Adamax, {}),
    "NAdam": (torch.optim.NAdam, {}),
    "RAdam": (torch.optim.RAdam, {}),
    "RMSprop": (torch.optim.RMSprop, {}),
    "Rprop": (torch.optim.Rprop, {}),  # the rate is that of the first step
    "ASGD": (torch.optim.ASGD, {}),
    "Adafactor": (torch.optim.Adafactor, {}),
    "Muon": (torch.optim.Muon, {}),
}


def matrices(seed, n):
    draw = torch.Generator().manual_seed(seed)
    return [{"b": torch.randn(3, 3, generator=draw), "a": torch.randn(4, 2, generator=draw)} for _ in range(n)]


def run(optimizer, params, directions):
    path, state = [], optimizer.init(params)
    for direction in directions:
        params, state = optimizer.update(direction, state, params)
        path.append(params)
    return path, state


def run_torch(cls, params, directions, schedule, **hyper):
    leaves = {name: p.clone().requires_grad_() for name, p in params.items()}
    optimizer = cls(list(leaves.values()), lr=1.0, **hyper)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, schedule)
    path = []
    for direction in directions:
        for name, leaf in leaves.items():
            leaf.grad = direction[name].clone()
        optimizer.step()
        scheduler.step()
        path.append({name: leaf.detach().clone() for name, leaf in leaves.items()})
    return path


def equal(found, expected):
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


@pytest.mark.parametrize("name", CLASSES)
@given(seed=st.integers(0, 2**16), lr=st.floats(1e-3, 1), decay=st.sampled_from([0.5, 1.0]))
def test_a_schedule_is_lambda_lr(name, seed, lr, decay):
    cls, hyper = CLASSES[name]
    first, *directions = matrices(seed, 6)
    optimizer = from_torch(cls, lr=lambda steps: lr * decay ** steps.double(), **hyper)
    found, state = run(optimizer, first, directions)
    equal(found, run_torch(cls, first, directions, lambda k: lr * decay**k, **hyper))
    assert state.steps == 5


@pytest.mark.parametrize("name", CLASSES)
def test_a_tensor_is_the_number(name):
    cls, hyper = CLASSES[name]
    first, *directions = matrices(0, 5)
    rate = torch.tensor(0.1, dtype=torch.float64)
    expected = run(from_torch(cls, lr=0.1, **hyper), first, directions)
    equal(run(from_torch(cls, lr=rate, **hyper), first, directions), expected)
    equal(run(from_torch(cls, lr=lambda _: 0.1, **hyper), first, directions), expected)  # a schedule of numbers


def test_a_step_not_taken_does_not_advance_the_schedule():
    first, *directions = matrices(0, 4)
    optimizer = from_torch(torch.optim.SGD, lr=lambda steps: 0.1 / (1 + steps))
    state = optimizer.init(first)
    optimizer.update(directions[0], state, first)
    equal(run(optimizer, first, directions)[0], run_torch(torch.optim.SGD, first, directions, lambda k: 0.1 / (1 + k)))


def test_a_schedule_is_called_with_what_sgd_calls_it_with():
    seen = []
    params = torch.ones(2)
    for optimizer in (sgd(lambda steps: seen.append(steps) or 0.1), from_torch(torch.optim.SGD, lr=seen_by(seen))):
        run(optimizer, params, [params] * 3)
    taken = [steps for steps in seen if steps is not None]
    assert {(steps.dtype, steps.shape) for steps in taken} == {(torch.int64, ())}
    assert {int(steps) for steps in taken} == {0, 1, 2}


def seen_by(seen):
    return lambda steps: seen.append(steps) or torch.tensor(0.1)


def test_a_schedule_compiles_with_a_graph_break():
    first, *directions = matrices(0, 4)
    optimizer = from_torch(torch.optim.Adam, lr=lambda steps: 0.1 / (1 + steps))
    compiled = optimizer._replace(update=torch.compile(lambda *x: optimizer.update(*x), backend="aot_eager"))
    equal(run(compiled, first, directions), run(optimizer, first, directions))


def test_inputs_are_left_alone():
    first, direction, rate = *matrices(0, 2), torch.tensor(0.1)
    optimizer = from_torch(torch.optim.Adam, lr=rate)
    state = optimizer.init(first)
    before = tree_map(torch.clone, (first, direction, state, rate))
    optimizer.update(direction, state, first)
    equal((first, direction, state, rate), before)


# --- What is no learning rate

BUILDERS = {"sgd": sgd, "adamw": adamw, "from_torch": lambda lr: from_torch(torch.optim.SGD, lr=lr)}


@pytest.mark.parametrize("lr", [-0.1, -1, math.inf, -math.inf, math.nan, numpy.float32("nan")])
@pytest.mark.parametrize("name", BUILDERS)
def test_rates_that_are_negative_or_not_finite_are_refused(name, lr):
    with pytest.raises(ValueError, match=f"^{name}: lr must be finite and not negative, found {lr}"):
        BUILDERS[name](lr)


@pytest.mark.parametrize("lr", ["0.1", None, [0.1], 1j])
@pytest.mark.parametrize("name", BUILDERS)
def test_what_is_no_rate_is_refused(name, lr):
    with pytest.raises(TypeError, match=f"^{name}: lr must be a number, a tensor or a schedule, found "):
        BUILDERS[name](lr)


@pytest.mark.parametrize("lr", [0, 0.0, 1, numpy.float32(0.1), torch.tensor(math.nan), torch.tensor(-1.0)])
@pytest.mark.parametrize("name", BUILDERS)
def test_numbers_are_taken_and_tensors_are_not_read(name, lr):
    optimizer = BUILDERS[name](lr)
    params = torch.ones(2)
    optimizer.update(params, optimizer.init(params), params)
