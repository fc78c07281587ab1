"""Losses by name on sets of examples of different sizes: every engine against loops over all examples of all sets."""

import functools
from functools import partial

import pytest
import torch
from torch.utils._pytree import tree_map
from zoo import numbers

import functional_jd as fj
from functional_jd.distributed import replicated


def value(p, x):
    hidden = torch.tanh(torch.nn.functional.linear(x, p["w"], p["b"]))
    return torch.nn.functional.linear(hidden, p["v"])[0]


def residual(p, x):
    slope = torch.func.grad(lambda x: value(p, x))(x)
    return slope.sum() - value(p, x)


at_edge = lambda p, x, target: value(p, x) - target


PARAMS = {"w": numbers(5, 2), "b": numbers(5, seed=1), "v": numbers(1, 5, seed=2)}
LOSSES = {"inside": residual, "edge": at_edge}
SETS = fj.per_example(LOSSES)


def batch(inside=4, edge=3):
    return {"inside": numbers(inside, 2, seed=3), "edge": numbers(edge, 2, seed=4)}, {"edge": numbers(edge, seed=5)}


def one_by_one(p, points, targets):
    """The edge first, as the names are sorted."""
    edge = [at_edge(p, x, y) for x, y in zip(points["edge"], targets["edge"], strict=True)]
    return torch.stack([*edge, *(residual(p, x) for x in points["inside"])])


def test_engines_take_all_examples_and_aux_comes_by_name():
    losses = fj.per_example({name: lambda p, *x, f=f: (f(p, *x), x[0].sum()) for name, f in LOSSES.items()})
    given_sets = batch()
    how = {"losses": losses, "aggregator": fj.natural_gradient(1e-3), "optimizer": fj.sgd(0.1), "has_aux": True}
    state = fj.train_state(PARAMS, *given_sets, **how)
    for engine in ("gramian", "jacobian", "auto"):
        _, info = fj.step(state, *given_sets, engine=engine, **how)
        torch.testing.assert_close(info.aux, {name: x.sum(1) for name, x in given_sets[0].items()})
    (values, aux), _ = fj.weighted_fn(losses, has_aux=True)(PARAMS, *given_sets)
    torch.testing.assert_close(values, SETS(PARAMS, *given_sets))
    torch.testing.assert_close(aux, info.aux)


@pytest.mark.filterwarnings("ignore:train_state. .* residuals")  # any losses will do
def test_only_the_scale_of_an_example_that_overflows_backs_off():
    points, targets = tree_map(lambda x: x.float(), batch())
    points["inside"] = points["inside"].index_fill(0, torch.tensor([1]), 1e30)
    params = {**tree_map(lambda x: x.float(), PARAMS)}
    squares = fj.per_example({"edge": at_edge, "inside": lambda p, x: (x @ p["w"].mT).sum()})
    how = {"losses": squares, "aggregator": fj.upgrad(), "optimizer": fj.sgd(0.1)}
    state = fj.train_state(params, points, targets, scale=fj.scale_state(2.0**50, shape=(7,)), **how)
    after, info = fj.step(state, points, targets, **how)
    assert info.finite.tolist() == [True, True, True, True, False, True, True]
    assert (after.scale.scale < state.scale.scale).tolist() == (~info.finite).tolist()


@pytest.mark.parametrize("transform", ["compile", "vmap", "grad"])
def test_steps_under_transforms(transform):
    given_sets = batch()
    how = {"losses": SETS, "aggregator": fj.natural_gradient(1e-3), "optimizer": fj.sgd(0.1)}
    state = fj.train_state(PARAMS, *given_sets, **how)
    expected, _ = fj.step(state, *given_sets, **how)
    if transform == "compile":  # without derivatives inside, which would take most of the time
        torch.compiler.reset()
        products = fj.gramian_fn(fj.per_example({"inside": value, "edge": at_edge}))
        compiled = torch.compile(lambda *batch: products(PARAMS, *batch)[0], backend="eager", fullgraph=True)
        torch.testing.assert_close(compiled(*given_sets), products(PARAMS, *given_sets)[0])
    elif transform == "vmap":
        two = tree_map(lambda x: torch.stack([x, x]), state)
        found, _ = torch.vmap(partial(fj.step, **how), in_dims=(0, None, None))(two, *given_sets)
        torch.testing.assert_close(tree_map(lambda x: x[1], found.params), expected.params)
    else:
        size = lambda v, losses: fj.gramian_fn(losses)({**PARAMS, "v": v}, *given_sets)[0].square().sum()
        slopes = [torch.func.grad(size)(PARAMS["v"], losses) for losses in (SETS, one_by_one)]
        torch.testing.assert_close(*slopes)


def test_autocast_keeps_the_sets_apart():
    halved = fj.autocast(SETS, torch.bfloat16)
    given_sets = tree_map(lambda x: x.float(), batch())
    seen, _ = fj.jacobian_fn(halved)(tree_map(lambda x: x.float(), PARAMS), *given_sets)
    plain, _ = fj.jacobian_fn(SETS)(PARAMS, *batch())
    assert type(halved) is type(SETS)
    assert not torch.equal(seen["w"].double(), plain["w"])
    torch.testing.assert_close(seen["w"].double(), plain["w"], rtol=0.1, atol=0.1 * float(plain["w"].abs().max()))


@pytest.mark.filterwarnings("ignore:train_state. .* residuals")  # any losses will do
def test_mistakes_are_named_with_their_cure():
    points, targets = batch()
    with pytest.raises(TypeError, match=r"per_example: arguments must be a dict by names, found torch.float64"):
        SETS(PARAMS, points["edge"])
    with pytest.raises(ValueError, match=r"each of the losses \['edge', 'inside'\], found \['edge'\]"):
        SETS(PARAMS, {"edge": points["edge"]}, targets)
    with pytest.raises(ValueError, match="per_example: expected at least one loss"):
        fj.per_example({})
    with pytest.raises(TypeError, match="per_example: loss must be a function, found int"):
        fj.per_example({"edge": 3})
    with pytest.raises(TypeError, match="per_example: in_dims must be one dimension, as the losses have names"):
        fj.per_example(LOSSES, in_dims=(0, 0))
    how = {"losses": SETS, "aggregator": fj.mean(), "optimizer": fj.sgd(0.1)}
    with pytest.raises(ValueError, match=r"train_state: .*those by name take no buffers"):
        fj.train_state(PARAMS, points, targets, buffers={"count": torch.zeros(())}, **how)
    with pytest.raises(ValueError, match=r"replicated\(\) orders rows by replica.*found losses by name"):
        fj.step(fj.train_state(PARAMS, points, targets, **how), points, targets, engine=replicated(), **how)


def wide(p, x, y, z=0.0):
    return value(p, x) - y - z


ARGUMENTS = {
    "an argument forgotten": ({}, lambda points, _: (points,), "missing 1"),
    "too many": ({}, lambda points, _: (points, points), "takes 2 positional arguments but 3 were given"),
    "a default": ({"edge": wide}, lambda points, _: (points,), "missing 1"),
    "any number": ({"edge": lambda p, x, y, *more: at_edge(p, x, y)}, lambda points, _: (points,), "missing 1"),
}


@pytest.mark.parametrize("case", ARGUMENTS.values(), ids=ARGUMENTS)
def test_a_loss_with_other_arguments_than_it_takes_is_named(case):
    parts, given, message = case
    losses = fj.per_example({"edge": at_edge, "inside": residual} | parts)
    how = {"losses": losses, "aggregator": fj.natural_gradient(), "optimizer": fj.sgd(0.1)}
    for call in (
        lambda: losses(PARAMS, *given(*batch())),
        lambda: fj.autocast(losses)(PARAMS, *given(*batch())),
        lambda: fj.train_state(PARAMS, *given(*batch()), **how),
    ):
        with pytest.raises(TypeError, match=message) as found:
            call()
        assert any("(loss '" in note and "the dict of each argument" in note for note in found.value.__notes__)


def test_losses_that_take_any_arguments_are_called_with_those_of_the_batch():
    weighed = functools.wraps(residual)(lambda p, x, weight: weight * residual(p, x))
    points, targets = batch()
    losses = fj.per_example({"edge": lambda *given: at_edge(*given), "inside": weighed})
    found = losses(PARAMS, points, targets | {"inside": torch.full((4,), 2.0)})
    expected = SETS(PARAMS, points, targets)
    torch.testing.assert_close(found, {"edge": expected["edge"], "inside": 2 * expected["inside"]})
    optional = fj.per_example({"edge": wide, "inside": residual})
    torch.testing.assert_close(optional(PARAMS, points, targets), expected)
    with pytest.raises(TypeError, match="missing 1 required positional argument") as failure:
        losses(PARAMS, points, {"inside": torch.ones(4)})
    assert any("(loss 'edge'): the loss receives one example" in note for note in failure.value.__notes__)


def test_other_numbers_of_examples_and_none_are_told_by_name():
    points, targets = batch()
    with pytest.raises(ValueError, match=r"loss 'edge'.*arguments must have the same number.*found \[2, 3\]"):
        SETS(PARAMS, points, {"edge": targets["edge"][:2]})
    with pytest.raises(ValueError, match=r"loss 'inside'.*at least one, found \[0\].*leave out"):
        SETS.counts(({**points, "inside": points["inside"][:0]}, targets))
    with pytest.raises(ValueError, match=r"loss 'edge'.*along dimension 0, found shape \[\]"):
        SETS.counts((points, {"edge": torch.tensor(1.0)}))
