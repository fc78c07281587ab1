"""The loop around the step."""

import sys
from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from functional_jd import fit, scale_state, sgd, step, total, train_state, upgrad


def losses(params, x):
    return {"near": (params["w"] - x).square().mean(), "far": (params["w"] + 2 * x).square().mean()}


HOW = {"losses": losses, "aggregator": upgrad(), "optimizer": sgd(lr=0.1, momentum=0.5)}
STEP = partial(step, **HOW)


def start(**options):
    return train_state({"w": torch.zeros(3)}, torch.ones(3), **HOW, **options)


def batches(n):
    return list(torch.randn(n, 3, generator=torch.Generator().manual_seed(0)))


def test_it_is_the_loop_written_by_hand():
    expected = start()
    for x in batches(5):
        expected, _ = step(expected, x, **HOW)
    torch.testing.assert_close(fit(STEP, start(), batches(5)), expected, rtol=0, atol=0)


@given(st.integers(0, 4), st.integers(0, 4))
def test_two_halves_are_one_whole(first, second):
    data = batches(first + second)
    halves = fit(STEP, fit(STEP, start(), data[:first]), data[first:])
    torch.testing.assert_close(halves, fit(STEP, start(), data), rtol=0, atol=0)


def test_no_batch_gives_the_state_back():
    state = start()
    assert fit(STEP, state, []) is state


def test_every_step_is_told_in_order():
    history = []
    fit(STEP, start(), batches(4), on_step=history.append)
    alone, expected = start(), []
    for x in batches(4):
        alone, info = step(alone, x, **HOW)
        expected.append(info)
    torch.testing.assert_close(history, expected, rtol=0, atol=0)
    assert set(history[0].losses) == {"near", "far"}


def test_a_callback_may_end_the_loop():
    seen = []

    def stop(info):
        seen.append(info)
        if len(seen) == 2:
            raise StopIteration

    with pytest.raises(StopIteration):
        fit(STEP, start(), batches(9), on_step=stop, progress=True)
    assert len(seen) == 2


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


def test_the_bar_tells_the_mean_loss_and_what_was_skipped(capsys):
    data, history = batches(6), []
    data[1][0], data[3][2] = torch.inf, torch.nan
    fit(STEP, start(scale=scale_state(shape=(2,))), data, on_step=history.append, progress=True)
    skipped = sum(not info.finite.all() for info in history)
    assert skipped == 2
    last = history[-1].losses
    printed = capsys.readouterr()
    assert printed.out == ""
    assert "6/6" in printed.err
    assert f"skipped={skipped}" in printed.err
    assert f"loss={(last['near'] + last['far']).item() / 2:.4g}" in printed.err


def test_without_a_bar_nothing_is_printed(capsys):
    fit(STEP, start(), batches(3))
    printed = capsys.readouterr()
    assert printed.out == printed.err == ""


def test_without_tqdm_the_bar_says_what_to_do(monkeypatch):
    monkeypatch.setitem(sys.modules, "tqdm", None)
    with pytest.raises(ImportError, match="pip install tqdm"):
        fit(STEP, start(), batches(1), progress=True)


def test_a_step_that_is_none_is_named():
    with pytest.raises(TypeError, match="step must be a function, found TrainState"):
        fit(start(), STEP, batches(1))
