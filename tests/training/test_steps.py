"""The loop around the step as an iterator: the loop written by hand, and nothing is lost when it ends early."""

from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from functional_jd import StepInfo, TrainingStalled, fit, sgd, step, steps, train_state, upgrad


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
    expected, found = start(), list(steps(STEP, start(), batches(n)))
    assert len(found) == n
    for x, (state, info) in zip(batches(n), found, strict=True):
        expected, expected_info = step(expected, x, **HOW)
        assert isinstance(info, StepInfo)
        torch.testing.assert_close((state, info), (expected, expected_info), rtol=0, atol=0)


@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError])
@pytest.mark.parametrize("early", [True, False], ids=["in-the-step", "in-the-loop"])
def test_the_variable_of_the_loop_holds_the_last_state(error, early):
    taken = []

    def interrupted(state, x):
        if early and len(taken) == 2:
            raise error
        return STEP(state, x)

    last = []

    def loop():
        for state, info in steps(interrupted, start(), batches(5)):
            last[:] = [state]
            taken.append(info)
            if not early and len(taken) == 2:
                raise error

    with pytest.raises(error):
        loop()
    torch.testing.assert_close(last, [fit(STEP, start(), batches(2))], rtol=0, atol=0)


def test_nothing_is_computed_before_it_is_asked_for():
    drawn = []
    pairs = steps(STEP, start(), (drawn.append(x) or x for x in batches(4)))
    assert not drawn
    next(pairs)
    next(pairs)
    assert len(drawn) == 2


def test_a_loop_that_stalls_ends_with_an_error_after_every_step_was_seen():
    seen, data = [], batches(3) + [torch.full((3,), torch.inf)] * 9
    with pytest.raises(TrainingStalled, match="steps: the last 5 steps were skipped") as stalled:
        seen.extend(steps(STEP, start(), data, patience=5))
    torch.testing.assert_close(stalled.value.state, fit(STEP, start(), data[:3]), rtol=0, atol=0)


def test_what_cannot_be_looped_is_refused_at_once():
    with pytest.raises(TypeError, match="steps: step must be a function, found TrainState"):
        steps(start(), STEP, batches(1))
    with pytest.raises(ValueError, match="steps: patience must be an integer of at least 1, found 0"):
        steps(STEP, start(), batches(1), patience=0)
