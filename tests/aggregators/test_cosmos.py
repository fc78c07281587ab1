"""COSMOS: NumPy's cosine, orthogonality of the reward, and the peer's numbers."""

import math

import numpy as np
import pytest
import torch
from bounds import eps, half_the_digits
from hypothesis import given
from hypothesis import strategies as st
from scalarizations import LOSSES, calls, check_direction, check_slopes

from functional_jd.aggregators.cosmos import cosmos, value

U = torch.tensor([0.2, 0.3, 0.5], dtype=torch.float64)
numbers = st.lists(st.integers(1, 9).map(float), min_size=3, max_size=3)


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
    assert np.linalg.norm(pull) == pytest.approx(-slope, abs=4 * half_the_digits(reward / np.linalg.norm(L)))
    assert pull @ u <= rounding @ u


def test_the_direction_is_the_gradient():
    def s(losses):
        return U @ losses - 2 * torch.nn.functional.cosine_similarity(U, losses, dim=0)

    check_direction(cosmos(2.0, U), s)
    check_slopes(cosmos(2.0, U), s, LOSSES[2])


def test_weights_drawn_in_the_step_are_differentiated():
    weights = lambda u: calls(cosmos(2.0, u), LOSSES[:1])[0]
    assert torch.autograd.gradcheck(weights, U.clone().requires_grad_())
