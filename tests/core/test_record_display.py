"""How records show themselves, small and by name, wherever they are looked at; and the names of objectives."""

import io
import pickle
import re
from dataclasses import dataclass
from typing import NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.func import functional_call
from torch.utils import _pytree as torch_pytree
from torch.utils._python_dispatch import TorchDispatchMode

import functional_jd as jd
from functional_jd import jacobian_fn
from functional_jd.core.names import names_or_indices, objective_names
from functional_jd.core.record_display import displayed_as, has_values, number, outline

RULE, OPTIMIZER = jd.upgrad(), jd.adamw(1e-3)


@displayed_as(outline)
class Pair(NamedTuple):
    first: object
    second: object


@dataclass
class Box:
    inside: torch.Tensor


torch_pytree.register_dataclass(Box)


def squares(params, x):
    return {"right": (params["w"] * x).square().mean(), "left": (params["w"] - 1).square().sum()}


def trained(scale=None):
    params, x = {"w": torch.arange(3.0)}, torch.ones(3)
    method = {"losses": squares, "aggregator": RULE, "optimizer": OPTIMIZER}
    state = jd.train_state(params, x, scale=scale, **method)
    return jd.step(state, x, **method)


def lines(record):
    return repr(record).splitlines()


class OnlySmallTensors(TorchDispatchMode):
    """Nothing large is touched."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        assert all(x.numel() < 10 for x in args if isinstance(x, torch.Tensor))
        return func(*args, **(kwargs or {}))


def test_a_state_of_ten_million_numbers_is_a_summary():
    net = nn.Sequential(nn.Linear(3000, 3000), nn.ReLU(), nn.Linear(3000, 400))
    params = dict(net.named_parameters())

    def losses(params, x):
        y = functional_call(net, params, (x,))
        return {"a": y.mean(), "b": y.square().mean()}

    state = jd.train_state(params, torch.ones(1, 3000), losses=losses, aggregator=jd.mean(), optimizer=OPTIMIZER)
    with OnlySmallTensors():
        displayed_as = lines(state)
    assert displayed_as[0] == "TrainState"
    assert re.fullmatch(r"  params +4 tensors, 10,203,400 numbers +float32", displayed_as[1])
    assert len(displayed_as) == 6
    assert max(map(len, displayed_as)) < 120


def test_small_tensors_show_their_numbers_and_large_ones_their_shape():
    vector, grid, long, flag = torch.tensor([1.0, 2.5]), torch.zeros(2, 2), torch.zeros(1001), torch.ones(()) > 0
    text = repr(Pair(vector, grid)) + repr(Pair(long, flag)) + repr(Pair(torch.arange(7), {}))
    for expected in ("[1, 2.5]", "tensor [2, 2]", "tensor [1001]", "True", "7 from 0 to 6", "empty"):
        assert expected in text


def test_step_info_lists_the_objectives_by_name():
    _, info = trained(jd.scale_state(shape=2))
    assert info.losses.keys() == {"right", "left"}
    displayed_as = lines(info)
    assert displayed_as[0] == "StepInfo: step taken"
    assert [line.split() for line in displayed_as[1:]] == [
        ["objective", "loss", "weight", "finite"],
        ["left", "2", f"{info.weights[0]:.4g}", "yes"],
        ["right", "1.667", f"{info.weights[1]:.4g}", "yes"],
    ]
    assert len({len(line) for line in displayed_as[1:]}) == 1


def test_a_skipped_step_says_so():
    info = jd.StepInfo(torch.tensor([1.0, torch.inf]), torch.tensor([0.5, 0.5]), torch.tensor([True, False]))
    assert lines(info)[0] == "StepInfo: step skipped, losses were not finite"
    assert lines(info)[-1].split() == ["1", "inf", "0.5", "no"]
    info = jd.StepInfo(torch.tensor([1.0, -2.0]), torch.tensor([0.5, torch.nan]), torch.tensor([True, False]))
    assert lines(info)[0] == "StepInfo: step skipped, weights were not finite"
    info = jd.StepInfo(torch.tensor([1.0, torch.nan]), torch.tensor([0.5, 0.5]), torch.tensor(False))
    assert "skipped" in lines(info)[0]
    assert lines(info)[-1].split() == ["1", "nan", "0.5"]


def test_a_scale_is_shown_in_powers_of_two():
    one = jd.scale_state()
    each = jd.scale_state(shape=2)._replace(scale=torch.tensor([2.0**-20, 100.0]))
    many = jd.scale_state(shape=32)._replace(scale=2.0 ** torch.arange(32))
    cases = (one, "2**16", "0"), (each, "[2**-20, 100]", "[0, 0]"), (many, "32 from 1 to 2**31", "32 times 0")
    for state, scale, tracker in cases:
        found = [re.split("  +", line) for line in lines(state)[:3]]
        expected = [["", "scale", scale, "float32"], ["", "growth_tracker", tracker, "int32"]]
        assert found == [["ScaleState"], *expected]


@given(st.floats(width=32))
def test_numbers_are_short_and_right(x):
    text = number(x)
    assert len(text) <= 10
    value = 2.0 ** int(text[3:]) if text.startswith("2**") else float(text)
    assert value == pytest.approx(x, rel=1e-3, nan_ok=True)


keys = st.text("ab<&\" '", min_size=1, max_size=4)
trees = st.recursive(
    st.sampled_from([torch.zeros(()), torch.ones(3), torch.zeros(40, 2), torch.ones(0), None, 3, "x", len]),
    lambda child: (
        st.dictionaries(keys, child, max_size=12) | st.lists(child, max_size=3) | st.builds(Pair, child, child)
    ),
    max_leaves=12,
)


@given(trees, trees)
def test_whatever_a_record_holds_is_shown(first, second):
    assert lines(Pair(first, second))[0] == "Pair"


def everywhere(x):
    """All records, holding x."""
    scale = jd.scale_state()._replace(scale=x)
    yield scale
    yield jd.TrainState({"w": x}, {"n": x}, jd.sgd(0.1, 0.9).init({"w": x}), (), scale)
    yield OPTIMIZER.init({"w": x})
    yield jd.StepInfo({"a": x}, x, x > 0)
    yield jd.StepInfo(x, {"w": x}, x > 0)
    yield jd.aggregation.MultitaskJacobian({"w": x}, [x])
    yield jd.aggregation.Aggregation({"w": x}, x, ())
    yield RULE
    yield OPTIMIZER


def look(x):
    for record in everywhere(x):
        assert type(record).__name__ in repr(record)
        assert f"{record}" == str(record) == repr(record)
    return x.sum()


@pytest.mark.parametrize("x", [torch.tensor(1.0), torch.ones(3), torch.ones(3, device="meta"), torch.ones(2, 0)])
def test_records_show_themselves_under_every_transform(x):
    look(x)
    look(x.requires_grad_())
    x = x.detach()
    torch.func.grad(look)(x)
    torch.func.jvp(look, (x,), (x,))
    torch.vmap(torch.func.grad(look))(x.expand(2, *x.shape))
    torch.func.functionalize(look)(x)
    with torch.inference_mode():
        look(x.clone())


def test_records_show_themselves_where_values_are_fake():
    real = torch.ones(3)
    with FakeTensorMode():
        look(torch.ones(3))
        assert repr(jd.StepInfo(torch.ones(3), torch.ones(3), torch.ones(()))).startswith("StepInfo\n  losses ")
        assert not has_values(real)
        look(jd.precision.no_scale().scale)


def test_what_is_printed_while_compiling_does_not_break_the_graph():
    @torch.compile(fullgraph=True, backend="eager")
    def f(state, x):
        made = state._replace(scale=state.scale * x)
        return state.scale * x, str(state), f"{state}", "%s" % (state,), str(made)  # noqa: UP031

    found, *texts = f(jd.precision.no_scale(), torch.ones(2))
    assert found.tolist() == [1, 1]
    assert len(texts) == 4
    assert all(text.startswith("ScaleState") for text in texts)


@given(st.integers(0, 3))
def test_records_are_plain_records_still(n):
    for record in everywhere(torch.ones(n)):
        cls = type(record)
        assert cls.__bases__ == (tuple,)
        assert record._replace(**record._asdict())._fields == record._fields
        leaves, spec = torch_pytree.tree_flatten(record)
        again = torch_pytree.tree_unflatten(leaves, spec)
        assert type(again) is cls
        assert repr(again) == repr(record)
        if all(isinstance(leaf, torch.Tensor) for leaf in leaves):
            assert repr(pickle.loads(pickle.dumps(record))) == repr(record)
            file = io.BytesIO()
            torch.save(record, file)
            file.seek(0)
            assert repr(torch.load(file, weights_only=True)) == repr(record)


class Two(NamedTuple):
    right: torch.Tensor
    left: torch.Tensor


def test_names_are_keys_and_indices():
    one, two = torch.zeros(()), torch.zeros(2)
    assert objective_names({"image": two, "digits": {"right": one, "left": one}}) == [
        *("digits.left", "digits.right"),
        *("image[0]", "image[1]"),
    ]
    assert objective_names(Two(one, torch.zeros(1, 2))) == ["right", "left[0, 0]", "left[0, 1]"]
    assert objective_names([Two(one, one), {"z": Box(one), "a": one}]) == ["0.right", "0.left", "1.a", "1.z.inside"]
    assert objective_names(two) == ["0", "1"]
    assert objective_names(one) == ["loss"]
    assert objective_names([one, one]) == ["0", "1"]


@given(
    st.dictionaries(st.text("abc", min_size=1, max_size=3), st.lists(st.integers(0, 3), max_size=2), min_size=1).filter(
        lambda shapes: any(0 not in shape for shape in shapes.values())
    )
)
def test_every_row_of_the_jacobian_has_its_name(shapes):
    """Each loss is a number that its own name can be read off, and rows are their slopes."""

    def losses(x):
        return {key: x * sum(key.encode()) * torch.ones(shape) for key, shape in shapes.items()}

    jacobian, values = jacobian_fn(losses)(torch.tensor(1.0))
    names = objective_names(values)
    assert len(set(names)) == len(names) == len(jacobian)
    assert [sum(name.split("[")[0].encode()) for name in names] == jacobian.tolist()


def test_a_loss_that_is_no_tensor_is_refused():
    with pytest.raises(TypeError, match="found float in 'a'"):
        objective_names({"a": 1.0})


def test_names_must_be_as_many_as_rows():
    assert names_or_indices(None, 2) == ["0", "1"]
    assert names_or_indices(("a", "b"), 2) == ["a", "b"]
    with pytest.raises(ValueError, match="functional_jd: expected one name for each of 2 objectives, found 1"):
        names_or_indices(["a"], 2)
