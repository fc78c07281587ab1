"""What losses return: None in the place of a loss is refused by name, in every engine and at every depth."""

import collections

import pytest
import torch

import functional_jd as fj
from functional_jd.core.tree import tree_leaves

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


WITH_DICTS = {
    "plain": lambda encode: lambda params, batch: encoded(params, encode(params, batch), batch),
    "multitask": lambda encode: fj.multitask(encode, lambda own, h, batch: encoded(own, h, batch)),
}


def encoded(params, h, batch):
    batch["answer"] = h @ params["v"]
    return {"error": (batch["answer"] - 1).square().mean(), "size": batch["answer"].abs().mean()}


def encode(params, batch):
    """As models do that take a dict: what is in it is not computed again."""
    if "features" not in batch["given"]:
        batch["given"]["features"] = (batch["given"]["x"] @ params["w"]).tanh()
    return batch["given"]["features"]


@pytest.mark.parametrize("kind", WITH_DICTS)
@pytest.mark.parametrize("engine", [name for name in ENGINES if name != "train_state"])
def test_a_batch_is_afterwards_what_it_was(engine, kind):
    """Else the second call would find there what the first has computed with other parameters."""
    params = {"w": torch.eye(3)[:, :2], "v": torch.tensor([1.0, -2.0])}
    params = params if kind == "plain" else {"shared": {"w": params["w"]}, "heads": {"v": params["v"]}}
    batch = {"given": {"x": X}}
    first, second = (ENGINES[engine](WITH_DICTS[kind](encode), params, batch) for _ in range(2))
    assert batch.keys() == {"given"}
    assert batch["given"].keys() == {"x"}
    for x, y in zip(tree_leaves(first[0]), tree_leaves(second[0]), strict=True):
        assert torch.equal(x, y)


@pytest.mark.parametrize("kind", WITH_DICTS)
def test_a_first_step_trains_on_the_batch_of_train_state(kind):
    params = {"w": torch.eye(3)[:, :2], "v": torch.tensor([1.0, -2.0])}
    params = params if kind == "plain" else {"shared": {"w": params["w"]}, "heads": {"v": params["v"]}}
    method, batch = METHOD | {"losses": WITH_DICTS[kind](encode)}, {"given": {"x": X}}
    after, _ = fj.step(fj.train_state(params, batch, **method), batch, **method)
    for x, y in zip(tree_leaves(params), tree_leaves(after.params), strict=True):
        assert not torch.equal(x, y)


def test_losses_that_are_evaluated_again_find_the_batch_as_it_was():
    """A derivative inside the losses makes the Gramian engine begin anew, by rows."""

    def losses(params, batch):
        h = encode(params, batch)
        (slope,) = torch.autograd.grad(h.sum(), [params["w"]], create_graph=True)
        return {"size": h.square().mean(), "slope": slope.square().sum()}

    params = {"w": torch.eye(3)[:, :2]}
    with pytest.warns(fj.SlowPathWarning, match="call grad"):
        gramian, _, _ = fj.gramian_fn(losses)(params, {"given": {"x": X}})
    rows = fj.jacobian_fn(losses)(params, {"given": {"x": X}})[0]["w"].flatten(1).double()
    torch.testing.assert_close(gramian, rows @ rows.T)
