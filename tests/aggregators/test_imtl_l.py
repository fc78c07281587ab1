"""IMTL-L: joint gradient descent, where it ends, and the peer's numbers."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scalarizations import LOSSES, ROWS, calls, check_direction, check_slopes

from functional_jd.aggregation.aggregate import aggregate
from functional_jd.aggregators.imtl_l import ImtlLState, imtl_l, value
from functional_jd.aggregators.uw import uw

START = ImtlLState(torch.tensor([0.5, -1.0, 0.25], dtype=torch.float64))
positive = st.lists(st.floats(0.1, 8), min_size=3, max_size=3).map(lambda x: torch.tensor(x, dtype=torch.float64))


def s(losses):
    return sum(loss * v.exp() - v for loss, v in zip(losses, START.log_scales, strict=True))


def test_at_the_start_it_is_the_sum():
    assert value(LOSSES[0], torch.zeros(3, dtype=torch.float64)).item() == 7
    assert calls(imtl_l(), LOSSES[:1])[0].tolist() == [[1.0] * 3]


def test_the_direction_is_the_gradient_whatever_was_learned():
    check_direction(imtl_l(), lambda losses: losses.sum())
    check_direction(imtl_l(), s, START)
    check_slopes(imtl_l(), s, LOSSES[1], START)


# torchjd 0.18, IMTLL(3) in float64 with torch.optim.SGD(lr): the gradients of four calls at LOSSES
PEER = {
    0.1: [
        [1.0, 1.0, 1.0],
        [1.0, 0.904837418, 0.740818221],
        [1.051271096, 0.762272462, 0.760269866],
        [0.941525149, 0.826539115, 0.749669901],
    ],
    0.25: [
        [1.0, 1.0, 1.0],
        [1.0, 0.778800783, 0.472366553],
        [1.133148453, 0.557607155, 0.53897201],
        [0.825658337, 0.691459267, 0.565408872],
    ],
}


@pytest.mark.parametrize("rate", PEER)
def test_equal_to_the_peer_over_four_calls(rate):
    torch.testing.assert_close(calls(imtl_l(rate), LOSSES)[0].tolist(), PEER[rate], atol=1e-9, rtol=0)


def test_losses_that_never_change_end_with_all_scaled_losses_one():
    losses = torch.tensor([0.1, 0.5, 1.0, 3.0, 8.0], dtype=torch.float64)
    state = imtl_l(0.25).init(losses)
    for _ in range(150):
        weights, state = imtl_l(0.25).update(losses, state)
    torch.testing.assert_close(weights * losses, torch.ones_like(losses))


@given(st.lists(positive, min_size=1, max_size=4), st.sampled_from([0.05, 0.3]))
def test_uncertainty_weighting_at_twice_the_rate_has_half_the_weights(sequence, rate):
    torch.testing.assert_close(calls(uw(2 * rate), sequence)[0] * 2, calls(imtl_l(rate), sequence)[0])


def test_losses_that_are_not_finite_show_in_the_state():
    state = aggregate(imtl_l(), ROWS, losses=torch.tensor([1.0, math.nan, 1.0])).state
    assert state.log_scales.isfinite().tolist() == [True, False, True]
