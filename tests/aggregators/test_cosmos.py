"""COSMOS: NumPy's cosine, orthogonality of the reward, and the peer's numbers."""

import math

import numpy as np
import pytest
import torch
from bounds import eps
from hypothesis import given
from hypothesis import strategies as st
from scalarizations import LOSSES, calls, check_direction, check_slopes

from functional_jd.aggregators.constant import constant
from functional_jd.aggregators.cosmos import cosmos, value

U = torch.tensor([0.2, 0.3, 0.5], dtype=torch.float64)
numbers = st.lists(st.integers(1, 9).map(float), min_size=3, max_size=3)


def test_value_at_1_2_and_4():
    uniform = torch.full((3,), 1 / 3, dtype=torch.float64)
    assert value(LOSSES[0], 1.0, uniform).item() == pytest.approx(1.451416, abs=1e-6)


@given(numbers, numbers, st.sampled_from([0.0, 0.5, 8.0]))
def test_what_the_reward_adds_is_orthogonal_to_the_losses_and_lowers_the_angle(losses, weights, reward):
    u, L = np.array(weights), np.array(losses)
    cosine = u @ L / np.linalg.norm(u) / np.linalg.norm(L)
    found = value(torch.tensor(losses).double(), reward, torch.tensor(weights).double())
    assert found.item() == pytest.approx(u @ L - reward * cosine)
    pull = calls(cosmos(reward, weights), [torch.tensor(losses)])[0][0].numpy() - u
    rounding = 16 * eps() * (u + np.abs(pull))
    assert abs(pull @ L) <= rounding @ L
    slope = -reward * math.sqrt(max(0, 1 - cosine**2)) / np.linalg.norm(L)  # of minus the cosine, over the angle
    assert np.linalg.norm(pull) == pytest.approx(-slope, abs=1e-6)
    assert pull @ u <= rounding @ u


@given(numbers, st.sampled_from([0.1, 5.0]))
def test_on_the_ray_and_without_reward_it_is_the_weighted_sum(weights, reward):
    u = torch.tensor(weights, dtype=torch.float64)
    expected, _ = calls(constant(u), [u])
    torch.testing.assert_close(calls(cosmos(reward, u), [2 * u])[0], expected)
    torch.testing.assert_close(calls(cosmos(0.0, u), LOSSES[:1])[0], expected)


def test_the_direction_is_the_gradient():
    def s(losses):
        return U @ losses - 2 * torch.nn.functional.cosine_similarity(U, losses, dim=0)

    check_direction(cosmos(2.0, U), s)
    check_slopes(cosmos(2.0, U), s, LOSSES[2])


# torchjd 0.18, COSMOS(2.0, [.2, .3, .5]) in float64: the gradients at LOSSES
PEER = [
    [0.152800512, 0.276400256, 0.523599744],
    [0.071472591, 0.440885813, 0.141606264],
    [0.442923611, -0.024750512, 0.230226937],
    [0.380694024, 0.252169229, -0.562906026],
]


def test_equal_to_the_peer():
    torch.testing.assert_close(calls(cosmos(2.0, U), LOSSES)[0].tolist(), PEER, atol=1e-9, rtol=0)


def test_weights_drawn_in_the_step_are_differentiated():
    weights = lambda u: calls(cosmos(2.0, u), LOSSES[:1])[0]
    assert torch.autograd.gradcheck(weights, U.clone().requires_grad_())


@pytest.mark.parametrize("unit", [1e-200, 1e-30, 1e30, 1e200])
def test_units_whose_squares_overflow_or_vanish_are_units(unit):
    losses, u = torch.tensor([1.0, 2.0, 4.0], dtype=torch.float64), torch.tensor([3.0, 1.0, 2.0], dtype=torch.float64)
    expected = calls(cosmos(8.0, u), [losses])[0][0]
    torch.testing.assert_close(calls(cosmos(8.0 * unit, u), [losses * unit])[0][0], expected, rtol=0, atol=64 * eps())
