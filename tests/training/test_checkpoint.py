"""Checkpoints: through files and flat dicts by name, and training goes on bit for bit."""

import io
import subprocess
import sys
from collections import OrderedDict, namedtuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.func import functional_call
from torch.utils._pytree import tree_leaves, tree_map, tree_structure

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


RECORDS = """
import sys, torch, functional_jd as fj
modules = [module for name, module in sys.modules.items() if name.startswith("functional_jd.")]
classes = {value for module in modules for value in vars(module).values() if isinstance(value, type)}
for record in sorted((c for c in classes if issubclass(c, tuple) and "functional_jd" in c.__module__), key=repr):
    value = record(*(torch.full((2,), i) for i in range(len(record._fields))))
    torch.save(value, sys.argv[1])
    again = torch.load(sys.argv[1], weights_only=True)
    assert type(again) is record and [x.tolist() for x in again] == [x.tolist() for x in value]
    print(record.__name__)
"""


def test_every_record_of_the_package_loads_as_weights_only_in_a_process_that_imports_nothing_else(tmp_path):
    command = [sys.executable, "-c", RECORDS, tmp_path / "record.pt"]
    loaded = subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()
    assert {"ScaleState", "TrainState", "StepInfo", "MultitaskJacobian", "AdamwState", "NashState"} <= set(loaded)


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


KEYED = (fj.random_weights, fj.pcgrad, fj.graddrop, fj.gradvac)
RULES = {rule.__name__: rule for rule in (fj.upgrad, fj.mean, fj.excess_mtl, fj.famo, fj.pcd)}
RULES |= {rule.__name__: lambda i=i, rule=rule: rule(fj.random.key(i)) for i, rule in enumerate(KEYED, 1)}
RULES |= {
    "nash_mtl": lambda: fj.nash_mtl(every=3),
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
    by_name = fj.from_checkpoint(reloaded(fj.to_checkpoint(half)), like=begun)
    assert same(kept, half)
    assert same(by_name, half)
    assert same(train(by_name, batches[5:6], method())[0], train(half, batches[5:6], method())[0])
    resumed, _ = train(kept, batches[5:], method())  # with functions made anew, as in a new process
    assert same(resumed, whole)
    assert {True, False} <= {*flags}
    assert all(leaf.isfinite().all() for leaf in tree_leaves(resumed.params))
    assert not same(resumed.params, half.params)


# By name

SUMS = "functional_jd.checksums"
DTYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.bool, torch.int64, torch.uint8]
Pair = namedtuple("Pair", "first second")


@st.composite
def tensors(draw):
    shape = draw(st.lists(st.integers(0, 3), max_size=3))
    bits = torch.Generator().manual_seed(draw(st.integers(0, 2**16)))
    dtype = draw(st.sampled_from(DTYPES))
    width = max(1, torch.empty((), dtype=dtype).element_size())
    high = 2 if dtype is torch.bool else 256
    x = torch.randint(high, (*shape, width), dtype=torch.uint8, generator=bits).view(dtype).reshape(shape)
    return x.mT if x.ndim > 1 and draw(st.booleans()) else x


keys = st.sampled_from(["a", "b", "net.0.weight", "key", "Ω"])
trees = st.recursive(
    tensors() | st.sampled_from([(), None]),
    lambda inner: (
        st.dictionaries(keys, inner, max_size=3)
        | st.dictionaries(keys, inner, max_size=3).map(OrderedDict)
        | st.lists(inner, max_size=3)
        | st.tuples(inner, inner)
        | st.builds(Pair, inner, inner)
    ),
    max_leaves=6,
)


def bits(x):
    """The bytes, since NaN equals nothing, and the strides, which decide how some ops round."""
    return x.dtype, x.shape, x.stride(), bytes(x.contiguous().reshape(-1).view(torch.uint8).tolist())


def tensors_of(tree):
    return [x for x in tree_leaves(tree) if x is not None]


@given(trees)
def test_what_was_written_comes_back_bit_by_bit(tree):
    each = lambda f: tree_map(lambda x: x if x is None else f(x), tree)
    kept, like = each(torch.clone), each(torch.zeros_like)
    checkpoint = fj.to_checkpoint(tree)
    assert all(type(name) is str and x.is_contiguous() for name, x in checkpoint.items())
    found = fj.from_checkpoint(checkpoint, like=like)
    assert tree_structure(found) == tree_structure(tree)
    assert list(map(bits, tensors_of(found))) == list(map(bits, tensors_of(kept)))
    addresses = {x.data_ptr() for x in (*tensors_of(tree), *checkpoint.values()) if x.numel()}
    assert not addresses & {x.data_ptr() for x in tensors_of(found) if x.numel()}


def test_names_consist_of_fields_keys_and_positions():
    state = fj.TrainState({"0.weight": torch.ones(2)}, (), Pair(torch.ones(()), [torch.ones(1)]), (), fj.scale_state())
    names = {"params.0.weight", "optimizer.first", "optimizer.second.0"}
    names |= {f"functional_jd.{name}" for name in ("version", "fields", "checksums")}
    assert fj.to_checkpoint(state).keys() == names | {f"scale.{field}" for field in fj.precision.ScaleState._fields}
    assert "value" in fj.to_checkpoint(torch.ones(1))


def test_shared_storage_is_written_twice_and_states_of_replicas_under_vmap_are_states():
    x = torch.arange(6.0)
    checkpoint = fj.to_checkpoint({"a": x, "b": x[:3], "c": torch.ones(1).expand(4)})
    assert len({tensor.untyped_storage().data_ptr() for tensor in checkpoint.values()}) == len(checkpoint)
    assert all(tensor.untyped_storage().nbytes() == tensor.nbytes for tensor in checkpoint.values())
    method = {"losses": lambda p: p.square(), "aggregator": fj.nash_mtl(), "optimizer": fj.adamw()}
    state = torch.vmap(lambda p: fj.train_state(p, **method))(torch.ones(3, 2))
    assert same(fj.from_checkpoint(fj.to_checkpoint(state), like=state), state)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
@pytest.mark.parametrize("library", ["safetensors.torch", "torch.distributed.checkpoint"])
def test_other_libraries_take_them(library, tmp_path):
    files = pytest.importorskip(library)
    state = {"tied": torch.ones(2, 3).T, "key": fj.random.key(3), "half": torch.tensor(1.5, dtype=torch.bfloat16)}
    if library == "safetensors.torch":
        files.save_file(fj.to_checkpoint(state), tmp_path / "state.safetensors")
        found = files.load_file(tmp_path / "state.safetensors")
    else:
        files.save(fj.to_checkpoint(state), checkpoint_id=tmp_path, no_dist=True)
        found = fj.to_checkpoint(tree_map(torch.zeros_like, state))
        files.load(found, checkpoint_id=tmp_path, no_dist=True)
    assert same(fj.from_checkpoint(found, like=state), state)


@given(st.permutations(["mean", "steps", "scale"]))
def test_fields_in_another_order_are_never_mixed_up(order):
    old = namedtuple("Memory", ["mean", "steps", "scale"])(*(torch.full((2,), float(i)) for i in range(3)))
    like = namedtuple("Memory", order)(*[torch.zeros(2)] * 3)
    found = fj.from_checkpoint(fj.to_checkpoint({"memory": old}), like={"memory": like})["memory"]
    assert found._asdict().keys() == like._asdict().keys()
    assert all(torch.equal(x, getattr(old, name)) for name, x in found._asdict().items())


def test_a_field_that_was_added_keeps_the_value_of_like_and_one_that_was_empty_raises():
    old = namedtuple("Memory", ["mean"])(torch.ones(2))
    new = namedtuple("Memory", ["steps", "mean"])({"a": torch.tensor(7)}, torch.zeros(2))
    found = fj.from_checkpoint(fj.to_checkpoint([old]), like=[new])[0]
    assert int(found.steps["a"]) == 7
    assert found.mean.tolist() == [1, 1]
    plain = namedtuple("Memory", ["steps", "mean"])(torch.tensor(7), torch.zeros(2))
    assert same(tuple(fj.from_checkpoint(fj.to_checkpoint(old), like=plain)), (torch.tensor(7), torch.ones(2)))
    with pytest.raises(ValueError, match=r"from_checkpoint: .*found 'second.a' missing"):
        fj.from_checkpoint(fj.to_checkpoint(Pair(torch.ones(1), ())), like=Pair(torch.ones(1), {"a": torch.ones(1)}))


def test_what_does_not_fit_is_refused_by_name():
    state = {"a": {"w": torch.ones(2)}, "b": torch.ones(1)}
    good = fj.to_checkpoint(state)
    renamed = {"a": {"v": torch.ones(2)}, "b": torch.ones(1)}
    for like, words in (
        (renamed, r"found 'a.v' missing and 'a.w' unknown"),
        ({**state, "c": [torch.ones(1)] * 7}, r"'c.0', 'c.1', 'c.2', 'c.3', 'c.4' and 2 others missing"),
        (
            {**state, "b": torch.ones(3)},
            r"expected torch.float32 \[3\] in 'b', as in `like`, found torch.float32 \[1\]",
        ),
        ({**state, "b": torch.ones(1).half()}, r"expected torch.float16 \[1\] in 'b', .* found torch.float32"),
    ):
        with pytest.raises(ValueError, match=rf"^from_checkpoint: .*{words}"):
            fj.from_checkpoint(good, like=like)
    for checkpoint, error, words in (
        (state, TypeError, r"checkpoint\['a'\] must be a Tensor, found dict"),
        (torch.ones(1), TypeError, "checkpoint must be a dict by names, found torch.float32"),
        ({"b": torch.ones(1)}, ValueError, "a checkpoint of version 1 or 2, found version none"),
        (
            {**good, "functional_jd.version": torch.tensor(9)},
            ValueError,
            "a checkpoint of version 1 or 2, found version 9",
        ),
        ({**good, "functional_jd.fields": torch.ones(3)}, ValueError, "found others in 'functional_jd.fields'"),
        ({**good, SUMS: good[SUMS][:0]}, ValueError, f"found others in '{SUMS}'"),
    ):
        with pytest.raises(error, match=f"^from_checkpoint: .*{words}"):
            fj.from_checkpoint(checkpoint, like=state)
    for leaf, words in ((0.1, "0.1"), (torch.eye(2).to_sparse(), "torch.float32")):
        with pytest.raises(
            TypeError, match=rf"^to_checkpoint: all leaves must be tensors, and dense, found {words}.* in 'a'"
        ):
            fj.to_checkpoint({"a": leaf})
    for twice, name in (({"a": {"b": torch.ones(1)}, "a.b": torch.ones(1)}, "a.b"), ({SUMS: torch.ones(1)}, SUMS)):
        with pytest.raises(ValueError, match=rf"^to_checkpoint: .*found '{name}' twice"):
            fj.to_checkpoint(twice)
    assert same(fj.from_checkpoint(good, like=tree_map(lambda x: x.to("meta"), state)), state)
    one, two = (namedtuple(name, ["steps"])(torch.tensor(3)) for name in ("Sgd", "Lion"))  # whose tensors would fit
    with pytest.raises(ValueError, match=r"expected Lion in 'optimizer', as in `like`, found Sgd"):
        fj.from_checkpoint(fj.to_checkpoint({"optimizer": one}), like={"optimizer": two})


def flipped(x, bit):
    """A copy of a tensor in which one bit differs."""
    raw = x.clone().contiguous().reshape(-1).view(torch.uint8)
    raw[bit // 8] ^= 1 << bit % 8
    return raw.view(x.dtype).reshape(x.shape)


@pytest.mark.parametrize("dtype", [*DTYPES[:4], torch.int64, torch.uint8, torch.complex64, torch.float8_e5m2])
def test_every_flipped_bit_is_found(dtype):
    x = torch.arange(6.0).reshape(2, 3).to(dtype)
    good = fj.to_checkpoint({"x": x, "key": fj.random.key(0)})
    assert same(fj.from_checkpoint(good, like={"x": x, "key": fj.random.key(1)})["key"], fj.random.key(0))
    for name, tensor in good.items():
        words = "a checkpoint of version 1 or 2" if "version" in name else "tensors as they were written, found oth"
        for bit in range(tensor.nbytes * 8):
            with pytest.raises(ValueError, match=f"from_checkpoint: expected {words}"):
                fj.from_checkpoint({**good, name: flipped(good[name], bit)}, like={"x": x, "key": fj.random.key(0)})


def test_signs_that_change_together_are_found():
    for dtype in (torch.float64, torch.float32, torch.complex128):
        state = {"w": torch.tensor([1.0, -1.0, -1.0, 1.0], dtype=dtype)}
        good = fj.to_checkpoint(state)
        for places in ([0, 1], [1, 3], [0, 1, 2, 3]):
            other = good["w"].index_copy(0, torch.tensor(places), -good["w"][places])
            with pytest.raises(ValueError, match="others in 'w': their checksums differ"):
                fj.from_checkpoint({**good, "w": other}, like=state)


def test_checkpoints_of_version_1_load_and_are_verified():
    like = {"b": torch.zeros(1), "w": torch.zeros(2, dtype=torch.float64)}
    old = {
        "b": torch.tensor([3.0]),
        "w": torch.tensor([1.0, -2.0], dtype=torch.float64),
        "functional_jd.fields": torch.tensor([123, 125], dtype=torch.uint8),
        "functional_jd.version": torch.tensor(1),
        "functional_jd.checksums": torch.tensor([1077936128, 498, 9218868437227405312]),
    }
    assert same(fj.from_checkpoint(old, like), {"b": old["b"], "w": old["w"]})
    with pytest.raises(ValueError, match="others in 'b': their checksums differ"):
        fj.from_checkpoint({**old, "b": -old["b"]}, like)


def test_other_rules_and_optimizers_are_refused_by_name_if_there_are_names():
    state = {"w": torch.ones(2)}
    old = {k: x for k, x in fj.to_checkpoint(state).items() if k != "functional_jd.checksums"}
    assert same(fj.from_checkpoint(old, like={"w": torch.zeros(2)}, aggregator=fj.mgda()), state)
    params = torch.ones(2)
    losses = lambda p: p.square()
    rules = {"upgrad": fj.upgrad(), "mgda": fj.mgda(), "mean": fj.mean(), "total": fj.total()}
    optimizers = {k: fj.from_torch(getattr(torch.optim, k), lr=0.1) for k in ("Adam", "AdamW")}
    for rule, other in (("upgrad", "mgda"), ("mean", "total")):
        for name, another in (("Adam", "AdamW"), ("AdamW", "Adam")):
            method = {"aggregator": rules[rule], "optimizer": optimizers[name]}
            state = fj.train_state(params, losses=losses, **method)
            kept = reloaded(fj.to_checkpoint(state, **method))
            assert same(fj.from_checkpoint(kept, state, **method), state)
            with pytest.raises(ValueError, match=f"from_checkpoint: .* of .*{name}. Pass the optimizer that wrote"):
                fj.from_checkpoint(kept, state, **method | {"optimizer": optimizers[another]})
            with pytest.raises(ValueError, match=r"from_checkpoint: .*Pass the aggregator that wrote"):
                fj.from_checkpoint(kept, state, **method | {"aggregator": rules[other]})
            with pytest.raises(ValueError, match="expected aggregator= to be given, since it is named, found"):
                fj.from_checkpoint(kept, state)
    # Hyper-parameters may change: a state goes on at another rate.
    how = {"aggregator": fj.cagrad(0.4), "optimizer": fj.adamw(0.1)}
    state = fj.train_state(params, losses=losses, **how)

    def rate(steps):
        return 0.1 / (steps + 1)

    for schedule in (rate, lambda steps: 0.1 / (steps + 1)):
        slower = {"aggregator": fj.cagrad(0.5), "optimizer": fj.adamw(schedule)}
        assert same(fj.from_checkpoint(fj.to_checkpoint(state, **how), state, **slower), state)
