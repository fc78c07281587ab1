"""IMTL-L: joint gradient descent, where it ends, and the peer's numbers."""

import math

import torch
from scalarizations import LOSSES, ROWS, calls, check_direction, check_slopes

from functional_jd.aggregation.aggregate import aggregate
from functional_jd.aggregators.imtl_l import ImtlLState, imtl_l, value

START = ImtlLState(torch.tensor([0.5, -1.0, 0.25], dtype=torch.float64))


def s(losses):
    return sum(loss * v.exp() - v for loss, v in zip(losses, START.log_scales, strict=True))


def test_at_the_start_it_is_the_sum():
    assert value(LOSSES[0], torch.zeros(3, dtype=torch.float64)).item() == 7
    assert calls(imtl_l(), LOSSES[:1])[0].tolist() == [[1.0] * 3]


def test_the_direction_is_the_gradient_whatever_was_learned():
    check_direction(imtl_l(), lambda losses: losses.sum())
    check_direction(imtl_l(), s, START)
    check_slopes(imtl_l(), s, LOSSES[1], START)


def test_losses_that_never_change_end_with_all_scaled_losses_one():
    losses = torch.tensor([0.1, 0.5, 1.0, 3.0, 8.0], dtype=torch.float64)
    state = imtl_l(0.25).init(losses)
    for _ in range(150):
        weights, state = imtl_l(0.25).update(losses, state)
    torch.testing.assert_close(weights * losses, torch.ones_like(losses))


def test_losses_that_are_not_finite_show_in_the_state():
    state = aggregate(imtl_l(), ROWS, losses=torch.tensor([1.0, math.nan, 1.0])).state
    assert state.log_scales.isfinite().tolist() == [True, False, True]
