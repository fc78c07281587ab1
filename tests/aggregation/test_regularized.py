"""A rule for some objectives and fixed weights for the others, next to the rule on its own rows."""

from collections import OrderedDict
from functools import partial

import pytest
import torch
from bounds import check_within, eps
from hypothesis import given
from hypothesis import strategies as st
from rule_table import RULES, rule_of
from torch.utils._pytree import tree_leaves

import functional_jd as jd

NAMES = [name for name in RULES if name not in {"krum", "grouped", "modo", "sdmgrad"}]
LOSSES = {"a": torch.tensor(1.0), "kl": torch.tensor(0.01), "price": torch.tensor([2.0, 0.5])}  # a, kl, two of price
OWN = {"a": LOSSES["a"], "price": LOSSES["price"]}


def rows(seed=0):
    return {"w": torch.randn(4, 6, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)}


def without(J):
    return {"w": J["w"][[0, 2, 3]]}


@pytest.mark.parametrize("name", NAMES)
def test_the_rule_receives_the_other_objectives_alone(name):
    rule, J = rule_of(name), rows()
    expected = jd.aggregate(rule, without(J), losses=OWN)
    found = jd.aggregate(jd.regularized(rule, {"kl": 0.25}), J, losses=LOSSES)
    if isinstance(expected.weights, torch.Tensor):
        torch.testing.assert_close(found.weights[[0, 2, 3]], expected.weights, rtol=0, atol=0)
        assert found.weights[1] == 0.25
    torch.testing.assert_close(found.state, expected.state, rtol=0, atol=0)
    torch.testing.assert_close(found.direction["w"], expected.direction["w"] + 0.25 * J["w"][1])
    again = jd.aggregate(jd.regularized(rule, {"kl": 0.25}), rows(1), found.state, losses=LOSSES)
    torch.testing.assert_close(again.state, jd.aggregate(rule, without(rows(1)), expected.state, losses=OWN).state)


def test_the_rule_knows_the_names_of_the_others():
    J, own = rows(), ("task", "kl", "safety", "fit")  # in order: fit, kl, safety, task
    losses = {name: torch.tensor(float(k)) for k, name in enumerate(own)}
    for name in ("task", "safety", "fit"):
        protect = partial(jd.aggregators.protect, jd.total())
        place = sorted(set(own) - {"kl"}).index(name)
        found, expected = (jd.regularized(protect(x), {"kl": 0.1}) for x in (name, place))
        weights = jd.aggregate(found, J, losses=losses).weights
        assert torch.equal(weights, jd.aggregate(expected, J, losses=losses).weights)
    ordered = OrderedDict(zip("zam", torch.arange(1.0, 4).unbind(), strict=True))
    values = jd.regularized(jd.stateless(jd.views.losses, lambda values: values), {"z": 0.5})
    assert jd.aggregate(values, {"w": J["w"][:3]}, losses=ordered).weights.tolist() == [0.5, 2, 3]


@given(st.floats(-4, 4), st.floats(-4, 4), st.sampled_from(["upgrad", "config", "mean", "uw"]))
def test_the_direction_is_linear_in_the_fixed_weights(one, other, name):
    J, rule = rows(), rule_of(name)
    direction = lambda x, y: jd.aggregate(jd.regularized(rule, {"kl": x, "a": y}), J, losses=LOSSES).direction["w"]
    expected = direction(0.0, 0.0) + one * J["w"][1] + other * J["w"][0]
    check_within(direction(one, other), expected, 64 * eps() * (1 + abs(one) + abs(other)) * J["w"].abs().sum(0))


def heads(own, h, x, y):
    fit, near = h @ own["fit"] - y, h @ own["near"]
    return {"fit": fit.square().mean(), "kl": h.square().mean(), "near": near.abs().mean()}


SHARED, HEADS = {"w": torch.full((3, 2), 0.5)}, {"fit": torch.ones(2), "near": torch.ones(2)}
X, Y = torch.linspace(-1, 1, 12).reshape(4, 3), torch.ones(4)
PLAIN = lambda shared, x, y: heads(HEADS, torch.tanh(x @ shared["w"]), x, y)
TASKS = jd.multitask(lambda shared, x, y: torch.tanh(x @ shared["w"]), heads)


def check_single(found, expected):
    """To roundings of float32, in which losses and rows are computed."""
    check_within(found, expected, 2**7 * eps(torch.float32) * (expected.abs().max() + 1))


@pytest.mark.parametrize("name", ["upgrad", "mean", "config", "uw", "gradnorm"])
@pytest.mark.parametrize("scale", [None, jd.scale_state(), jd.scale_state(shape=3)])
def test_all_ways_to_train_take_it(name, scale):
    rule = jd.regularized(rule_of(name), {"kl": 0.1})
    J, values = jd.jacobian_fn(PLAIN)(SHARED, X, Y)
    expected = jd.aggregate(rule, J, losses=values)
    for losses, params in ((PLAIN, SHARED), (TASKS, {"shared": SHARED, "heads": HEADS})):
        how = {"losses": losses, "aggregator": rule, "optimizer": jd.sgd(1.0)}
        state = jd.train_state(params, X, Y, scale=scale, **how)
        new, info = jd.step(state, X, Y, **how)
        check_single(info.weights, expected.weights)
        moved = SHARED["w"] - (new.params if losses is PLAIN else new.params["shared"])["w"]
        check_single(moved, expected.direction["w"])
    w = SHARED["w"].clone().requires_grad_()
    weights = jd.weigh(PLAIN({"w": w}, X, Y), [w], rule, scale=scale).weights
    check_single(weights, expected.weights)
    found = jd.weights_fn(PLAIN, rule)(SHARED, X, Y).weights
    check_single(found, expected.weights)
    found = jd.accumulate(PLAIN, [(X, Y)], params=SHARED, aggregator=rule, scale=scale)
    check_single(found.weights, expected.weights)


def test_transforms():
    J = rows()
    weights = lambda x: jd.aggregate(jd.regularized(jd.upgrad(), {"kl": x}), J, losses=LOSSES).weights
    x = torch.tensor([0.1, 0.2], dtype=torch.float64)
    torch.testing.assert_close(torch.vmap(weights)(x), torch.stack([weights(y) for y in x]))
    assert torch.equal(torch.func.jacrev(weights)(x[0]), torch.eye(4, dtype=torch.float64)[1])
    one = torch.compile(weights, backend="eager", fullgraph=True)(x[0])
    torch.testing.assert_close(one, weights(x[0]))


def test_what_is_refused():
    J = rows()
    by_groups, every = jd.grouped({"w": jd.mean()}), dict.fromkeys(["a", "kl", "price[0]", "price[1]"], 1.0)
    for fixed, rule, losses, kind, words in (
        ({"kl": "much"}, jd.mean(), LOSSES, TypeError, r"fixed\['kl'\] must be a number"),
        ({"kl": torch.inf}, jd.mean(), LOSSES, ValueError, r"fixed\['kl'\] must be finite"),
        ({"w": 1.0}, by_groups, LOSSES, ValueError, "a rule by groups"),
        ({"k": 0.1}, jd.mean(), LOSSES, ValueError, r"names of \['a', 'kl', 'price\[0\]'.* found 'k'"),
        (every, jd.mean(), LOSSES, ValueError, "fewer than the 4 objectives"),
        ({"kl": 0.1}, jd.mean(), None, ValueError, "expected at least one loss, found none"),
    ):
        with pytest.raises(kind, match=words):
            jd.aggregate(jd.regularized(rule, fixed), J, losses=losses)


AMONG = {
    "regularized": lambda rule: jd.regularized(rule, {"kl": 0.1}),
    "grouped": lambda rule: jd.grouped({"w": rule}, {"w": [0, 1]}),
    "held": lambda rule: jd.grouped({"w": jd.held(rule)[0]}, {"w": [0, 1]}),
    "averaged": lambda rule: jd.cr_mogm(jd.grouped({"w": rule}, {"w": [0, 1]}), 0.5),
}


@pytest.mark.parametrize("rule", [jd.uw, jd.imtl_l, jd.dwa, jd.gradnorm])
@pytest.mark.parametrize("among", AMONG)
def test_what_a_rule_remembers_of_an_absent_objective_stays(rule, among):
    """A rule that receives some of the objectives has a memory of their number, not of all."""

    def losses(p, present):
        a, b = (p["w"] - 1).square().sum() * present, (p["w"] + 2).square().sum() + 1
        return {"a": a, "b": b, "kl": p["w"].square().sum()}

    how = {"losses": losses, "aggregator": AMONG[among](rule()), "optimizer": jd.sgd(1e-3)}
    one, zero = torch.tensor(1.0), torch.tensor(0.0)
    state = jd.train_state({"w": torch.full((3,), 0.3)}, one, **how)
    for _ in range(3):
        state, _ = jd.step(state, one, **how)
    after, info = jd.step(state, zero, **how)
    assert info.moved
    pairs = list(zip(tree_leaves(state.aggregator), tree_leaves(after.aggregator), strict=True))
    own = [(old, new) for old, new in pairs if old.shape == (2,) and old.is_floating_point()]
    assert own
    assert all(torch.equal(old[0], new[0]) for old, new in own)
    assert any(not torch.equal(old[1], new[1]) for old, new in own)


@pytest.mark.parametrize("among", ["regularized", "grouped"])
def test_the_domain_of_a_rule_is_that_of_the_losses_it_receives(among):
    losses = lambda p, a, kl: {"a": p["w"].square().sum() + a, "b": p["w"].exp().sum(), "kl": p["w"].sum() + kl}
    how = {"losses": losses, "aggregator": AMONG[among](jd.famo()), "optimizer": jd.sgd(1e-3)}
    start = lambda a, kl: jd.train_state({"w": torch.ones(2)}, torch.tensor(a), torch.tensor(kl), **how)
    state, batch = start(1.0, -9.0), (torch.tensor(1.0), torch.tensor(-9.0))
    assert jd.step(state, *batch, **how)[1].moved
    with pytest.raises(ValueError, match="losses must be positive and finite for famo, found -7 in 'a'"):
        start(-9.0, 1.0)
