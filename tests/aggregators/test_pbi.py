"""PBI: a projection in NumPy, the norm of the weights, the ray itself, and the peer's numbers."""

import math

import numpy as np
import pytest
import torch
from bounds import eps
from hypothesis import assume, given
from hypothesis import strategies as st
from scalarizations import LOSSES, calls, check_direction, check_slopes

from functional_jd.aggregators.pbi import pbi, value

U, Z = torch.tensor([0.2, 0.3, 0.5], dtype=torch.float64), torch.tensor([0.1, -0.5, 0.25], dtype=torch.float64)
numbers = st.lists(st.integers(-9, 9).map(float), min_size=3, max_size=3)
shares = st.lists(st.integers(1, 9).map(float), min_size=1, max_size=4)


def test_value_at_1_2_and_4():
    found = value(LOSSES[0], 5.0, torch.ones(3, dtype=torch.float64)).item()
    assert found == pytest.approx(7 / math.sqrt(3) + 5 * math.sqrt(14 / 3), rel=16 * eps())
    assert found == pytest.approx(14.842688, abs=3e-6)  # the peer's, in float32


@given(numbers, numbers, st.sampled_from([0.0, 0.5, 5.0]))
def test_two_orthogonal_parts_that_pull_with_their_own_length(losses, reference, theta):
    n, start = U.numpy() / np.linalg.norm(U.numpy()), np.array(losses) - np.array(reference)
    aside = np.linalg.norm(start - n * (n @ start))
    assume(aside > 1e-6)
    L, z = torch.tensor(losses).double(), torch.tensor(reference).double()
    assert value(L, theta, U, z).item() == pytest.approx(n @ start + theta * aside)
    weights = calls(pbi(theta, U, z), [L])[0][0].numpy()
    assert weights @ n == pytest.approx(1)
    assert np.linalg.norm(weights) == pytest.approx(math.sqrt(1 + theta**2))


@given(shares, st.integers(-30, 30), st.sampled_from([0.0, 1.0, 3.0, 7.0]))
def test_on_the_ray_the_weights_are_its_own_whatever_is_rounded(weights, exponent, distance):
    u = torch.tensor(weights, dtype=torch.float64) / 3
    losses = u * distance * 10.0**exponent
    found = pbi(5.0, u).update(losses, ())[0]
    torch.testing.assert_close(found, u / u.norm())


@pytest.mark.parametrize("unit", [1e-200, 1e-30, 1e30, 1e200])
def test_units_whose_squares_overflow_or_vanish_are_units(unit):
    losses, u = torch.tensor([1.0, 2.0, 4.0], dtype=torch.float64), torch.tensor([3.0, 1.0, 2.0], dtype=torch.float64)
    expected = calls(pbi(5.0, u), [losses])[0][0]
    for rule in (pbi(5.0, u), pbi(5.0, u * unit)):
        torch.testing.assert_close(calls(rule, [losses * unit])[0][0], expected, rtol=0, atol=64 * eps())


def s(losses):
    n = U / U.norm()
    along = (losses - Z) @ n
    return along + 5 * (losses - Z - along * n).norm()


def test_the_direction_is_the_gradient():
    check_direction(pbi(5.0, U, Z), s)
    check_slopes(pbi(5.0, U, Z), s, LOSSES[1])


# torchjd 0.18, PBI(5.0, [.2, .3, .5]) and PBI(5.0, [.2, .3, .5], [.1, -.5, .25]) in float64: the gradients at LOSSES
PEER = [
    [-3.577552021, -1.247555676, 3.412437014],
    [-0.371202594, 4.850258361, -1.528791178],
    [4.732193738, -1.845592278, 0.447360673],
    [3.560543699, 3.042276622, -2.016700652],
]
PEER_WITH_REFERENCE = [
    [-4.136980549, 2.697004163, 1.269472523],
    [-0.415936981, 4.851923824, -1.511896701],
    [5.053969357, -0.347958063, -0.579930105],
    [2.338651411, 4.010427395, -2.108834201],
]


def test_equal_to_the_peer():
    torch.testing.assert_close(calls(pbi(5.0, U), LOSSES)[0].tolist(), PEER, atol=1e-9, rtol=0)
    torch.testing.assert_close(calls(pbi(5.0, U, Z), LOSSES)[0].tolist(), PEER_WITH_REFERENCE, atol=1e-9, rtol=0)


def test_derivatives_are_finite_on_the_ray():
    slopes = torch.func.jacrev(lambda losses: calls(pbi(5.0, U), [losses])[0])(2 * U)
    assert slopes.isfinite().all()
