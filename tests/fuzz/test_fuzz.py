"""Every public function, called with garbage for each argument, and on the simulated accelerator.

Garbage ends in an error that names it, or in a legitimate success. On the accelerator the numbers are those of the CPU,
they stand where the inputs are, and no devices are mixed.
"""

import importlib
import pkgutil

import fuzz_tools
import fuzz_values
import pytest
import torch
import torch.distributed as dist
from bounds import check_same
from fuzz_distributed import DISTRIBUTED
from fuzz_fronts import FRONTS
from fuzz_losses import ENGINES, OBJECTIVES, SEARCHES, TRAINING
from fuzz_optimizers import OPTIMIZERS
from fuzz_precision import PRECISION
from fuzz_random import RANDOM
from fuzz_rules import AGGREGATION, RULES
from garbage import GARBAGE, Argument, Call, outcome
from simulated import simulated
from torch.utils._pytree import tree_leaves

import functional_jd

# A name is called where it stands first: at the top level, or in the package that it belongs to.
PLACES = ["aggregation", "aggregators", "diagnostics", "engines", "objectives", "optimizers", "precision", "views"]
HOMES = ["functional_jd", *(f"functional_jd.{place}" for place in PLACES)]
LISTED = {home: importlib.import_module(home).__all__ for home in HOMES}
TABLE = {**RULES, **AGGREGATION, **OPTIMIZERS, **PRECISION, **OBJECTIVES, **ENGINES, **SEARCHES, **TRAINING}


def home_of(name):
    return next(home for home, names in LISTED.items() if name in names)


CALLS: dict[str, dict[str, Call]] = {
    **{home: {name: call for name, call in TABLE.items() if home_of(name) == home} for home in LISTED},
    "functional_jd.random": RANDOM,
    "functional_jd.distributed": DISTRIBUTED,
    "functional_jd.fronts": FRONTS,
    "functional_jd.plotting": fuzz_tools.PLOTTING,
    "functional_jd.testing": fuzz_tools.TESTING,
}

RECORDS = """
    AffineWeights Aggregation Aggregator Counterexample Declared Advice Diagnosis Engine EngineChoice ExampleSets
    FoundWeights Findings Front Kind Multitask MultitaskJacobian Observation Optimizer Path Plan PerExample
    Population Problem Range ScaleState Sharded StepInfo TrainState View
"""
EXCLUDED = {
    **dict.fromkeys(RECORDS.split(), "a record, whose fields the functions that take it check"),
    **dict.fromkeys(["SlowPathWarning", "TrainingStalled"], "an exception"),
    **dict.fromkeys(["ALWAYS", "BY_CLAIM", "PALETTE", "PLAIN", "random"], "no function"),
    "compiled": "compiles, with the checks of the other laws",
    "require": "is for engines, which pass on the plan that they were given",
    "leave": "ends the groups of the process, and takes no arguments",
}
"""The public names that are not called, and why."""

EVERY = [(home, name) for home, calls in CALLS.items() for name in calls]


@pytest.fixture(scope="module", autouse=True)
def one_replica():
    """A process group of one, whose collectives take tensors of both devices."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    with simulated():
        dist.init_process_group("cpu:fake,sim:fake", rank=0, world_size=1, store=FakeStore())
    yield
    dist.destroy_process_group()


@pytest.fixture(autouse=True)
def no_figures():
    yield
    fuzz_tools.plt.close("all")


@pytest.mark.filterwarnings("ignore")  # garbage that is accepted may deserve one
@pytest.mark.parametrize(("home", "name"), EVERY, ids=[f"{home}.{name}" for home, name in EVERY])
def test_garbage_is_refused_by_name_or_taken_for_a_reason(home, name):
    call = CALLS[home][name]
    call.f(**call.valid())
    found = {(argument, kind): outcome(name, call, argument, kind) for argument in call.valid() for kind in GARBAGE}
    assert {key: result for key, result in found.items() if result != "good"} == {}


ON_THE_HOST = {
    "to_checkpoint": "version, names and digests are for files",
    "from_torch": "torch counts steps there, where its kernels do not take a count on the device",
    **dict.fromkeys(("lattice", "quadratics"), "takes no tensors"),
}
"""The calls of whose results some stand on the host, and why."""


@pytest.mark.filterwarnings("ignore:Attempt to set non-positive ylim on a log-scaled axis:UserWarning")
@pytest.mark.parametrize(("home", "name"), EVERY, ids=[f"{home}.{name}" for home, name in EVERY])
def test_a_function_finds_on_a_device_what_it_finds_on_the_cpu(home, name, monkeypatch):
    call = CALLS[home][name]
    torch.manual_seed(0)
    expected = call.f(**call.valid())
    with simulated() as device, monkeypatch.context() as patch:
        patch.setitem(fuzz_values.WHERE, "now", "sim")
        torch.manual_seed(0)
        found = call.f(**call.valid())
        where = {x.device.type for x in tree_leaves(found) if isinstance(x, torch.Tensor)}
        assert where <= ({"cpu", "sim"} if name in ON_THE_HOST else {"sim"})
        found = device.get(found)
    check_same(found, expected)


def test_no_public_function_is_forgotten():
    modules = {f"functional_jd.{m.name}" for m in pkgutil.iter_modules(functional_jd.__path__)}
    packages = {"functional_jd", *modules} - {"functional_jd.__main__"}
    public = {(home, name) for home in packages for name in getattr(importlib.import_module(home), "__all__", [])}
    again = {(home, name) for home, names in LISTED.items() for name in names if home_of(name) != home}
    forgotten = {(home, name) for home, name in public - again - set(EVERY) if name not in EXCLUDED}
    assert forgotten == set()
    assert {name for _, name in public} >= EXCLUDED.keys()


@pytest.mark.parametrize(("home", "name"), EVERY, ids=[f"{home}.{name}" for home, name in EVERY])
def test_no_argument_is_forgotten(home, name):
    public = getattr(importlib.import_module(home), name)
    assert set(fuzz_values.named(public)) <= CALLS[home][name].valid().keys()


def test_garbage_is_judged():
    """The judge tells our errors from those of torch, of Python and of the user."""

    def raising(error):
        def f(x):
            if x is None:
                raise error

        return Call(f, {"x": Argument(1)})

    words = "f: x must be a number, found None. Pass 1."
    assert outcome("g", raising(TypeError(words)), "x", "none") == f"TypeError: {words}"
    assert outcome("f", raising(TypeError(words)), "x", "none") == "good"
    without_a_cure = TypeError("f: x must be a number, found None")
    for error in (without_a_cure, RuntimeError(words), AttributeError("'NoneType' object has no attribute 'y'")):
        assert outcome("f", raising(error), "x", "none").startswith(type(error).__name__)
    assert outcome("f", raising(None), "x", "true") == "accepted"
    assert torch.is_tensor(GARBAGE["nans"]())
