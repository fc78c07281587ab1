"""Smooth Tchebycheff: SciPy's softmax, bounds, limits, and the peer's numbers."""

import math

import pytest
import torch
from bounds import eps
from hypothesis import given
from hypothesis import strategies as st
from scalarizations import LOSSES, calls, check_direction, check_slopes

from functional_jd.aggregators.stch import stch, value

U, Z = torch.tensor([0.2, 0.3, 0.5], dtype=torch.float64), torch.tensor([0.1, -0.5, 0.25], dtype=torch.float64)
numbers = st.lists(st.integers(-9, 9).map(lambda k: k / 4), min_size=3, max_size=3).map(
    lambda x: torch.tensor(x, dtype=torch.float64)
)


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


def test_derivatives_reach_weights_and_reference():
    given = (U.clone().requires_grad_(), Z.clone().requires_grad_())
    assert torch.autograd.gradcheck(lambda u, z: calls(stch(0.5, u, z), LOSSES[:1])[0], given)
