"""Smooth Tchebycheff: SciPy's softmax, bounds, limits, and the peer's numbers."""

import math

import pytest
import scipy.special
import torch
from bounds import check_within, eps
from hypothesis import given
from hypothesis import strategies as st
from scalarizations import LOSSES, calls, check_direction, check_slopes

from functional_jd.aggregators.stch import stch, value

U, Z = torch.tensor([0.2, 0.3, 0.5], dtype=torch.float64), torch.tensor([0.1, -0.5, 0.25], dtype=torch.float64)
numbers = st.lists(st.integers(-9, 9).map(lambda k: k / 4), min_size=3, max_size=3).map(
    lambda x: torch.tensor(x, dtype=torch.float64)
)


@pytest.mark.parametrize(("mu", "expected"), [(1.0, 1.965295), (0.1, 1.333465)])
def test_values_at_1_2_and_4(mu, expected):
    assert value(LOSSES[0], mu, 1 / 3).item() == pytest.approx(expected, abs=1e-6)


@given(numbers, numbers, st.sampled_from([0.01, 0.5, 1.0, 30.0]))
def test_the_weights_are_scipy_s_softmax(losses, reference, mu):
    weights, _ = calls(stch(mu, U, reference), [losses])
    expected = U.numpy() * scipy.special.softmax((U * (losses - reference)).numpy() / mu)
    exponents = (U * (losses - reference)).abs().max() / mu
    check_within(weights[0], torch.as_tensor(expected), 16 * eps() * (1 + exponents))


@pytest.mark.parametrize("mu", [1e-300, 1e-320])
def test_however_small_mu_is_the_worst_loss_has_all_the_weight(mu):
    losses = torch.tensor([1e30, 3e30, -2e30], dtype=torch.float64)
    weights, _ = calls(stch(mu, U), [losses])
    assert weights[0].tolist() == [0, U[1].item(), 0]


@given(numbers, st.sampled_from([0.01, 1.0, 30.0]))
def test_the_value_is_the_maximum_or_a_little_more(losses, mu):
    worst = (U * (losses - Z)).max()
    rounding = 16 * eps() * (1 + losses.abs().max() + mu)
    assert worst - rounding <= value(losses, mu, U, Z) <= worst + mu * math.log(3) + rounding


def smooth(u, z, mu):
    """In the textbook's form."""
    return lambda losses: mu * (u * (losses - z) / mu).exp().sum().log()


def test_the_direction_is_the_gradient():
    check_direction(stch(), smooth(1 / 3, 0, 1))
    check_direction(stch(0.5, U, Z), smooth(U, Z, 0.5))
    check_slopes(stch(0.5, U, Z), smooth(U, Z, 0.5), LOSSES[1])


# torchjd 0.18, STCH(1.0) and STCH(0.1, [.2, .3, .5], [.1, -.5, .25]) in float64: the gradients at LOSSES
PEER = [
    [0.065181898, 0.090968667, 0.177182769],
    [0.07436598, 0.171114328, 0.087853025],
    [0.138627987, 0.077359289, 0.117346057],
    [0.121343724, 0.121343724, 0.090645885],
]
PEER_WITH_ALL = [
    [9e-09, 3.902e-06, 0.499993475],
    [1.2242e-05, 0.299630806, 0.000584719],
    [0.015624274, 0.004974331, 0.452648763],
    [0.012524886, 0.279550404, 0.002770446],
]


def test_equal_to_the_peer():
    torch.testing.assert_close(calls(stch(1.0), LOSSES)[0].tolist(), PEER, atol=1e-9, rtol=0)
    torch.testing.assert_close(calls(stch(0.1, U, Z), LOSSES)[0].tolist(), PEER_WITH_ALL, atol=1e-9, rtol=0)


def test_large_losses_and_a_small_mu_do_not_overflow():
    weights, _ = calls(stch(1e-3), LOSSES * 1e6)
    torch.testing.assert_close(weights[0], torch.tensor([0, 0, 1 / 3], dtype=torch.float64))


def test_derivatives_reach_weights_and_reference():
    given = (U.clone().requires_grad_(), Z.clone().requires_grad_())
    assert torch.autograd.gradcheck(lambda u, z: calls(stch(0.5, u, z), LOSSES[:1])[0], given)
