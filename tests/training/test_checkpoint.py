"""Checkpoints: `torch.save`, `torch.load(weights_only=True)`, and training goes on bit for bit."""

import io
import pickle
import subprocess
import sys

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.func import functional_call
from torch.utils._pytree import tree_leaves

import functional_jd as fj


def reloaded(value):
    """Through a file and back, executing nothing that the file says."""
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def same(left, right):
    """Of the same classes, with the same bits."""
    if isinstance(left, torch.Tensor):
        return left.dtype == right.dtype and left.shape == right.shape and left.tolist() == right.tolist()
    if isinstance(left, dict):
        return type(left) is type(right) and left.keys() == right.keys() and all(same(left[k], right[k]) for k in left)
    return type(left) is type(right) and len(left) == len(right) and all(map(same, left, right))


def in_a_new_process(script, *args):
    """What a script prints that imports nothing but torch and the package."""
    command = [sys.executable, "-c", f"import sys, torch, functional_jd as fj\n{script}", *map(str, args)]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()


def test_every_record_of_the_package_loads_as_weights_only(tmp_path):
    loaded = in_a_new_process(
        """
modules = [module for name, module in sys.modules.items() if name.startswith("functional_jd.")]
classes = {value for module in modules for value in vars(module).values() if isinstance(value, type)}
for record in sorted((c for c in classes if issubclass(c, tuple) and "functional_jd" in c.__module__), key=repr):
    value = record(*(torch.full((2,), i) for i in range(len(record._fields))))
    torch.save(value, sys.argv[1])
    again = torch.load(sys.argv[1], weights_only=True)
    assert type(again) is record and [x.tolist() for x in again] == [x.tolist() for x in value]
    print(record.__name__)
""",
        tmp_path / "record.pt",
    )
    assert {"ScaleState", "TrainState", "StepInfo", "MultitaskJacobian", "AdamwState", "NashState"} <= set(loaded)


def test_functions_are_still_refused():
    with pytest.raises(pickle.UnpicklingError, match="Weights only load failed"):
        reloaded(fj.Optimizer(torch.compile, torch.compile))


@given(
    st.floats(min_value=2.0**-149, max_value=2.0**127, width=32),
    st.integers(-3, 2**31 - 1),
    st.sampled_from([(), (1,), (3,)]),
)
def test_a_scale_keeps_every_bit(value, interval, shape):
    state = fj.scale_state(value, 1.0 + 2**-40, 1.0 - 2**-40, interval, shape=shape)
    assert same(reloaded(state), state)


NET = nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.ReLU(), nn.Linear(8, 3))


def losses(params, x):
    """Three objectives in float16; the second overflows when x is large."""
    y = functional_call(NET, params["net"], (x,))
    return {"a": (y[:, 0] - 1).square().mean(), "b": (y[:, 1] * x.sum()).abs().mean(), "c": y[:, 2].exp().mean()}


def start():
    generator = torch.Generator().manual_seed(0)
    params = {name: torch.randn(p.shape, generator=generator) / 2 for name, p in NET.named_parameters()}
    batches = [(torch.randn(5, 6, generator=generator) * (1e5 if i in (3, 8) else 1),) for i in range(10)]
    return {"net": params}, batches


RULES = {
    "upgrad": fj.upgrad,
    "mean": fj.mean,
    "nash_mtl": lambda: fj.nash_mtl(every=3),
    "random_weights": lambda: fj.random_weights(fj.random.key(1)),
    "pcgrad": lambda: fj.pcgrad(fj.random.key(2)),
    "graddrop": lambda: fj.graddrop(fj.random.key(3)),
    "gradvac": lambda: fj.gradvac(fj.random.key(4)),
    "excess_mtl": fj.excess_mtl,
    "pcd": fj.pcd,
    "cr_mogm": lambda: fj.cr_mogm(fj.mgda()),
    "grouped": lambda: fj.grouped({"net": fj.pcgrad(fj.random.key(5))}),
}
OPTIMIZERS = {
    "sgd": lambda: fj.sgd(lambda steps: 0.1 * 0.5 ** (steps // 3), momentum=0.9, nesterov=True),
    "adamw": lambda: fj.adamw(0.01),
    "from_torch": lambda: fj.from_torch(torch.optim.RMSprop, lr=0.01, momentum=0.5),
}


@pytest.mark.parametrize(
    ("rule", "optimizer"), [*((rule, "adamw") for rule in RULES), ("upgrad", "sgd"), ("mean", "from_torch")]
)
def test_training_goes_on_bit_for_bit(rule, optimizer):
    params, batches = start()

    def method():
        return {"losses": fj.autocast(losses), "aggregator": RULES[rule](), "optimizer": OPTIMIZERS[optimizer]()}

    def train(state, batches, how):
        flags = []
        for batch in batches:
            state, info = fj.step(state, *batch, **how)
            flags.append(bool(info.finite.all()))
        return state, flags

    scale = fj.scale_state(2.0**17, growth_interval=2, shape=(3,))
    begun = fj.train_state(params, *batches[0], scale=scale, **method())
    whole, flags = train(begun, batches, method())
    half, _ = train(begun, batches[:5], method())
    kept = reloaded(half)
    assert same(kept, half)
    resumed, _ = train(kept, batches[5:], method())  # with functions made anew, as in a new process
    assert same(resumed, whole)
    assert True in flags
    assert False in flags
    assert all(leaf.isfinite().all() for leaf in tree_leaves(resumed.params))
    assert not same(resumed.params, half.params)


def test_a_new_process_resumes_with_nothing_but_the_import(tmp_path):
    method = "dict(losses=lambda p: p.square(), aggregator=fj.nash_mtl(), optimizer=fj.adamw())"
    how = eval(method)
    state, _ = fj.step(fj.train_state(torch.ones(2), **how), **how)
    torch.save(state, tmp_path / "state.pt")
    after = in_a_new_process(
        f"""
state, _ = fj.step(torch.load(sys.argv[1], weights_only=True), **{method})
print(*state.params.tolist(), *state.optimizer.second.tolist())
""",
        tmp_path / "state.pt",
    )
    expected, _ = fj.step(state, **how)
    assert [float(number) for number in after] == expected.params.tolist() + expected.optimizer.second.tolist()
