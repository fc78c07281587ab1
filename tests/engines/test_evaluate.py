"""What the functions of losses have in common: what losses may return, and what comes back of it."""

import collections

import pytest
import torch
from bounds import check_same
from gramian_by_hand import priced
from jacobian_by_hand import every_kind, leaves, same, same_unscaled
from torch import nn
from zoo import BATCH, bare, by_example, mlp, numbers, of_module, plain, tasks

import functional_jd as fj
from functional_jd.core.tree import tree_leaves, tree_map

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


def same_bits(x, y):
    return all(map(torch.equal, tree_leaves(x), tree_leaves(y)))


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
@pytest.mark.parametrize("engine", [*(name for name in ENGINES if name != "train_state"), "step"])
def test_a_batch_is_afterwards_what_it_was(engine, kind):
    """Else the second call would find there what the first has computed with other parameters."""
    params = {"w": torch.eye(3)[:, :2], "v": torch.tensor([1.0, -2.0])}
    params = params if kind == "plain" else {"shared": {"w": params["w"]}, "heads": {"v": params["v"]}}
    losses, batch = WITH_DICTS[kind](encode), {"given": {"x": X}}
    if engine == "step":  # the first trains on the batch of train_state
        method = METHOD | {"losses": losses}
        after, _ = fj.step(fj.train_state(params, batch, **method), batch, **method)
        assert not any(map(torch.equal, tree_leaves(params), tree_leaves(after.params)))
    else:
        first, second = (ENGINES[engine](losses, params, batch) for _ in range(2))
        assert same_bits(first[0], second[0])
    assert batch.keys() == {"given"}
    assert batch["given"].keys() == {"x"}


def test_a_record_that_holds_a_dict_is_afterwards_what_it_was():
    given, form = collections.namedtuple("Batch", "given")({"x": X}), lambda p, batch: encode({"w": p}, batch._asdict())
    w, heads = torch.eye(3)[:, :2], fj.multitask(form, lambda v, h, _: h @ v)
    fj.jacobian_fn(form)(w, given)
    fj.jacobian_fn(heads)({"shared": w, "heads": torch.ones(2)}, given)
    assert given.given.keys() == {"x"}


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


CALLS = [("jacobian_fn", {"mode": mode}) for mode in ("auto", "vmap", "loop")]
CALLS += [(name, {}) for name in ("gramian_fn", "squared_norms_fn", "weighted_fn")]
every_call = pytest.mark.parametrize(("name", "how"), CALLS, ids=[" ".join([n, *how.values()]) for n, how in CALLS])


def found(name, how, losses, params, *args):
    """The losses as they came back, and all that was made of their rows."""
    rows = getattr(fj, name)(losses, **how)(params, *args)
    if name == "jacobian_fn":
        return rows[::-1]
    *products, values, pullback = rows
    of_losses = values[0] if how.get("has_aux") else values
    weights = torch.arange(1.0, 1 + sum(x.numel() for x in tree_leaves(of_losses)), dtype=torch.float64)
    return values, (products, pullback(weights)[0])


@every_call
@every_kind
def test_aux_comes_back_beside_the_losses(kind, name, how):
    case = kind(mlp())
    with_aux = lambda f: lambda *args: (f(*args), {"n": torch.tensor(7), "nested": [args[-1].exp(), args[-1] > 0]})
    if kind is by_example:
        both = fj.per_example(with_aux(case.losses.loss))
    else:
        both = (
            fj.multitask(case.losses.features, with_aux(case.losses.heads)) if kind is tasks else with_aux(case.losses)
        )
    (values, aux), rows = found(name, how | {"has_aux": True}, both, case.params, *case.args)
    assert same_bits((values, rows), found(name, how, case.losses, case.params, *case.args))
    torch.testing.assert_close(values, case.losses(case.params, *case.args))
    assert same_bits(aux["nested"], [case.args[1].exp(), case.args[1] > 0])
    assert torch.equal(aux["n"], torch.full((BATCH,) if kind is by_example else (), 7))


@every_call
@every_kind
def test_nothing_stays_attached_or_changes_unless_an_input_requires_grad(kind, name, how):
    captured, model = numbers(3).requires_grad_(), mlp()
    case = kind(model._replace(predict=lambda p, x: model.predict(p, x) * captured))
    before = [x.clone() for x in tree_leaves(case.params)]
    asking = torch.utils._pytree.tree_map(lambda x: x.clone().requires_grad_(), case.params)
    first, second = (found(name, how, case.losses, case.params, *case.args) for _ in range(2))
    with torch.no_grad():
        silent = found(name, how, case.losses, asking, *case.args)
    loud = found(name, how, case.losses, asking, *case.args)
    assert same_bits(first, second)
    assert not any(x.requires_grad for x in tree_leaves((first, silent)))
    assert all(x.requires_grad for x in tree_leaves(loud))
    for other in (silent, loud):
        check_same([*map(torch.detach, tree_leaves(other))], tree_leaves(first))
    assert same_bits(before, case.params)
    assert not any(x.requires_grad for x in tree_leaves(case.params))
    assert all(x.grad is None and x.is_leaf for x in tree_leaves(asking))


@every_call
@every_kind
def test_replicas_and_scales_by_vmap_are_a_loop_over_them(kind, name, how, monkeypatch):
    case, m = kind(mlp()), 3 if kind is tasks else 4
    replicas = [(tree_map(lambda x, r=r: x * r, case.params), torch.full((m,), 2.0**r)) for r in (1, -2, 3)]
    f = lambda params, scale: found(name, how | {"scale": scale}, case.losses, params, *case.args)

    def slopes(params, scale):
        sines = lambda params: sum(x.double().sin().sum() for x in tree_leaves(f(params, scale)) if x.requires_grad)
        return torch.func.grad(sines)(params)

    for lean in (True, False) if name == "squared_norms_fn" else (True,):
        priced(monkeypatch, lean)
        for take in (f, slopes):
            stacked = tree_map(lambda *x: torch.stack(x), *replicas)
            loop = [torch.stack(x) for x in zip(*[leaves(take(*each)) for each in replicas], strict=True)]
            same_unscaled(torch.vmap(take)(*stacked), loop)


FUNCTIONS = ["weighted_fn", "jacobian_fn", "squared_norms_fn"]


@pytest.mark.parametrize(("kind", "name"), [*zip([plain, tasks, by_example], FUNCTIONS, strict=True)])
def test_one_graph_holds_it(kind, name, monkeypatch):
    priced(monkeypatch, True)
    case = kind(bare())
    f = lambda params, scale, *args: found(name, {"scale": scale}, case.losses, params, *args)
    torch.compiler.reset()
    given = case.params, torch.arange(1.0, 4.0 if kind is tasks else 5.0), *case.args
    same(torch.compile(f, fullgraph=True, backend="aot_eager")(*given), leaves(f(*given)))


@every_call
@pytest.mark.parametrize("kind", [plain, tasks])
def test_running_statistics_are_updated_exactly_once(kind, name, how):
    norm = nn.BatchNorm1d(4).double()
    case = kind(of_module(lambda: norm, numbers(BATCH, 4)))
    norm.reset_running_stats()
    found(name, how, case.losses, case.params, *case.args)
    assert norm.num_batches_tracked == 1
    torch.testing.assert_close(norm.running_mean, 0.1 * case.args[0].mean(0))


@every_call
@every_kind
@pytest.mark.parametrize("error", [KeyError("mine"), torch.OutOfMemoryError("mine")], ids=["error", "memory"])
def test_an_error_of_the_losses_comes_back_as_it_was_at_once(error, kind, name, how):
    calls = []

    def broken(params, x):
        calls.append(1)
        raise error

    case = kind(mlp()._replace(predict=broken))
    with pytest.raises(type(error), match="mine") as raised:
        found(name, how, case.losses, case.params, *case.args)
    assert raised.value is error
    assert len(calls) == 1 or isinstance(error, KeyError)  # a slower way may serve what a faster one does not
