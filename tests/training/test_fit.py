"""The loop around the step, as a function and as an iterator."""

import sys
from collections import deque, namedtuple
from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from functional_jd import StepInfo, TrainingStalled, fit, scale_state, sgd, step, steps, total, train_state, upgrad


def losses(params, x):
    return {"near": (params["w"] - x).square().mean(), "far": (params["w"] + 2 * x).square().mean()}


HOW = {"losses": losses, "aggregator": upgrad(), "optimizer": sgd(lr=0.1, momentum=0.5)}
STEP = partial(step, **HOW)


def start(**options):
    return train_state({"w": torch.zeros(3)}, torch.ones(3), **HOW, **options)


def batches(n):
    return list(torch.randn(n, 3, generator=torch.Generator().manual_seed(0)))


@given(st.integers(0, 5))
def test_it_is_the_loop_written_by_hand(n):
    expected, history, found = start(), [], list(steps(STEP, start(), batches(n)))
    after = fit(STEP, start(), batches(n), on_step=history.append)
    assert len(found) == len(history) == n
    for x, told, (state, info) in zip(batches(n), history, found, strict=True):
        expected, expected_info = step(expected, x, **HOW)
        assert isinstance(info, StepInfo)
        torch.testing.assert_close((state, info, told), (expected, expected_info, expected_info), rtol=0, atol=0)
    torch.testing.assert_close(after, expected, rtol=0, atol=0)


class OwnError(Exception):
    state = "own"


def test_a_state_that_an_exception_has_already_is_left_alone():
    def fail(info):
        raise OwnError

    with pytest.raises(OwnError) as stopped:
        fit(STEP, start(), batches(1), on_step=fail, progress=True)
    assert stopped.value.state == "own"


CALLBACKS = {
    "one": (lambda seen: lambda info: seen.append((info,)), 1),
    "an option": (lambda seen: lambda info, mark="mark": seen.append((info,)[: mark == "mark"]), 1),
    "any number": (lambda seen: lambda *given: seen.append(given), 1),
    "two": (lambda seen: lambda info, state: seen.append((info, state)), 2),
    "at least two": (lambda seen: lambda info, state, *more: seen.append((info, state, *more)), 2),
}


@pytest.mark.parametrize(("make", "count"), CALLBACKS.values(), ids=CALLBACKS)
def test_a_callback_is_given_the_info_and_the_state_if_it_asks_for_both(make, count):
    seen = []
    after = fit(STEP, start(), batches(3), on_step=make(seen))
    assert [len(given) for given in seen] == [count] * 3
    assert all(isinstance(given[0], StepInfo) for given in seen)
    if count == 2:
        torch.testing.assert_close(seen[-1][1], after, rtol=0, atol=0)
    for collect in (print, torch.nn.Identity(), [].append, deque().append):
        fit(STEP, start(), batches(1), on_step=collect)


def test_a_callback_that_cannot_be_called_ends_with_the_error_of_python():
    with pytest.raises(TypeError, match="fit: on_step must be a function, found list"):
        fit(STEP, start(), batches(1), on_step=[])
    for on_step in (lambda: None, lambda a, b, c: None):
        with pytest.raises(TypeError, match="positional argument") as failed:
            fit(STEP, start(), batches(2), on_step=on_step)
        torch.testing.assert_close(failed.value.state, fit(STEP, start(), batches(2)[:1]), rtol=0, atol=0)


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError, StopIteration])
@pytest.mark.parametrize("where", ["on_step", "batches", "step"])
def test_an_exception_carries_the_state_after_the_last_step(error, where):
    done, data = [], batches(5)

    def fail(*_):
        if len(done) == 3:
            raise error
        return True

    def stream():
        for x in data:
            if where == "batches":
                fail()
            yield x

    def taken(state, x):
        if where == "step":
            fail()
        state, info = STEP(state, x)
        done.append(info)
        return state, info

    # Generators turn StopIteration into RuntimeError.
    raised = RuntimeError if error is StopIteration and where != "on_step" else error
    with pytest.raises(raised) as stopped:
        fit(taken, start(), stream(), on_step=fail if where == "on_step" else None)
    torch.testing.assert_close(stopped.value.state, fit(STEP, start(), data[:3]), rtol=0, atol=0)
    assert stopped.value.__notes__ == ["fit: the attribute `state` of this exception is the state after 3 steps."]


@pytest.mark.parametrize("early", [True, False], ids=["in-the-step", "in-the-loop"])
def test_the_variable_of_the_loop_holds_the_last_state_and_nothing_is_computed_ahead(early):
    drawn, last = [], []

    def interrupted(state, x):
        if early and len(drawn) == 3:
            raise KeyboardInterrupt
        return STEP(state, x)

    def loop():
        for state, _ in steps(interrupted, start(), (drawn.append(x) or x for x in batches(5))):
            last[:] = [state]
            if not early and len(drawn) == 2:
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        loop()
    assert len(drawn) == 2 + early
    torch.testing.assert_close(last, [fit(STEP, start(), batches(2))], rtol=0, atol=0)
    steps(STEP, start(), (drawn.append(x) for x in batches(4)))
    assert len(drawn) == 2 + early


def corrupt(n):
    return [torch.full((3,), torch.nan)] * n


@pytest.mark.filterwarnings("ignore:fit. the last 20 steps were skipped:RuntimeWarning")
def test_training_that_stalls_ends_with_the_last_good_state():
    state, history = start(scale=scale_state(growth_interval=2)), []
    with pytest.raises(TrainingStalled, match="fit: the last 200 steps were skipped") as stalled:
        fit(STEP, state, batches(7) + corrupt(500), on_step=history.append)
    assert len(history) == 207
    with pytest.raises(TrainingStalled, match="steps: the last 5 steps were skipped") as stalled_early:
        list(steps(STEP, state, batches(7) + corrupt(9), patience=5))
    torch.testing.assert_close(stalled_early.value.state, stalled.value.state, rtol=0, atol=0)
    torch.testing.assert_close(stalled.value.state, fit(STEP, state, batches(7)), rtol=0, atol=0)


def test_the_warning_points_to_the_line_that_called_fit():
    warned = pytest.warns(RuntimeWarning, match="Training stops after 30 of them")
    with warned as caught, pytest.raises(TrainingStalled):
        fit(STEP, start(), corrupt(99), patience=30)
    assert [warning.filename for warning in caught] == [__file__]


def two(params, x, y):
    return torch.stack([(params["w"] - x).square().mean(), (params["w"] - y).square().mean()])


def named(params, batch):
    return two(params, batch["x"], batch["y"])


class Stream(IterableDataset):
    def __iter__(self):
        yield from zip(batches(4), batches(4), strict=True)


@pytest.mark.parametrize(
    ("loader", "take"),
    [
        (DataLoader(TensorDataset(*[torch.stack(batches(4))] * 2), batch_size=2), two),
        (DataLoader(Stream(), batch_size=2), two),
        ([{"x": x, "y": x} for x in batches(2)], named),
        ((pair for pair in zip(batches(2), batches(2), strict=True)), two),
    ],
    ids=["loader", "stream", "dicts", "generator"],
)
@pytest.mark.parametrize("progress", [False, True])
def test_batches_come_from_anywhere(loader, take, progress):
    how = HOW | {"losses": take, "aggregator": total()}
    given = {"x": torch.zeros(3), "y": torch.zeros(3)}
    state = train_state({"w": torch.zeros(3)}, *([given] if take is named else given.values()), **how)
    after = fit(partial(step, **how), state, loader, progress=progress)
    assert torch.isfinite(after.params["w"]).all()


def test_a_named_tuple_is_spread_unless_it_is_wrapped():
    pair, whole = namedtuple("Pair", "x y")(*batches(2)), lambda params, batch: two(params, *batch)
    how, spread = (HOW | {"losses": f, "aggregator": total()} for f in (whole, two))
    state = train_state({"w": torch.zeros(3)}, pair, **how)
    with pytest.raises(TypeError, match="takes 2 positional arguments but 3 were given"):
        fit(partial(step, **how), state, [pair])
    found = fit(partial(step, **how), state, [(pair,)]), fit(partial(step, **spread), state, [pair])
    torch.testing.assert_close(*found, rtol=0, atol=0)


def test_the_bar_tells_the_losses_and_what_was_skipped(capsys):
    data, history = batches(6), []
    data[1][0], data[3][2] = torch.inf, torch.nan
    fit(STEP, start(scale=scale_state(shape=(2,))), data, on_step=history.append, progress=True)
    skipped = sum(not info.finite.all() for info in history)
    assert skipped == 2
    last = history[-1].losses
    printed = capsys.readouterr()
    assert printed.out == ""
    assert "6/6" in printed.err
    assert f"far={last['far'].item():.4g}, near={last['near'].item():.4g}, skipped={skipped}" in printed.err


SHOWN = {
    "one": (lambda w: w[0], lambda v: f"loss={v[0]:.4g}"),
    "a tensor": (lambda w: w[:3], lambda v: "0={:.4g}, 1={:.4g}, 2={:.4g}".format(*v)),
    "units": (lambda w: {"depth": 1e3 * w[1], "kind": w[2]}, lambda v: "depth={:.4g}, kind={:.4g}".format(*v)),
    "four": (
        lambda w: {"a": w[:2], "b": {"c": w[2], "d": w[3]}},
        lambda v: "a[0]={:.4g}, a[1]={:.4g}, b.c={:.4g}, b.d={:.4g}".format(*v),
    ),
    "the mean of more": (lambda w: {"a": w, "b": w[0]}, lambda v: f"loss={sum(v) / 6:.4g}"),
    "residuals of both signs": (lambda w: w - w.mean(), lambda v: f"rms={(sum(x * x for x in v) / 5) ** 0.5:.4g}"),
}


@pytest.mark.parametrize(("select", "words"), SHOWN.values(), ids=SHOWN)
def test_the_bar_tells_losses_by_name_or_their_size(select, words, capsys):
    how, history = {"losses": lambda p, x: select(p - x), "aggregator": total(), "optimizer": sgd(0.1)}, []
    start = train_state(torch.arange(1.0, 6.0), torch.zeros(5), **how)
    fit(partial(step, **how), start, [torch.full((5,), 0.25)], on_step=history.append, progress=True)
    found = [x for leaf in tree_leaves(history[-1].losses) for x in leaf.reshape(-1).tolist()]
    assert f", {words(found)}, skipped=0]" in capsys.readouterr().err


def test_without_a_bar_nothing_is_printed_and_without_tqdm_there_is_none(monkeypatch, capsys):
    fit(STEP, start(), batches(3))
    assert capsys.readouterr() == ("", "")
    monkeypatch.setitem(sys.modules, "tqdm", None)
    with pytest.raises(ImportError, match="tqdm"):
        fit(STEP, start(), batches(1), progress=True)


@pytest.mark.parametrize("patience", [0, -1, 1.5, True, "ten"])
@pytest.mark.parametrize("loop", [fit, steps])
def test_what_cannot_be_looped_is_refused_at_once(loop, patience):
    name = loop.__name__
    with pytest.raises(ValueError, match=f"{name}: patience must be an integer of at least 1, found "):
        loop(STEP, start(), batches(1), patience=patience)
    with pytest.raises(TypeError, match=f"{name}: step must be a function, found TrainState"):
        loop(start(), STEP, batches(1))
    with pytest.raises(TypeError, match=f"{name}: batches must be a DataLoader, a list or a generator, found"):
        loop(STEP, start(), torch.ones(()))


@pytest.mark.parametrize("rule", [upgrad(), total()])
def test_a_batch_with_other_losses_is_named(rule):
    """A rule without a memory would take it, and move the parameters by the losses that are there."""
    some = lambda params, x: losses(params, x) if x[0] else {"far": params["w"].sum(), "new": params["w"].sum()}
    how = {"losses": some, "aggregator": rule, "optimizer": sgd(lr=0.1)}
    state = train_state({"w": torch.zeros(3)}, torch.ones(3), **how)
    with pytest.raises(ValueError, match=r"fit: all batches must have the same losses.*0 \* another loss"):
        fit(partial(step, **how), state, [torch.ones(3), torch.zeros(3)])
