"""PBI: a projection in NumPy, the norm of the weights, the ray itself, and the peer's numbers."""

import math

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from scalarizations import LOSSES, calls, check_direction, check_slopes

from functional_jd.aggregators.pbi import pbi, value

U, Z = torch.tensor([0.2, 0.3, 0.5], dtype=torch.float64), torch.tensor([0.1, -0.5, 0.25], dtype=torch.float64)
numbers = st.lists(st.integers(-9, 9).map(float), min_size=3, max_size=3)
shares = st.lists(st.integers(1, 9).map(float), min_size=1, max_size=4)


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


def s(losses):
    n = U / U.norm()
    along = (losses - Z) @ n
    return along + 5 * (losses - Z - along * n).norm()


def test_the_direction_is_the_gradient():
    check_direction(pbi(5.0, U, Z), s)
    check_slopes(pbi(5.0, U, Z), s, LOSSES[1])


def test_derivatives_are_finite_on_the_ray():
    slopes = torch.func.jacrev(lambda losses: calls(pbi(5.0, U), [losses])[0])(2 * U)
    assert slopes.isfinite().all()
