"""Uncertainty weighting: joint gradient descent, where it ends, and the peer's numbers."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
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


# torchjd 0.18, UW(3) in float64 with torch.optim.SGD(lr): the gradients of four calls at LOSSES
PEER = {
    0.1: [
        [0.5, 0.5, 0.5],
        [0.5, 0.475614712, 0.430353988],
        [0.51265756, 0.433513824, 0.433361694],
        [0.486422013, 0.450827976, 0.426907963],
    ],
    0.5: [
        [0.5, 0.5, 0.5],
        [0.5, 0.389400392, 0.236183276],
        [0.566574227, 0.278803578, 0.269486005],
        [0.412829169, 0.345729634, 0.282704436],
    ],
}


@pytest.mark.parametrize("rate", PEER)
def test_equal_to_the_peer_over_four_calls(rate):
    torch.testing.assert_close(calls(uw(rate), LOSSES)[0].tolist(), PEER[rate], atol=1e-9, rtol=0)


@given(
    st.lists(st.lists(st.floats(0, 10), min_size=2, max_size=2), min_size=1, max_size=5), st.sampled_from([0.1, 0.5])
)
def test_equal_to_torch_s_descent_on_log_variances_and_losses(sequence, rate):
    sequence = torch.tensor(sequence, dtype=torch.float64)
    v, state = torch.nn.Parameter(torch.zeros(2, dtype=torch.float64)), None
    descent = torch.optim.SGD([v], lr=rate)
    for losses in sequence:
        _, weights, state = aggregate(uw(rate), ROWS[:2], state, losses=losses)
        leaf = losses.clone().requires_grad_()
        descent.zero_grad()
        ((leaf / v.exp() + v) / 2).sum().backward()
        descent.step()
        torch.testing.assert_close(weights, leaf.grad)
        torch.testing.assert_close(state.log_variances, v.detach())


def test_losses_that_never_change_end_with_all_weighted_losses_one_half():
    losses = torch.tensor([0.1, 0.5, 1.0, 3.0, 10.0], dtype=torch.float64)
    state = uw(0.5).init(losses)
    for _ in range(150):
        weights, state = uw(0.5).update(losses, state)
    torch.testing.assert_close(weights * losses, torch.full_like(losses, 0.5))


def test_losses_that_are_not_finite_show_in_the_state():
    state = aggregate(uw(), ROWS, losses=torch.tensor([1.0, math.nan, 1.0])).state
    assert state.log_variances.isfinite().tolist() == [True, False, True]
