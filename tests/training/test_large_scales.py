"""Loss scales up to the end of float32's range: weights are divided by them, and no entry of the direction is lost."""

from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.func import grad, jvp, vmap

import functional_jd as jd
from functional_jd.precision.loss_scale import divided

X = torch.tensor([[3.0, 0, 0, -1], [0, 5, 0, 2], [0, 0, 7, 4]])  # each row has an entry of its own
PARAMS = {"w": torch.ones(1, 4)}
NO_OPTIMIZER = jd.Optimizer(lambda params: (), lambda direction, state, params: (direction, state))


def plain(params, x):
    return {str(i): torch.nn.functional.linear(row, params["w"])[0] for i, row in enumerate(x)}


TASKS = jd.multitask(lambda params, x: x @ params["w"].mT, lambda own, h, x: [f[0] * own["c"] for f in h])
KINDS = {
    "plain": (plain, PARAMS),
    "per_example": (jd.per_example(lambda params, x: torch.nn.functional.linear(x, params["w"])[0]), PARAMS),
    "multitask": (TASKS, {"shared": PARAMS, "heads": {"c": torch.ones(())}}),
}


def trunk_of(direction):
    return direction.get("shared", direction)["w"][0]


def by_pullback(kind, scale, weights):
    losses, params = KINDS[kind]
    return trunk_of(jd.gramian_fn(losses, scale=scale)(params, X)[2](weights)[0])


def by_step(kind, engine, scale, weights):
    losses, params = KINDS[kind]
    rule = jd.stateless(jd.views.gramian, lambda _: weights)
    state = jd.TrainState(params, (), (), (), scale)
    how = {"losses": losses, "aggregator": rule, "optimizer": NO_OPTIMIZER, "engine": engine}
    after, info = jd.step(state, X, **how)
    assert info.finite.all()
    assert info.moved
    return trunk_of(after.params)


def by_weights(kind, scale, weights):
    losses, params = KINDS[kind]
    return trunk_of(jd.weighted_fn(losses, scale=scale)(params, X)[1](weights)[0])


WAYS = {engine: partial(by_step, engine=engine) for engine in ("jacobian", "gramian")} | {"pullback": by_pullback}


def assert_direction(found, weights):
    """The sum of the rows, up to the roundings of m products and sums in float32."""
    terms = weights[:, None] * X.double()
    bound = (len(X) + 2) * torch.finfo(torch.float32).eps * terms.abs().sum(0)
    assert ((found.double() - terms.sum(0)).abs() <= bound).all(), found


weights_of_rows = st.lists(st.floats(2.0**-24, 2.0**10, width=32), min_size=3, max_size=3)
scales = st.integers(0, 124) | st.tuples(st.lists(st.integers(0, 60), min_size=3, max_size=3), st.integers(0, 64))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("way", WAYS)
@settings(max_examples=40)
@given(scales, weights_of_rows)
def test_one_scale_of_any_size_and_one_per_objective(way, kind, exponents, weights):
    weights = torch.tensor(weights, dtype=torch.float64)
    one = isinstance(exponents, int)
    exponents = torch.tensor(exponents if one else [exponents[1] + each for each in exponents[0]])
    scale = jd.scale_state(shape=exponents.shape)._replace(scale=torch.exp2(exponents.float()))
    assert_direction(WAYS[way](kind, scale=scale, weights=weights), weights)


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=20)
@given(st.integers(0, 112), weights_of_rows)
def test_one_scale_of_one_pass_whose_cotangent_the_weights_are_part_of(kind, exponent, weights):
    weights = torch.tensor(weights, dtype=torch.float64)
    assert_direction(by_weights(kind, jd.scale_state(2.0**exponent), weights), weights)


@pytest.mark.parametrize("way", WAYS)
def test_sums_of_scaled_rows_do_not_overflow(way):
    rows = 2.0**127 / 8  # 4 and 7 of these add up beyond float32's range, and so does their first weighted sum
    weights = torch.tensor([-8.0, 8.0, 8.0], dtype=torch.float64)
    assert_direction(WAYS[way]("plain", scale=jd.scale_state(rows), weights=weights), weights)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_one_scale_that_is_no_power_of_two_costs_a_rounding(dtype):
    rows = {"w": torch.rand(50, dtype=dtype), "b": torch.rand(3, dtype=torch.float32)}
    found, _ = divided(torch.tensor(3000.0), {name: 3000 * row for name, row in rows.items()})
    for name, row in rows.items():
        assert ((found[name] - row).abs() <= 4 * torch.finfo(row.dtype).eps * row).all()


@pytest.mark.filterwarnings("ignore:train_state")
@pytest.mark.parametrize("optimizer", [jd.sgd(1.0), jd.adamw(1.0), jd.from_torch(torch.optim.SGD, lr=1.0)])
@pytest.mark.parametrize("rule", [jd.mean(), jd.upgrad()])
def test_a_step_beyond_the_range_of_float16_parameters_is_skipped(rule, optimizer):
    how = {"losses": lambda p, c: p.float().sum() * c * torch.ones(2), "aggregator": rule, "optimizer": optimizer}
    begin, scale = torch.ones(3, dtype=torch.float16), jd.scale_state(2.0**-4)
    state = jd.train_state(begin, torch.tensor(1.0), scale=scale, **how)
    for run in (jd.step, jd.compiled(jd.step, backend="eager")):
        after, info = partial(run, **how)(state, torch.tensor(1.5e5))
        assert not info.moved
        torch.testing.assert_close(after.params, state.params, rtol=0, atol=0)
        after, info = partial(run, **how)(state, torch.tensor(1.0))
        assert info.moved
        assert (after.params < state.params).all()
    with pytest.raises(jd.TrainingStalled, match="parameters in float16 would overflow"):
        jd.fit(partial(jd.step, **how), state, [(torch.tensor(1.5e5),)] * 4, patience=3)


@pytest.mark.parametrize("kind", KINDS)
def test_transforms(kind):
    weights = torch.tensor([1.0, 1e-4, 1e-7], dtype=torch.float64)
    scale = jd.scale_state(2.0**122)
    f = lambda weights: by_pullback(kind, scale, weights)
    batch = torch.stack([weights, weights.flip(0)])
    for found, given_weights in zip(vmap(f)(batch), batch, strict=True):
        assert_direction(found, given_weights)
    assert_direction(jvp(f, (weights,), (weights.flip(0),))[1], weights.flip(0))  # it is linear
    sums = grad(lambda weights: f(weights).sum())(weights)
    assert torch.allclose(sums, X.double().sum(1), rtol=8 * torch.finfo(torch.float32).eps, atol=0)
    torch.compiler.reset()
    compiled = torch.compile(f, backend="aot_eager", fullgraph=True)
    assert_direction(compiled(weights), weights)
