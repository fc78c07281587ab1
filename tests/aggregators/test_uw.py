"""Uncertainty weighting: joint gradient descent, where it ends, and the peer's numbers."""

import math

import torch
from scalarizations import LOSSES, ROWS, calls, check_direction, check_slopes

from functional_jd.aggregation.aggregate import aggregate
from functional_jd.aggregators.uw import UwState, uw, value

START = UwState(torch.tensor([0.5, -1.0, 0.25], dtype=torch.float64))


def s(losses):
    v = START.log_variances
    return sum(loss / (2 * v_i.exp()) + v_i / 2 for loss, v_i in zip(losses, v, strict=True))


def test_at_the_start_it_is_half_the_sum():
    assert value(LOSSES[0], torch.zeros(3, dtype=torch.float64)).item() == 3.5
    assert calls(uw(), LOSSES[:1])[0].tolist() == [[0.5] * 3]


def test_the_direction_is_the_gradient_whatever_was_learned():
    check_direction(uw(), lambda losses: losses.sum() / 2)
    check_direction(uw(), s, START)
    check_slopes(uw(), s, LOSSES[1], START)


def test_losses_that_never_change_end_with_all_weighted_losses_one_half():
    losses = torch.tensor([0.1, 0.5, 1.0, 3.0, 10.0], dtype=torch.float64)
    state = uw(0.5).init(losses)
    for _ in range(150):
        weights, state = uw(0.5).update(losses, state)
    torch.testing.assert_close(weights * losses, torch.full_like(losses, 0.5))


def test_losses_that_are_not_finite_show_in_the_state():
    state = aggregate(uw(), ROWS, losses=torch.tensor([1.0, math.nan, 1.0])).state
    assert state.log_variances.isfinite().tolist() == [True, False, True]
