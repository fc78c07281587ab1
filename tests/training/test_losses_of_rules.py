"""Rules that cannot take the losses: `train_state` names rule, loss and value, and a later skip is the rule's."""

from functools import partial

import pytest
import torch

import functional_jd as jd

RULES = {
    "famo": (jd.famo(), "positive"),
    "geometric_mean": (jd.geometric_mean(), "positive"),
    "gradnorm": (jd.gradnorm(), "positive"),
    "db_mtl": (jd.db_mtl(), "not negative"),
    "moco": (jd.moco(), "not negative"),
}


def losses(p, shift):
    return {"a": (p - 1).square().sum() + 1, "b": (p + 1).square().sum() + shift}


@pytest.mark.parametrize("name", RULES)
def test_a_negative_loss_is_named_where_training_starts(name):
    rule, expected = RULES[name]
    how = {"losses": losses, "optimizer": jd.sgd(0.01)}
    message = rf"train_state: losses must be .*{expected}.* for {name}, found -2[01] in 'b'"
    for own in (rule, *((jd.cr_mogm(rule), jd.held(rule)[0]) if name == "famo" else ())):
        with pytest.raises(ValueError, match=message):
            jd.train_state(torch.zeros(1), torch.tensor(-21.0), aggregator=own, **how)
    by_group = {"losses": lambda p: losses(p["w"], -21.0), "optimizer": jd.sgd(1)}
    with pytest.raises(ValueError, match=message):
        jd.train_state({"w": torch.zeros(1)}, aggregator=jd.grouped({"w": rule}), **by_group)
    jd.train_state(torch.zeros(1), torch.tensor(torch.nan), aggregator=rule, **how)  # of which a first step tells


@pytest.mark.parametrize("name", RULES)
def test_a_later_skip_is_the_rules_and_no_derivative_is_blamed(name):
    how = {"losses": losses, "aggregator": RULES[name][0], "optimizer": jd.sgd(0.01)}
    state = jd.train_state(torch.zeros(1), torch.tensor(1.0), **how)
    _, info = jd.step(state, torch.tensor(-21.0), **how)
    assert not info.moved
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
