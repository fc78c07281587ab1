"""What losses return: None in the place of a loss is refused by name, in every engine and at every depth."""

import collections

import pytest
import torch

import functional_jd as fj

PARAMS, X = {"w": torch.ones(3)}, torch.randn(4, 3, generator=torch.Generator().manual_seed(0))
METHOD = {"aggregator": fj.mean(), "optimizer": fj.sgd(0.1)}
Pair = collections.namedtuple("Pair", "first second")


def loss(params, x):
    return (x @ params["w"]).square().mean()


ENGINES = {
    "jacobian_fn": lambda losses, *given: fj.jacobian_fn(losses)(*given),
    "gramian_fn": lambda losses, *given: fj.gramian_fn(losses)(*given),
    "squared_norms_fn": lambda losses, *given: fj.squared_norms_fn(losses)(*given),
    "weighted_fn": lambda losses, *given: fj.weighted_fn(losses)(*given),
    "weights_fn": lambda losses, *given: fj.weights_fn(losses, fj.mean())(*given),
    "train_state": lambda losses, params, x: fj.train_state(params, x, losses=losses, **METHOD),
}
PLACES = {
    "'value'": lambda y: None,
    "'b'": lambda y: {"a": y, "b": None},
    "'1'": lambda y: [y, None],
    "'0'": lambda y: (None, y),
    "'second'": lambda y: Pair(y, None),
    "'b.first'": lambda y: {"a": y, "b": Pair(None, y)},
    "'a.1.c'": lambda y: {"a": [y, {"c": None}], "b": y},
}


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("place", PLACES)
def test_none_in_the_place_of_a_loss_is_refused_by_name(engine, place):
    with pytest.raises(TypeError, match=rf"^{engine}: losses must be .*, found None in {place}\. Return the same"):
        ENGINES[engine](lambda params, x: PLACES[place](loss(params, x)), PARAMS, X)


KINDS = {
    "plain": (PARAMS, lambda p, x: {"a": loss(p, x), "b": None if x.sum() > 1e6 else loss(p, x)}),
    "examples": (PARAMS, fj.per_example(lambda p, x: loss(p, x) if x.shape == (3,) else [loss(p, x), None])),
    "multitask": (
        {"shared": PARAMS, "heads": {"v": torch.ones(())}},
        fj.multitask(
            lambda p, x: x @ p["w"],
            lambda p, z, x: {"a": z.sum() * p["v"], "b": None if x.sum() > 1e6 else z.mean() * p["v"]},
        ),
    ),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rule", [fj.mean, fj.upgrad])
def test_a_loss_that_vanishes_later_is_refused_in_its_step(kind, rule):
    params, losses = KINDS[kind]
    how = METHOD | {"losses": losses, "aggregator": rule()}
    state = fj.train_state(params, X, **how)
    given = X.new_ones(4, 1, 3) if kind == "examples" else X + 1e9
    with pytest.raises(TypeError, match=r"^step: .*found None in '(1|b)'"):
        fj.step(state, given, **how)


def test_aux_may_be_none():
    _, (values, aux) = fj.jacobian_fn(lambda p, x: ({"a": loss(p, x), "c": ()}, None), has_aux=True)(PARAMS, X)
    assert values["a"] == loss(PARAMS, X)
    assert aux is None
