"""Skipped steps in a row: counted exactly, with few looks at the device, and with the names of the losses."""

import contextlib
import pickle
import warnings
from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from modes import Called

import functional_jd as jd
from functional_jd import StepInfo, TrainingStalled
from functional_jd.training.loop import SkipWatch, was_taken

NAMES = ["far", "near"]


def record(**fields):
    return StepInfo(**dict.fromkeys(StepInfo._fields, ()) | fields)


def info(*finite, losses=(1.0, 2.0)):
    """An info of two losses; one flag is that of one scale for all."""
    flags = torch.tensor(finite[0] if len(finite) == 1 else finite)
    values = dict(zip(NAMES, map(torch.tensor, losses), strict=True))
    return record(losses=values, weights=torch.ones(2, dtype=torch.float64), finite=flags)


def followed(watch, infos):
    """How many steps it took until the error, and after how many there were warnings."""
    warned = []
    for count, each in enumerate(infos, 1):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            try:
                watch.follow(None, count, each)
            except TrainingStalled:
                return count, warned
        warned += [count] * len(caught)
    return None, warned


@given(st.lists(st.tuples(st.booleans(), st.integers(1, 45)), max_size=8), st.integers(1, 50), st.booleans())
def test_the_count_is_exact(runs, patience, per_row):
    flags = [flag for flag, length in runs for _ in range(length)]
    expected_warnings, expected_error, row = [], None, 0
    for count, flag in enumerate(flags, 1):
        row = 0 if flag else row + 1
        if row == patience:
            expected_error = count
            break
        if row == 20:
            expected_warnings.append(count)
    infos = [info(True, flag) if per_row else info(flag) for flag in flags]
    assert followed(SkipWatch(patience), infos) == (expected_error, expected_warnings)


def test_without_patience_it_never_ends_and_other_infos_are_not_looked_at():
    assert followed(SkipWatch(None), [info(False)] * 500) == (None, [20])
    watch = SkipWatch(1)
    numbers = record(losses={"a": 1.0}, weights=(), finite=False, moved=False)
    followed_quietly(watch, [{"finite": torch.tensor(False)}, None, numbers])
    assert not watch.run
    error = pickle.loads(pickle.dumps(TrainingStalled("why", {"w": 1})))
    assert (str(error), error.state) == ("why", {"w": 1})


def test_other_reports_with_losses_and_flags_count_and_none_is_read_under_vmap():
    losses = lambda p, x: (p - x).square()
    how = {"losses": losses, "aggregator": jd.upgrad(), "optimizer": (optimizer := jd.sgd(0.1))}

    def by_parts(state, x):
        found = jd.accumulate(losses, [(x,)], params=state.params, aggregator=how["aggregator"], state=())
        params, moments = optimizer.update(found.direction, state.optimizer, state.params)
        new = state._replace(params=params, optimizer=moments)
        return jd.precision.select(found.moved, new, state), found

    start, x = jd.train_state(torch.zeros(2), torch.ones(2), **how), torch.full((2,), torch.nan)
    with pytest.raises(TrainingStalled, match="not finite themselves"):
        jd.fit(by_parts, start, [x] * 5, patience=3)
    trained = lambda params: jd.fit(partial(jd.step, **how), start._replace(params=params), [x + 1] * 30, patience=3)
    assert torch.equal(torch.vmap(trained)(torch.eye(2)).params, torch.eye(2))


def test_flags_are_read_ten_at_a_time(monkeypatch):
    reads, read = [], SkipWatch._read
    monkeypatch.setattr(SkipWatch, "_read", lambda watch: reads.append(len(watch.run)) or read(watch))
    watch = SkipWatch(200)
    with Called() as host:
        for _ in range(9):
            watch.follow(None, None, info(True, True))
    assert host.reads == len(reads) == 0
    assert followed(watch, [info(True, True)] * 91) == (None, [])
    assert reads == [10] * 10
    assert not watch.run


@pytest.mark.parametrize("limit", [20, 25])
def test_the_losses_to_blame_are_named(limit):
    infos = [info(False, True)] * 3 + [info(True, False)] * (limit - 3)
    words = rf"the last {limit} steps were skipped.*Rows that were not finite: far \(3 times\), near \({limit - 3} "
    stalled = pytest.raises(TrainingStalled, match=words) if limit == 25 else contextlib.nullcontext()
    with pytest.warns(RuntimeWarning, match=words if limit == 20 else None), stalled:
        followed_quietly(SkipWatch(25), infos)


def followed_quietly(watch, infos):
    for each in infos:
        watch.follow(None, None, each)


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("flags", [(False,), (False, False)])
def test_losses_that_are_not_finite_themselves_are_named(flags, value):
    with pytest.raises(TrainingStalled, match="losses were not finite themselves: near") as stalled:
        followed_quietly(SkipWatch(3), [info(*flags, losses=(1.0, value))] * 3)
    assert ("one scale per objective" in str(stalled.value)) == (len(flags) == 1)


def test_the_state_at_a_stall_has_the_scale_of_the_last_step_that_was_taken():
    high = lambda p, c: torch.stack([p.half().sum().float() * c, p.sum()])
    method = {"losses": high, "aggregator": jd.mean(), "optimizer": jd.sgd(0.1)}
    state = jd.train_state(torch.ones(2), torch.tensor(1.0), scale=jd.scale_state(2.0**10), **method)
    with pytest.raises(TrainingStalled) as stalled:
        jd.fit(partial(jd.step, **method), state, [torch.tensor(1e30)] * 3, patience=3)
    assert stalled.value.state.scale.scale == 2.0**10


@pytest.mark.filterwarnings("ignore:train_state")
@pytest.mark.parametrize("engine", ["jacobian", "gramian"])
def test_products_beyond_float64_skip_a_step_and_a_parameter_that_is_infinite_already_does_not(engine):
    method = {"aggregator": jd.upgrad(), "optimizer": jd.sgd(0.1)}
    large = method | {"losses": lambda p: torch.stack([p.sum() * 1e200, p.square().sum()])}
    assert not jd.step(jd.train_state(torch.ones(2).double(), **large), engine=engine, **large)[1].moved
    masked = method | {"losses": lambda p: p["w"].float().square()}
    state = jd.train_state({"w": torch.ones(2).half(), "mask": torch.ones(1).half()}, **masked)
    state.params["mask"].fill_(-torch.inf)
    assert jd.step(state, engine=engine, **masked)[1].moved


def test_of_a_batch_of_steps_one_that_is_taken_is_enough():
    batch = lambda *moved: record(losses={"a": torch.ones(3)}, finite=torch.ones(3), moved=torch.tensor(moved))
    assert was_taken(batch(True, False, False))
    assert not was_taken(batch(False, False, False))
    by_hand = record(losses={"a": torch.ones(2)}, finite=torch.tensor([True, False]))
    assert not was_taken(by_hand)


def known_labels(params, x, y):
    known = y.isfinite()
    errors = (x @ params["w"] - y.nan_to_num()).square()
    return {"a": (x @ params["w"] - 1).square().mean(), "b": torch.where(known, errors, 0.0).sum()}


def shared_known_labels():
    def heads(own, h, x, y):
        errors = torch.where(y.isfinite(), (h * own["b"] - y.nan_to_num()).square(), 0.0)
        return {"a": (h * own["a"] - 1).square().mean(), "b": errors.sum()}

    return jd.multitask(lambda shared, x, y: x @ shared["w"], heads)


BAD = torch.tensor([1.0, torch.nan], dtype=torch.float64)
WITHOUT_WEIGHT = {
    "geometric_mean": jd.geometric_mean,
    "famo": jd.famo,
    "cr_mogm": lambda: jd.cr_mogm(jd.geometric_mean()),
}
VIEWS = (jd.views.losses, jd.views.norms, jd.views.gramian, jd.views.full_jacobian)
EACH = WITHOUT_WEIGHT | {view.__name__: lambda view=view: jd.stateless(view, lambda _: BAD) for view in VIEWS}


@pytest.mark.parametrize("name", EACH)
@pytest.mark.parametrize("engine", ["auto", "jacobian"])
@pytest.mark.parametrize("shape", [None, (), (2,)])
@pytest.mark.parametrize("tasks", [False, True], ids=["plain", "multitask"])
def test_a_weight_that_is_not_finite_skips_though_the_loss_hides_it(name, engine, shape, tasks):
    losses = shared_known_labels() if tasks else known_labels
    params = {"w": torch.ones(3)}
    if tasks:
        params = {"shared": params, "heads": {"a": torch.ones(()), "b": torch.ones(())}}
    x, y = torch.randn(8, 3), torch.randn(8)
    method = {"losses": losses, "aggregator": EACH[name](), "optimizer": jd.adamw(0.1), "engine": engine}
    scale = None if shape is None else jd.scale_state(4.0, shape=shape)
    state = jd.train_state(params, x, y, scale=scale, **method)
    if name in WITHOUT_WEIGHT:
        state, info = jd.step(state, x, y, **method)
        assert info.moved
    after, info = jd.step(state, x, torch.full_like(y, torch.nan), **method)
    assert not info.moved
    torch.testing.assert_close((after.params, after.aggregator), (state.params, state.aggregator), rtol=0, atol=0)


def test_the_pullback_of_one_pass_says_that_a_weight_is_not_finite_though_the_loss_hides_it():
    params, x, y = {"w": torch.ones(3)}, torch.randn(8, 3), torch.full((8,), torch.nan)
    _, pullback = jd.weighted_fn(known_labels)(params, x, y)
    assert not pullback(BAD)[1]
    assert pullback(torch.ones(2, dtype=torch.float64))[1]
