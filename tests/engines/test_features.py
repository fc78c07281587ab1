"""The features engine: the Gramian of the rows by feature, and one pass of their weighted sum through the trunk."""

from functools import partial

import pytest
import torch
from bounds import eps
from hypothesis import given
from hypothesis import strategies as st
from jacobian_by_hand import rows_of
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map
from two_tasks import same
from zoo import numbers

import functional_jd as fj

AGREE = {"rtol": 2**10 * eps(), "atol": 2**10 * eps()}
ENGINE = fj.engines.features_engine()


def several_features(seed=0):
    """A trunk with two features, of which each of three heads uses some, and one none."""
    draw = torch.Generator().manual_seed(seed)
    p = {
        "shared": {"a": torch.randn(3, 2, generator=draw), "b": torch.randn(3, 4, generator=draw)},
        "heads": {"v": torch.randn(2, generator=draw), "w": torch.randn(4, generator=draw)},
    }
    features = lambda p, x: [x @ p["a"], (x @ p["b"]).tanh()]
    top = lambda p, h, x: [(h[0] @ p["v"]).square().mean(), (h[1] @ p["w"] + h[0].sum(1)).mean(), p["v"].square().sum()]
    x = torch.randn(5, 3, generator=draw).double()
    return tree_map(torch.Tensor.double, p), features, top, (x,)


def weighing(weights):
    return fj.stateless(fj.views.gramian, lambda G: torch.tensor(weights, dtype=torch.float64))


powers = st.integers(-6, 40)
exponents_of_scales = st.lists(powers, min_size=3, max_size=3) | powers | st.none()


@given(st.integers(0, 5), st.lists(st.floats(-4, 4), min_size=3, max_size=3), exponents_of_scales)
def test_the_pullback_is_the_weighted_sum_of_the_trunks_rows_at_any_scale(seed, weights, exponents):
    params, features, top, batch = several_features(seed)
    losses = fj.multitask(features, top)
    scale = None
    if exponents is not None:
        value = 2.0 ** torch.tensor(exponents, dtype=torch.float32)
        scale = fj.scale_state(shape=tuple(value.shape))._replace(scale=value)
    how = {"losses": losses, "aggregator": weighing(weights), "optimizer": fj.sgd(1.0)}
    state = fj.train_state(params, *batch, scale=scale, **how)
    after, info = fj.step(state, *batch, engine=ENGINE, **how)
    rows = fj.jacobian_fn(losses, mode="loop")(params, *batch)[0]
    expected = fj.aggregation.combine(rows, torch.tensor(weights, dtype=torch.float64))
    terms = fj.aggregation.combine(tree_map(torch.abs, rows), torch.tensor(weights, dtype=torch.float64).abs())
    for found, old, direction, size in zip(*map(tree_leaves, (after.params, params, expected, terms)), strict=True):
        assert ((old - direction - found).abs() <= 64 * eps() * (old.abs() + size)).all()
    assert info.moved
    assert info.finite.all()
    z = features(params["shared"], *batch)  # nothing in the last loss depends on it
    J = torch.cat([leaf.flatten(1) for leaf in rows_of(lambda z: top(params["heads"], z, *batch), z)], 1)
    torch.testing.assert_close(info.gramian, J @ J.mT, rtol=2**10 * eps(), atol=0)


def test_a_feature_that_no_loss_uses_may_come_first():
    params, features, _, batch = several_features()
    losses = fj.multitask(features, lambda p, h, x: [(h[1] @ p["w"]).mean(), h[1].square().mean(), p["v"].sum()])
    how = {"losses": losses, "aggregator": weighing([1.0, -2.0, 3.0]), "optimizer": fj.sgd(1.0)}
    with pytest.warns(UserWarning, match="no loss reaches"):
        state = fj.train_state(params, *batch, **how)
    after, _ = fj.step(state, *batch, engine=ENGINE, **how)
    b = params["shared"]["b"].clone().requires_grad_()
    h = (batch[0] @ b).tanh()
    (slope,) = torch.autograd.grad((h @ params["heads"]["w"]).mean() - 2 * h.square().mean(), b)
    torch.testing.assert_close(after.params["shared"]["b"], b.detach() - slope, **AGREE)
    assert torch.equal(after.params["shared"]["a"], params["shared"]["a"])


def test_a_feature_without_a_graph_is_a_constant_of_the_heads():
    params, x, y = {"shared": numbers(3, 2), "heads": numbers(2)}, numbers(4, 3, seed=2), numbers(4, seed=3).sign()
    heads = lambda p, h, y: [nn.functional.soft_margin_loss(h @ p, y), (h @ p).square().mean()]  # by y torch has none
    above = fj.multitask(lambda s, x, y: (torch.tanh(x @ s), y), lambda p, h, x, y: heads(p, *h))
    beside = fj.multitask(lambda s, x, y: torch.tanh(x @ s), lambda p, h, x, y: heads(p, h, y))
    for find in (fj.gramian_fn, fj.weighted_fn, fj.jacobian_fn):
        torch.testing.assert_close(*(find(losses)(params, x, y)[0] for losses in (above, beside)))


@pytest.mark.parametrize("per_row", [False, True])
def test_an_overflow_backs_off_the_scale_that_is_to_blame(per_row):
    params, features, top, batch = several_features()
    params = tree_map(torch.Tensor.float, params)
    half = lambda p, x: [h.half() for h in features(p, x.float())]
    losses = fj.multitask(half, lambda p, h, x: top(p, [each.float() for each in h], x.float()))
    scale = fj.scale_state(2.0**8, shape=(3,) if per_row else ())
    how = {"losses": losses, "aggregator": fj.upgrad(), "optimizer": fj.sgd(0.1), "engine": ENGINE}
    state = fj.train_state(params, *batch, scale=scale, **how)
    assert fj.step(state, *batch, **how)[1].moved
    value = torch.tensor([2.0**8, 2.0**30, 2.0**8]) if per_row else torch.tensor(2.0**30)
    state = state._replace(scale=scale._replace(scale=value))
    after, info = fj.step(state, *batch, **how)
    assert not info.moved
    assert same(after.params, state.params)
    assert info.finite.tolist() == ([True, False, True] if per_row else False)
    assert (after.scale.scale < value).tolist() == ([False, True, False] if per_row else True)


def test_transforms():
    params, features, top, batch = several_features()
    how = {"losses": fj.multitask(features, top), "aggregator": fj.upgrad(), "optimizer": fj.sgd(0.1), "engine": ENGINE}
    start = fj.train_state(params, *batch, **how)
    take = lambda params: fj.step(start._replace(params=params), *batch, **how)[0].params
    expected = take(params)
    stacked = tree_map(lambda x: torch.stack([x, x.flip(0)]), params)
    for i in range(2):
        alone = take(tree_map(lambda x, i=i: x[i], stacked))
        torch.testing.assert_close(tree_map(lambda x, i=i: x[i], torch.vmap(take)(stacked)), alone, **AGREE)
    torch.compiler.reset()
    compiled = torch.compile(partial(fj.step, **how), backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(start, *batch)[0].params, expected, **AGREE)
    size = lambda t: sum(x.square().sum() for x in tree_leaves(take(tree_map(lambda x: t * x, params))))
    t, h = torch.ones((), dtype=torch.float64), 1e-5
    difference = (size(t + h) - size(t - h)) / (2 * h)
    # Truncation h^2 times a third derivative of the size of the function, and its rounding divided by h.
    bound = float(size(t)) * (100 * h**2 + 2**10 * eps() / h)
    assert abs(torch.func.grad(size)(t) - difference) <= bound
    assert abs(torch.func.jvp(size, (t,), (torch.ones_like(t),))[1] - difference) <= bound


def test_what_has_no_features_is_refused():
    params, x = {"w": torch.ones(3)}, torch.ones(3)
    how = {"losses": lambda p, x: p["w"] * x, "optimizer": fj.sgd(0.1), "engine": ENGINE}
    with pytest.raises(ValueError, match=r"^train_state: losses must be made by multitask"):
        fj.train_state(params, x, aggregator=fj.upgrad(), **how)
    params, features, top, batch = several_features()
    how["losses"] = fj.multitask(features, top)
    with pytest.raises(ValueError, match=r"^train_state: engine='features' serves rules that need the Gramian"):
        fj.train_state(params, *batch, aggregator=fj.mean(), **how)


def test_buffers_and_aux_come_back():
    trunk = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)).double()
    apply = fj.functional(trunk)
    params = {"shared": dict(trunk.named_parameters()), "heads": {"w": torch.ones(4, dtype=torch.float64)}}
    features = lambda p, b, x: apply(p, b, x)
    top = lambda p, h, b, x: ([(h @ p["w"]).sum(), h.square().mean()], b, {"h": h})
    how = {"losses": fj.multitask(features, top), "aggregator": fj.upgrad(), "optimizer": fj.sgd(0.1), "has_aux": True}
    x = torch.randn(6, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    state = fj.train_state(params, x, buffers=dict(trunk.named_buffers()), **how)
    found, info = fj.step(state, x, engine=ENGINE, **how)
    expected, other = fj.step(state, x, engine="jacobian", **how)
    torch.testing.assert_close(found.buffers, expected.buffers, **AGREE)
    torch.testing.assert_close(info.aux, other.aux, **AGREE)
    assert int(found.buffers["1.num_batches_tracked"]) == 1
