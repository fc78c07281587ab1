"""Layers that are recorded, and parameters whose rows come from autograd, against rows of plain autograd."""

from functools import cache, partial

import pytest
import torch
from bounds import check_within, eps
from gramian_by_hand import agree, both_prices, check_autocast, expectation, found, is_tapped, model_of, priced, single
from jacobian_by_hand import KINDS, leaves, rows_of
from torch import nn
from torch.utils import _pytree
from zoo import BATCH, MODELS, MORE, WIDTH, numbers

import functional_jd as fj
from functional_jd import gramian_fn, jacobian_fn
from functional_jd.engines.gramian import assemble
from functional_jd.engines.gramian.recorder import LayerRecorder, Recording
from functional_jd.engines.kinds import examples, multitask, plain

F = nn.functional

pytestmark = pytest.mark.filterwarnings("ignore:There is a performance drop:UserWarning")

ATTENTION = ["attention", "fused_attention", "encoder_norm_first"]
IN_HALF = ["layer_norm", "batch_norm_no_statistics", "mlp", "tied", "reused", "conv2d", "embedding", "encoder"]
OTHERS = [*IN_HALF, "prelu", "packed", "decoder", "deep", "conv1d", "conv_transpose", "conv_grouped", "lstm"]


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


@pytest.mark.parametrize(("name", "kind"), pairs(*ATTENTION, *OTHERS))
def test_float32_is_right_to_rounding(name, kind, monkeypatch):
    case = case_of(name, kind)
    expected = expectation(case)
    for lean in (True, False):
        priced(monkeypatch, lean)
        agree(found(single(case)), expected, torch.float32, 240)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.bfloat16, 0.1), (torch.float16, 0.02)], ids=str)
@pytest.mark.parametrize(("name", "kind"), pairs(*ATTENTION, "cross_attention", *IN_HALF))
def test_autocast_is_right_to_its_precision_and_changes_no_value(name, dtype, tolerance, kind, monkeypatch):
    case = check_autocast((MODELS | MORE)[name](), kind, dtype, tolerance, monkeypatch)
    assert unrecorded(monkeypatch, case) == unrecorded(monkeypatch, single(case_of(name, kind)))
    values = gramian_fn(case.losses)(case.params, *case.args)[1]
    for x, y in zip(leaves(values), leaves(jacobian_fn(case.losses)(case.params, *case.args)[1]), strict=True):
        torch.testing.assert_close(x, y, rtol=tolerance / 4, atol=tolerance / 4)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ATTENTION)
def test_projections_of_attention_are_tapped_everywhere(name, kind, monkeypatch):
    direct, _ = unrecorded(monkeypatch, case_of(name, kind))
    assert all(len(shape) == 1 for shape in direct)  # scales and shifts, which autograd sums up as fast


def test_weights_of_attention_come_out_of_it_in_the_dtype_of_cuda():
    attention = nn.MultiheadAttention(4, 2, batch_first=True)
    params = {name: p.detach() for name, p in attention.named_parameters()}

    @partial(fj.autocast, dtype=torch.bfloat16)
    def losses(params, x):
        y, weights = torch.func.functional_call(attention, params, (x, x, x))
        return y.float().mean((0, 1)), weights

    x = numbers(BATCH, 3, 4, dtype=torch.float32)
    found = [f(losses, has_aux=True)(params, x)[1][1] for f in (gramian_fn, jacobian_fn)]
    assert torch.equal(*found)
    assert found[0].dtype == torch.float32  # as softmax is


def view_without_graph(params, x):
    with torch.no_grad():
        weight, shift = params["w"].mT, params["v"][0]
    return x @ weight + shift + F.linear(x, params["w"][0:3], params["v"][1])


STRANGE = {
    "a view without a graph": view_without_graph,
    "by index": lambda p, x: (
        F.linear(x, p["w"][torch.tensor([2, 0, 0])]) * p["v"][0, ::2].sum() + p["v"][1].expand(1, 3)
    ),
    "both are leaves": lambda p, x: x @ (p["w"] * p["v"] + p["w"]) - p["w"][0] * p["w"][0],
}


@both_prices
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("predict", STRANGE.values(), ids=STRANGE)
def test_uses_that_no_tap_may_take_alone_count(predict, kind, lean, monkeypatch):
    priced(monkeypatch, lean)
    case = KINDS[kind](model_of(predict))
    is_tapped(monkeypatch, case)
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


X = torch.arange(1.0, 9.0, dtype=torch.float64).reshape(2, 4).sin()


def hooked(w, where):
    used = w.t().mT if where == "view" else w
    if where in ("parameter", "view") and used.requires_grad:
        used.register_hook(lambda g: 3 * g)
    h = X @ used
    if where == "before" and h.grad_fn is not None:
        h.grad_fn.register_prehook(lambda gradients: tuple(3 * g for g in gradients))
    if where == "after" and h.grad_fn is not None:
        h.grad_fn.register_hook(lambda gradients, _: tuple(g if g is None else 3 * g for g in gradients))
    return h


@pytest.mark.parametrize("where", ["parameter", "view", "before", "after"])
def test_hooks_beside_recorded_layers_act(where):
    """The row of `sum(c h)` is `3 X' c`, whatever the way."""
    c = torch.stack([X[:, :2].cos(), X[:, 2:]])
    losses = lambda params: (hooked(params["w"], where) * c).sum((1, 2))
    with pytest.warns(fj.SlowPathWarning, match="hook"):
        gramian, _, pullback = fj.gramian_fn(losses)({"w": torch.ones(4, 2, dtype=torch.float64)})
    rows, terms = 3 * (X.mT @ c).flatten(1), 3 * (X.abs().mT @ c.abs()).flatten(1)
    # Two products of a row, four of an inner product, and as many sums.
    check_within(gramian, rows @ rows.T, 32 * eps() * terms @ terms.T)
    check_within(pullback(torch.ones(2))[0]["w"].flatten(), rows.sum(0), 32 * eps() * terms.sum(0))


@pytest.mark.parametrize("shape", [(1,), (3, 2), ()])
def test_a_bias_that_torch_broadcasts_is_not_recorded(shape):
    params = {"w": torch.ones(2, 4, dtype=torch.float64), "b": torch.ones(shape, dtype=torch.float64)}
    x = torch.cat([X, X[:1]])
    losses = lambda params: torch.nn.functional.linear(x, params["w"], params["b"]).flatten()
    gramian, _, _ = fj.gramian_fn(losses)(params)
    rows = fj.jacobian_fn(losses, mode="loop")(params)[0]
    flat = torch.cat([row.reshape(len(row), -1) for row in rows.values()], 1)
    check_within(gramian, flat @ flat.T, 16 * eps() * flat.abs() @ flat.abs().T)


FREEZES = (lambda x, wanted: setattr(x, "requires_grad", wanted), torch.Tensor.requires_grad_)


@pytest.mark.parametrize("fn", [fj.jacobian_fn, fj.gramian_fn, fj.squared_norms_fn, fj.weighted_fn])
@pytest.mark.parametrize("freeze", FREEZES)
@pytest.mark.parametrize(("by_example", "for_good"), [(False, False), (False, True), (True, False)])
def test_a_parameter_that_is_frozen_for_a_part_of_the_losses_has_no_gradient_there(by_example, for_good, freeze, fn):
    """As a critic is for the loss of the actor; and a discriminator stays for the generator, until its turn comes."""
    params = {"actor": X.mT @ X[:, :2], "critic": X[:, 1:3]}

    def parts(params, x, detached=False):
        critic, frozen = params["critic"], params["critic"].detach()
        own = (x[..., 2:] @ critic).square().sum()
        if not detached:
            freeze(critic, False)
        actor = (x @ params["actor"] @ (frozen if detached else critic)).sum()
        if not (detached or for_good):
            freeze(critic, True)
        return [actor, own if for_good else own + (x[..., :2] @ critic).sum()]

    loss = lambda params, x, detached=False: sum(parts(params, x, detached))
    plain = lambda params, x: [loss(params, each, True) for each in x] if by_example else parts(params, x, True)
    rows = torch.cat([leaf.flatten(1) for leaf in rows_of(plain, params, X)], 1)
    products = {fj.gramian_fn: [rows @ rows.T], fj.squared_norms_fn: [rows.square().sum(1)], fj.weighted_fn: []}
    found = fn(fj.per_example(loss) if by_example else parts)(params, X)
    if fn is fj.jacobian_fn:
        torch.testing.assert_close(torch.cat([leaf.flatten(1) for leaf in found[0].values()], 1), rows)
    else:
        torch.testing.assert_close(list(found[:-2]), products[fn])
        direction = found[-1](torch.ones(2))[0]
        torch.testing.assert_close(torch.cat([direction[name].flatten() for name in params]), rows.sum(0))
