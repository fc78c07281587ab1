"""Steps that are skipped again and again name their losses, and those that a rule cannot take."""

from contextlib import nullcontext
from functools import partial
from itertools import product

import pytest
import torch
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

import functional_jd as jd

X = torch.tensor([[0.5, -1.0, 0.3], [2.0, 0.2, 1.0], [-0.4, 0.1, 0.6], [1.0, 1.0, -0.7]])
W = torch.tensor([[0.1, -0.3], [0.2, 0.5], [-0.4, 0.7]])
NAMES = "abcd"


def hidden(params, x):
    return torch.tanh(x @ params["w"])


def named(params, x, poison):
    total = hidden(params, x).sum()
    return {name: total * (1 + i + poison[i]) for i, name in enumerate(NAMES)}


def heads(own, features, x, poison):
    return {name: (features @ own[name]).sum() * (1 + poison[i]) for i, name in enumerate(NAMES)}


def counted(params, buffers, x, poison):
    return named(params, x, poison), {"count": buffers["count"] + 1 + poison.sum()}


KINDS = {
    "named": (named, {"w": W}),
    "joined": (lambda p, x, poison: hidden(p, x).sum(1) + hidden(p, x).sum() * poison, {"w": W}),
    "per_example": (jd.per_example(lambda p, x, poison: hidden(p, x).square().sum() * (1 + poison)), {"w": W}),
    "buffers": (counted, {"w": W}),
    "multitask": (
        jd.multitask(lambda shared, x, _: hidden(shared, x), heads),
        {"shared": {"w": W}, "heads": {name: torch.ones(2) for name in NAMES}},
    ),
}
RULES = {"upgrad": jd.upgrad(), "config": jd.config(), "mean": jd.mean(), "constant": jd.constant([1.0] * 4)}
RULES |= {"softadapt": jd.aggregators.softadapt()}  # one loss makes NaN of all its weights


FORMS = {
    "eager": lambda take: take,
    "by operators": lambda take: jd.compiled(take, backend="eager"),
    "by torch.compile": lambda take: torch.compile(take, backend="eager", fullgraph=True),
}


KNOWN = {(kind, rule) for kind in KINDS for rule in ("upgrad", "config")} | {("multitask", "mean")}
KNOWN |= {("multitask", "constant")}
"""Where rows are known, or heads: a pass that all losses share flags all of them, as below."""
TRACED = {*zip(KINDS, ("upgrad", "config", "constant", "softadapt", "mean"), strict=True)}
TRACED |= {("per_example", "upgrad"), ("buffers", "config")}
"""By torch.compile, which takes seconds: each kind and rule once, and each kind with a rule of `KNOWN`."""
CASES = [case for case in product(KINDS, RULES, FORMS) if case[2] != "by torch.compile" or case[:2] in TRACED]


@pytest.mark.parametrize(("kind", "rule", "form"), CASES)
def test_such_a_loss_is_flagged_alone_and_a_scale_that_is_too_high_backs_off_alone(kind, rule, form):
    losses, params = KINDS[kind]
    scale = jd.scale_state(2.0**10, shape=(4,), growth_interval=1)
    engines = ("auto", "jacobian", "gramian" if rule in ("upgrad", "config") else "weighted")
    for engine in engines if form == "eager" else ("auto",):
        torch.compiler.reset()
        how = {"losses": losses, "aggregator": RULES[rule], "optimizer": jd.adamw(0.1), "engine": engine}
        buffers = {"count": torch.zeros(())} if kind == "buffers" else ()
        begun = jd.train_state(params, X, torch.zeros(4), scale=scale, buffers=buffers, **how)
        take = FORMS[form](partial(jd.step, **how))
        state, info = take(begun, X, torch.zeros(4))
        assert info.moved
        for bad in (torch.nan, torch.inf):
            after, info = take(state, X, torch.tensor([0.0, 0.0, bad, 0.0]))
            assert info.finite.tolist() == [True, True, False, True]
            torch.testing.assert_close(after, state, rtol=0, atol=0)
        if (kind, rule) in KNOWN:
            high = jd.scale_state(shape=(4,))._replace(scale=torch.tensor([4.0, 2.0**127, 4.0, 4.0]))
            after, info = take(begun._replace(scale=high), X, torch.tensor([0.0, 100.0, 0.0, 0.0]))
            assert info.finite.tolist() == [True, False, True, True]
            assert after.scale.scale.tolist() == [4.0, 2.0**126, 4.0, 4.0]
            assert after.scale.growth_tracker.tolist() == [1, 0, 1, 1]
            torch.testing.assert_close(after[:4], begun[:4], rtol=0, atol=0)


@pytest.mark.parametrize("shape", [(), (4,)])
@pytest.mark.parametrize("kind", ["named", "multitask", "per_example"])
def test_a_gradient_whose_owner_is_not_known_is_flagged_for_all(kind, shape):
    """The trunk overflows, by which of the losses one pass cannot tell."""
    losses, params = KINDS[kind]
    how = {"losses": losses, "aggregator": jd.mean(), "optimizer": jd.sgd(0.1)}
    state = jd.train_state(params, X, torch.zeros(4), scale=jd.scale_state(2.0**127, shape=shape), **how)
    after, info = jd.step(state, X * 1e3, torch.full((4,), 10.0), **how)
    assert info.finite.shape == shape
    assert not info.finite.any()
    assert (after.scale.scale == 2.0**126).all()
    torch.testing.assert_close(after[:4], state[:4], rtol=0, atol=0)


@pytest.mark.parametrize("kind", ["named", "joined", "per_example", "multitask"])
def test_a_scale_for_each_loss_multiplies_no_work_of_rules_that_need_no_gradients(kind):
    losses, params = KINDS[kind]
    wide, x = {"w": torch.ones(64, 2)}, torch.ones(4, 64)
    params = wide if kind != "multitask" else params | {"shared": wide}
    how = {"losses": losses, "aggregator": jd.mean(), "optimizer": jd.sgd(0.1)}
    work = []
    for shape in ((), (4,)):
        state = jd.train_state(params, x, torch.zeros(4), scale=jd.scale_state(shape=shape), **how)
        with FlopCounterMode(display=False) as counter:
            jd.step(state, x, torch.zeros(4), **how)
        work.append(counter.get_total_flops())
    assert work[1] <= 1.25 * work[0]


PICKY = {rule.__name__: (rule(), "positive") for rule in (jd.famo, jd.geometric_mean, jd.gradnorm)}
PICKY |= {rule.__name__: (rule(), "not negative") for rule in (jd.db_mtl, jd.moco, jd.uw, jd.imtl_l)}
PICKY |= {"epo": (jd.epo([0.5, 0.5]), "not negative")}


def shifted(p, shift):
    return {"a": (p - 1).square().sum() + 1, "b": (p + 1).square().sum() + shift}


@pytest.mark.parametrize("name", PICKY)
def test_a_negative_loss_is_named_where_training_starts_and_later_blames_no_derivative(name):
    rule, expected = PICKY[name]
    how = {"losses": shifted, "optimizer": jd.sgd(0.01)}
    message = rf"train_state: losses must be .*{expected}.* for {name}, found -2[01] in 'b'"
    for own in (rule, *((jd.cr_mogm(rule), jd.held(rule)[0]) if name == "famo" else ())):
        with pytest.raises(ValueError, match=message):
            jd.train_state(torch.zeros(1), torch.tensor(-21.0), aggregator=own, **how)
    by_group = {"losses": lambda p: shifted(p["w"], -21.0), "optimizer": jd.sgd(1)}
    with pytest.raises(ValueError, match=message):
        jd.train_state({"w": torch.zeros(1)}, aggregator=jd.grouped({"w": rule}), **by_group)
    how["aggregator"] = rule
    remembered = pytest.raises(ValueError, match="the loss 'b' must be finite for a rule that remembers it, found nan")
    with remembered if name in ("famo", "gradnorm") else nullcontext():  # of others a first step tells
        jd.train_state(torch.zeros(1), torch.tensor(torch.nan), **how)
    # A later skip is the rule's, and no derivative is blamed.
    state = jd.train_state(torch.zeros(1), torch.tensor(1.0), **how)
    once, _ = jd.step(state, torch.tensor(1.0), **how)
    for engine in ("auto", "jacobian"):
        after, info = jd.step(once, torch.tensor(-21.0), engine=engine, **how)
        assert not (info.moved | info.finite).any()
        assert any(x.isnan().any() for x in tree_leaves(info.weights))
        torch.testing.assert_close(after, once, rtol=0, atol=0)
    with pytest.raises(jd.TrainingStalled, match=r"weights of the rule were not, for the losses 2, -20\.") as told:
        jd.fit(partial(jd.step, **how), state, [(torch.tensor(-21.0),)] * 5, patience=3)
    assert "where" not in str(told.value)


def test_derivatives_are_blamed_where_they_are_to_blame():
    broken = lambda p, x: {"a": p.square().sum(), "b": (p * 0).sqrt().sum() + 1}
    how = {"losses": broken, "aggregator": jd.upgrad(), "optimizer": jd.sgd(0.01)}
    state = jd.train_state(torch.ones(1), torch.tensor(1.0), **how)
    with pytest.raises(jd.TrainingStalled, match="derivatives were not"):
        jd.fit(partial(jd.step, **how), state, [(torch.tensor(1.0),)] * 5, patience=3)


@pytest.mark.parametrize("shape", [None, (), 2])
def test_a_direction_that_alone_is_not_finite_skips_the_step_and_moves_no_scale(shape):
    """Each row is below the largest float32, and their sum is not."""
    losses = lambda p: {"a": 3e38 * p.sum(), "b": 2e38 * p.sum()}
    how = {"losses": losses, "aggregator": jd.constant(torch.ones(2)), "optimizer": jd.sgd(0.01), "engine": "jacobian"}
    scale = {} if shape is None else {"scale": jd.scale_state(2.0**-10, shape=shape)}
    state = jd.train_state(torch.zeros(1), **how, **scale)
    after, info = jd.step(state, **how)
    assert not info.moved
    assert not info.finite.any()
    assert torch.equal(after.scale.scale, state.scale.scale)
    with pytest.raises(jd.TrainingStalled, match=r"diagnose\(jacobian\) names the row, or none if only the sum"):
        jd.fit(partial(jd.step, **how), state, [()] * 5, patience=3)
    assert jd.diagnostics.diagnose(jd.jacobian_fn(losses)(state.params)[0]).norms.isfinite().all()
