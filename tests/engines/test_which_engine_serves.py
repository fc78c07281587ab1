"""Which engine serves which rule, and that all that do give one direction: `aggregate` of rows by torch.func."""

import pytest
import torch
import torch.distributed as dist
from bounds import check_same

import functional_jd as jd
from functional_jd.distributed import replicated
from functional_jd.engines import replicas

GROUPS = ("b", "w")
NEEDS = {
    "nothing": jd.mean(),
    "losses": jd.stch(),
    "norms": jd.clipped(1.0),
    "gramian": jd.upgrad(),
    "gramian and losses": jd.natural_gradient(0.1),
    "rows": jd.trimmed_mean(1),
    "rows and losses": jd.db_mtl(),
    "nothing by group": jd.grouped(dict.fromkeys(GROUPS, jd.mean())),
    "nothing by groups that differ": jd.grouped({"w": jd.constant(torch.tensor([1.0, 2.0, 3.0])), "b": jd.mean()}),
    "losses by group": jd.grouped({"w": jd.stch(), "b": jd.mean()}),
    "gramian by group": jd.grouped({"w": jd.upgrad(), "b": jd.mean()}),
}
WITHOUT_ROWS = {need for need in NEEDS if need.startswith(("nothing", "losses"))}
SERVED = {
    "auto": set(NEEDS),
    "jacobian": set(NEEDS),
    "gramian": {"norms", "gramian", "gramian and losses", "gramian by group"},
    "weighted": WITHOUT_ROWS,
    "features": {"gramian", "gramian and losses"},
    "replicated": set(NEEDS),
    "replicated jacobian": set(NEEDS),
    "replicated weighted": WITHOUT_ROWS,
}


def engine_of(name):
    if name == "features":
        return jd.engines.features_engine()
    return replicated(*name.split()[1:]) if name.startswith("replicated") else name


def numbers(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


X, Y = numbers(5, 4), numbers(5, 3, seed=1)
SHARED = {"w": numbers(4, 2, seed=2), "b": numbers(2, seed=3)}
HEADS = {name: numbers(2, seed=4 + i) for i, name in enumerate("abc")}


def trunk(shared, x, y):
    return (x @ shared["w"] + shared["b"]).tanh()


def heads(own, h, x, y):
    return torch.stack([(h @ w - y[:, i]).square().mean() for i, w in enumerate(own.values())])


PARAMS = {"shared": SHARED, "heads": HEADS}
LOSSES = jd.multitask(trunk, heads)


def plain(shared, x, y):
    return heads(HEADS, trunk(shared, x, y), x, y)


def directions(need, engine):
    """Of a plain function and of `multitask` losses with the same rows."""
    rows, values = torch.func.jacrev(plain)(SHARED, X, Y), plain(SHARED, X, Y)
    seen = rows
    if engine == "features":
        seen = torch.func.jacrev(lambda h: heads(HEADS, h, X, Y))(trunk(SHARED, X, Y))
    weights = jd.aggregate(NEEDS[need], seen, losses=values).weights
    of_trunk = jd.aggregation.combine(rows, weights)
    of_heads = torch.func.grad(lambda own: heads(own, trunk(SHARED, X, Y), X, Y).sum())(HEADS)
    return of_trunk, {"shared": of_trunk, "heads": of_heads}


@pytest.fixture(scope="module", autouse=True)
def alone(tmp_path_factory):
    """The only rank of a group."""
    store = (tmp_path_factory.mktemp("group") / "store").as_uri()
    dist.init_process_group("gloo", init_method=store, rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def taken(losses, params, need, engine, scale):
    method = {"losses": losses, "aggregator": NEEDS[need], "optimizer": jd.sgd(1.0), "engine": engine_of(engine)}
    state = jd.train_state(params, X, Y, **method, scale=scale)
    new, info = jd.step(state, X, Y, **method)
    assert info.moved
    return torch.utils._pytree.tree_map(torch.sub, params, new.params)


@pytest.mark.filterwarnings("ignore:train_state. natural_gradient expects residuals")  # any losses will do
@pytest.mark.parametrize("engine", SERVED)
@pytest.mark.parametrize("shape", [None, (), (3,)], ids=["no scale", "one", "each"])
def test_engines_serve_these_rules_and_agree(engine, shape):
    scale = None if shape is None else jd.scale_state(2.0**4, shape=shape)
    for need in NEEDS:
        served = need in SERVED[engine]
        expected = directions(need, engine) if served else ((), ())
        for losses, params, direction in ((plain, SHARED, expected[0]), (LOSSES, PARAMS, expected[1])):
            if not served or (engine == "features" and losses is plain):
                with pytest.raises(ValueError, match=r"^train_state: .* serves (rules|losses)"):
                    taken(losses, params, need, engine, scale)
                continue
            found = taken(losses, params, need, engine, scale)
            check_same(found, direction)


@pytest.mark.parametrize("engine", ["replicated", "replicated weighted"])
def test_replicas_form_no_rows_for_groups_that_need_none(engine, monkeypatch):
    monkeypatch.setattr(replicas, "rows_of_plan", lambda *_: pytest.fail("formed rows"))
    for need in WITHOUT_ROWS:
        taken(plain, SHARED, need, engine, None)


def test_replicas_that_form_rows_by_name_do_so(monkeypatch):
    formed, rows_of_plan = [], replicas.rows_of_plan
    monkeypatch.setattr(replicas, "rows_of_plan", lambda *given: formed.append(1) or rows_of_plan(*given))
    taken(plain, SHARED, "nothing", "replicated jacobian", None)
    assert formed
