"""Layers that are recorded, and parameters whose rows come from autograd, against rows of plain autograd."""

from functools import cache

import pytest
import torch
from gramian_by_hand import (
    agree,
    both_prices,
    check_autocast,
    expectation,
    found,
    gramian_fn,
    is_tapped,
    model_of,
    priced,
    single,
)
from jacobian_by_hand import KINDS, leaves
from torch import nn
from torch.utils import _pytree
from zoo import BATCH, MODELS, MORE, WIDTH, numbers

from functional_jd import jacobian_fn
from functional_jd.engines.gramian import assemble
from functional_jd.engines.gramian.recorder import LayerRecorder, Recording
from functional_jd.engines.kinds import examples, multitask, plain

F = nn.functional

# Slow operators are no errors.
pytestmark = pytest.mark.filterwarnings("ignore:There is a performance drop:UserWarning")

ALONE = ["layer_norm", "rms_norm", "group_norm", "instance_norm", "prelu"]
NORMS = [*ALONE, "batch_norm_no_statistics"]
ATTENTION = ["attention", "fused_attention", "encoder_norm_first"]
OTHERS = ["scaled", "packed", "prelu_2d", "group_norm_2d", "decoder", "mlp", "deep", "tied", "reused", "conv1d"]
OTHERS += ["conv2d", "conv_transpose", "conv_grouped", "embedding", "encoder", "lstm"]
IN_HALF = ["scaled", "cross_attention", "group_norm_2d", "mlp", "tied", "reused", "conv2d", "embedding", "encoder"]


def pairs(*names):
    """Names and kinds; one example has no statistics of a batch."""
    return [(name, kind) for name in names for kind in KINDS if (MODELS | MORE)[name]().single or kind != "by_example"]


@cache
def case_of(name, kind):
    return KINDS[kind]((MODELS | MORE)[name]())


def unrecorded(monkeypatch, case):
    """The shapes of the leaves that get rows from autograd, and how many layers are recorded."""
    seen = []
    together = assemble.gramian_of_uses

    def spy(recording, rows, leaves, *given):
        direct = rows[len(recording.ends) :]
        shapes = [tuple(x.shape) for x, r in zip(leaves, direct, strict=True) if r is not None]
        seen.append((shapes, len(recording.ends)))
        return together(recording, rows, leaves, *given)

    with monkeypatch.context() as patch:
        for kind in (plain, examples, multitask):
            patch.setattr(kind, "gramian_of_uses", spy)
        found(case)
    assert len(seen) == 1
    return seen[0]


# The numbers


@pytest.mark.parametrize(("name", "kind"), pairs(*NORMS, *ATTENTION, *OTHERS))
def test_float32_is_right_to_rounding(name, kind, monkeypatch):
    case = case_of(name, kind)
    expected = expectation(case)
    for lean in (True, False):
        priced(monkeypatch, lean)
        agree(found(single(case)), expected, torch.float32, 240)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.bfloat16, 0.1), (torch.float16, 0.02)], ids=str)
@pytest.mark.parametrize(("name", "kind"), pairs(*NORMS, *ATTENTION, *IN_HALF))
def test_autocast_is_right_to_its_precision_and_changes_no_value(name, dtype, tolerance, kind, monkeypatch):
    case = check_autocast((MODELS | MORE)[name](), kind, dtype, tolerance, monkeypatch)
    values = gramian_fn(case.losses)(case.params, *case.args)[1]
    for x, y in zip(leaves(values), leaves(jacobian_fn(case.losses)(case.params, *case.args)[1]), strict=True):
        torch.testing.assert_close(x, y, rtol=tolerance / 4, atol=tolerance / 4)


# What is tapped


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ATTENTION)
def test_projections_of_attention_are_tapped_everywhere(name, kind, monkeypatch):
    direct, _ = unrecorded(monkeypatch, case_of(name, kind))
    assert all(len(shape) == 1 for shape in direct)  # scales and shifts, which autograd sums up as fast


def test_weights_of_attention_come_out_of_it_in_the_same_dtype():
    attention = nn.MultiheadAttention(4, 2, batch_first=True)
    params = {name: p.detach() for name, p in attention.named_parameters()}

    def losses(params, x):
        with torch.autocast("cpu", torch.bfloat16):
            y, weights = torch.func.functional_call(attention, params, (x, x, x))
        return y.float().mean((0, 1)), weights

    f = lambda params, x: (losses(params, x)[0], losses(params, x)[1])
    _, (_, mine), _ = gramian_fn(f, has_aux=True)(params, numbers(BATCH, 3, 4, dtype=torch.float32))
    _, (_, theirs) = jacobian_fn(f, has_aux=True)(params, numbers(BATCH, 3, 4, dtype=torch.float32))
    torch.testing.assert_close(mine, theirs, rtol=0, atol=0)


# What taps must not overlook


def cast_and_changed(params, x):
    weight = params["w"].float()
    weight.mul_(2)
    return F.linear(x.float(), weight).double() + x @ params["v"]


def view_without_graph(params, x):
    with torch.no_grad():
        weight, shift = params["w"].mT, params["v"][0]
    return x @ weight + shift + F.linear(x, params["w"][0:3], params["v"][1])


def chosen_by_index(params, x):
    return F.linear(x, params["w"][torch.tensor([2, 0, 0])]) * params["v"][0, ::2].sum() + params["v"][1].expand(1, 3)


def both_are_leaves(params, x):
    product = params["w"] * params["v"] + params["w"]
    return x @ product - params["w"][0] * params["w"][0]


def alpha(params, x):
    return torch.add(torch.sub(x, params["w"][0], alpha=2), params["v"][0], alpha=3)


def constant_source(params, x):
    position = torch.arange(3.0, dtype=torch.float64)
    return torch.tanh(x * (position * params["w"][0] + params["v"][1])) + F.layer_norm(position, (3,), params["w"][2])


def without_grad_in_norm(params, x):
    with torch.no_grad():
        x = F.layer_norm(x, (3,), params["w"][0], params["v"][0])
    return F.rms_norm(x, (3,), params["w"][0]) + F.layer_norm(x, (3,), bias=params["v"][1], weight=params["v"].mT[0])


def mapped_inside(params, x):
    return torch.vmap(lambda row: F.layer_norm(row, (3,), params["w"][0]) * params["v"][0])(x)


STRANGE = (
    cast_and_changed,
    view_without_graph,
    chosen_by_index,
    both_are_leaves,
    alpha,
    constant_source,
    without_grad_in_norm,
    mapped_inside,
)


@both_prices
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("predict", STRANGE, ids=lambda f: f.__name__)
def test_uses_that_no_tap_may_take_alone_count(predict, kind, lean, monkeypatch):
    priced(monkeypatch, lean)
    case = KINDS[kind](model_of(predict))
    is_tapped(monkeypatch, case)
    agree(found(case), expectation(case), *((torch.float32, 64) if predict is cast_and_changed else ()))


@pytest.mark.parametrize("kind", KINDS)
def test_frozen_unused_and_shared_norms(kind):
    def predict(params, x):
        y = F.layer_norm(x @ params["v"], (3,), params["w"][0], fixed)
        y = F.group_norm(torch.tanh(y), 1, params["w"][0], params["w"][1])
        return F.prelu(y, params["w"][1]) * fixed

    fixed = numbers(3, seed=5)
    params = {"w": numbers(3, 3), "v": numbers(3, 3, seed=1), "idle": numbers(3)}
    case = KINDS[kind](model_of(predict, params))
    agree(found(case), expectation(case))


def test_a_recorded_value_is_the_value():
    """Constants take the leaves' places: nothing but gradients may differ."""
    model = MODELS["mlp"]()
    flat, spec = _pytree.tree_flatten(model.params)
    points, constants = ([x.clone().requires_grad_() for x in flat] for _ in range(2))
    recording = Recording([], [], [], [], [])
    with LayerRecorder(points, constants=constants, recording=recording):
        y = model.predict(_pytree.tree_unflatten(points, spec), model.inputs)
    torch.testing.assert_close(y, model.predict(model.params, model.inputs), rtol=0, atol=0)
    assert [flat[use.leaf].ndim for use in recording.uses] == [2, 2]
    assert y.shape == (BATCH, WIDTH)


@pytest.mark.parametrize("transpose", [lambda w: w.T, lambda w: w.mT, torch.t, lambda w: w.transpose(-2, 1).T.T])
@pytest.mark.parametrize("kind", KINDS)
def test_a_transposed_weight_is_recorded(transpose, kind, monkeypatch):
    params = {"w": numbers(3, 3), "v": numbers(3, 3, seed=1)}
    predict = lambda p, x: F.linear(torch.tanh(x @ transpose(p["w"])), transpose(p["v"]))
    case = KINDS[kind](model_of(predict, params))
    assert unrecorded(monkeypatch, case) == ([], 2)
    agree(found(case), expectation(case))
