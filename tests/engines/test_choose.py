"""Which engine is taken, by shapes alone, and which engine serves which rule: all that do give one direction."""

import pytest
import torch
import torch.distributed as dist
from bounds import check_same

import functional_jd as jd
from functional_jd.distributed import replicated
from functional_jd.engines import PLAIN, replicas
from functional_jd.engines.choose import choose_engine

TINY = [(32, 16), (32,), (16, 32), (16,)]
MLP = [(200, 96), (200,), (160, 200), (160,)]
WIDE = [(256, 128), (256,), (256, 256), (256,)]
LARGE = [(2048, 1024), (2048,), (2048, 2048), (2048,), (2048, 2048), (2048,), (512, 2048), (512,)]
CONV = [(16, 3, 3, 3), *[(16,)] * 3, (32, 16, 3, 3), *[(32,)] * 3]
LAYER = [(192, 64), (192,), (64, 64), (64,), (128, 64), (128,), (64, 128), *[(64,)] * 5]


@pytest.mark.parametrize(
    ("shapes", "batch", "tasks", "engine"),
    [
        (TINY, (16, 16), 2, "jacobian"),
        *[(MLP, (64, 96), m, "jacobian") for m in (2, 8, 32)],
        (WIDE, (128, 128), 8, "jacobian"),
        *[(LARGE, (128, 1024), m, "gramian") for m in (2, 8)],
        *[([(512, 512)] * 2, (64, 512), m, "gramian") for m in (2, 8, 32)],
        *[([(256, 256)] * 2, (16, 256), m, "gramian") for m in (2, 8)],
        *[([(512, 512)] * 2, (256, 512), m, "jacobian") for m in (2, 8)],
        *[(CONV, (16, 3, 32, 32), m, "jacobian") for m in (2, 8)],
        *[(LAYER * 2, (16, 16, 64), m, "jacobian") for m in (2, 8, 32)],
    ],
)
def test_tasks_take_the_engine_that_was_measured_to_be_faster(shapes, batch, tasks, engine):
    losses = jd.multitask(lambda shared, x, y: x, lambda heads, h, x, y: [])
    heads = {f"{i}.{name}": torch.empty(1) for i in range(tasks) for name in ("weight", "bias")}
    params = {"shared": {str(i): torch.empty(shape) for i, shape in enumerate(shapes)}, "heads": heads}
    state = jd.TrainState(params, (), (), (), jd.precision.no_scale())
    given = torch.empty(batch), torch.empty(tasks, batch[0], 1)
    assert jd.chosen_engine(state, *given, losses=losses, aggregator=jd.upgrad()).engine == engine


@pytest.mark.parametrize(
    ("shapes", "example", "m", "engine"),
    [
        ([(16, 16)] * 2, (16,), 64, "jacobian"),
        (MLP, (96,), 64, "gramian"),
        (MLP, (96,), 4, "gramian"),
        (CONV, (3, 32, 32), 64, "jacobian"),
        (LAYER * 2, (16, 64), 4, "jacobian"),
        (LAYER * 2, (16, 64), 16, "gramian"),
        (LAYER * 2, (16, 64), 64, "gramian"),
    ],
)
def test_examples_take_the_engine_that_was_measured_to_be_faster(shapes, example, m, engine):
    losses = jd.per_example(lambda params, x, y: y)
    params = [torch.empty(shape) for shape in (*shapes, (10, shapes[-1][0]), (10,))]
    state = jd.TrainState(params, (), (), (), jd.precision.no_scale())
    batch = torch.empty(m, *example), torch.empty(m, dtype=torch.int64)
    assert jd.chosen_engine(state, *batch, losses=losses, aggregator=jd.upgrad()).engine == engine


@pytest.mark.parametrize(("shapes", "batch", "engine"), [(TINY, (16, 16), "jacobian"), (LARGE, (64, 1024), "gramian")])
@pytest.mark.parametrize("rule", [jd.epo([0.5, 0.5]), jd.natural_gradient(1e-6)])
def test_a_rule_that_needs_the_losses_too_takes_the_engine_of_its_shapes(rule, shapes, batch, engine):
    state = jd.TrainState([torch.empty(shape) for shape in shapes], (), (), (), jd.precision.no_scale())
    assert jd.chosen_engine(state, torch.empty(batch), losses=lambda params, x: x[0], aggregator=rule).engine == engine


@pytest.mark.parametrize(
    ("shapes", "reason"),
    [
        (TINY, "few beside the batch (examples times the length of a sequence): forming all gradients costs less than"),
        ([(512, 512)] * 2, "layer by layer costs less than forming all gradients"),
    ],
)
def test_reasons_name_what_costs_less(shapes, reason):
    leaves = [torch.empty(shape, device="meta") for shape in shapes]
    assert reason in choose_engine(jd.upgrad().view, 2, leaves, (torch.empty(16, 1),), PLAIN).reason


def test_tokens_are_positions_and_a_function_without_a_batch_has_one():
    leaves, losses = {"table": torch.empty(1000, 300)}, lambda params, *tokens: params["table"][0]
    state = jd.TrainState(leaves, (), (), (), jd.precision.no_scale())
    name = lambda *batch: jd.chosen_engine(state, *batch, losses=losses, aggregator=jd.upgrad()).engine
    assert [name(), name(torch.zeros(5, 10, dtype=torch.int64)), name(torch.zeros(5, 11, dtype=torch.int64))] == [
        "gramian",
        "gramian",
        "jacobian",
    ]


def test_rows_that_take_much_memory_are_not_formed():
    leaf = torch.empty(1 << 20, device="meta")
    names = lambda positions: [
        choose_engine(jd.upgrad().view, m, [leaf], (torch.empty(positions, 1),), PLAIN).engine for m in (7, 8)
    ]
    assert names(200) == ["jacobian", "gramian"]
    assert names(1 << 20) == ["jacobian", "jacobian"], "gradients of layers at all positions take more"


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
