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

import functional_jd as fj
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


EPS = torch.finfo(torch.float64).eps
X = torch.arange(1.0, 9.0, dtype=torch.float64).reshape(2, 4).sin()


def on_parameter(w):
    if w.requires_grad:
        w.register_hook(lambda g: 3 * g)
    return X @ w


def on_view(w):
    view = w.t().mT
    if view.requires_grad:
        view.register_hook(lambda g: 3 * g)
    return X @ view


def before_node(w):
    h = X @ w
    if h.grad_fn is not None:
        h.grad_fn.register_prehook(lambda gradients: tuple(3 * g for g in gradients))
    return h


def after_node(w):
    h = X @ w
    if h.grad_fn is not None:
        h.grad_fn.register_hook(lambda gradients, _: tuple(g if g is None else 3 * g for g in gradients))
    return h


HOOKS = (on_parameter, on_view, before_node, after_node)


@pytest.mark.parametrize("hooked", HOOKS)
def test_hooks_beside_recorded_layers_act(hooked):
    """The row of `sum(c h)` is `3 X' c`, whatever the way."""
    c = torch.stack([X[:, :2].cos(), X[:, 2:]])
    params = {"w": torch.ones(4, 2, dtype=torch.float64)}
    losses = lambda params: (hooked(params["w"]) * c).sum((1, 2))
    with pytest.warns(fj.SlowPathWarning, match="hook"):
        gramian, _, pullback = fj.gramian_fn(losses)(params)
    rows = 3 * (X.mT @ c).flatten(1)
    terms = 3 * (X.abs().mT @ c.abs()).flatten(1)
    # Two products of a row, four of an inner product, and as many sums.
    assert ((gramian - rows @ rows.T).abs() <= 32 * EPS * terms @ terms.T).all()
    assert ((pullback(torch.ones(2))[0]["w"].flatten() - rows.sum(0)).abs() <= 32 * EPS * terms.sum(0)).all()


@pytest.mark.parametrize("shape", [(1,), (3, 2), ()])
def test_a_bias_that_torch_broadcasts_is_not_recorded(shape):
    params = {"w": torch.ones(2, 4, dtype=torch.float64), "b": torch.ones(shape, dtype=torch.float64)}
    x = torch.cat([X, X[:1]])
    losses = lambda params: torch.nn.functional.linear(x, params["w"], params["b"]).flatten()
    gramian, _, _ = fj.gramian_fn(losses)(params)
    rows = fj.jacobian_fn(losses, mode="loop")(params)[0]
    flat = torch.cat([row.reshape(len(row), -1) for row in rows.values()], 1)
    assert ((gramian - flat @ flat.T).abs() <= 16 * EPS * flat.abs() @ flat.abs().T).all()


def frozen_by_attribute(tensors, wanted):
    for x in tensors:
        x.requires_grad = wanted


def frozen_by_method(tensors, wanted):
    for x in tensors:
        x.requires_grad_(wanted)


FREEZES = (frozen_by_attribute, frozen_by_method)


@pytest.mark.parametrize("fn", [fj.gramian_fn, fj.squared_norms_fn])
@pytest.mark.parametrize("freeze", FREEZES)
def test_a_parameter_that_is_frozen_for_one_loss_has_no_gradient_there(freeze, fn):
    """As a critic is for the loss of the actor, and a discriminator for that of the generator."""
    params = {"actor": X.mT @ X[:, :2], "critic": X[:, 1:3]}

    def losses(params):
        critic = params["critic"]
        freeze([critic], False)
        actor = (X @ params["actor"] @ critic).sum()
        freeze([critic], True)
        return {"actor": actor, "critic": (X[:, 2:] @ critic).square().sum()}

    check_frozen(fn, losses, params, ())


@pytest.mark.filterwarnings("ignore::functional_jd.SlowPathWarning")
@pytest.mark.parametrize("fn", [fj.gramian_fn, fj.squared_norms_fn])
@pytest.mark.parametrize("freeze", FREEZES)
def test_a_parameter_that_is_frozen_for_a_part_of_an_examples_loss_has_no_gradient_there(freeze, fn):
    params = {"actor": X.mT @ X[:, :2], "critic": X[:, 1:3]}

    def loss(params, x):
        critic = params["critic"]
        freeze([critic], False)
        actor = (x @ params["actor"] @ critic).sum()
        freeze([critic], True)
        return actor + (x[:2] @ critic).square().sum()

    check_frozen(fn, fj.per_example(loss), params, (X,))


def check_frozen(fn, losses, params, batch):
    products, _, pullback = fn(losses)(params, *batch)
    points = {name: p.clone().requires_grad_() for name, p in params.items()}
    values = [losses.loss(points, x) for x in batch[0]] if batch else list(losses(points).values())
    rows = [torch.autograd.grad(y, list(points.values()), retain_graph=True, materialize_grads=True) for y in values]
    rows = torch.stack([torch.cat([g.flatten() for g in row]) for row in rows])
    expected = rows @ rows.T
    torch.testing.assert_close(products, expected if fn is fj.gramian_fn else expected.diagonal())
    found = pullback(torch.ones(2))[0]
    torch.testing.assert_close(torch.cat([found[name].flatten() for name in params]), rows.sum(0))
