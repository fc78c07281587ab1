"""Geometric mean: SciPy's, its slopes, and what lies outside its domain."""

import pytest
import scipy.stats
import torch
from bounds import eps
from hypothesis import given
from hypothesis import strategies as st
from scalarizations import LOSSES, calls, check_direction, check_slopes

from functional_jd.aggregators.geometric_mean import geometric_mean, value

positive = st.lists(st.floats(1e-3, 1e3), min_size=1, max_size=5).map(lambda x: torch.tensor(x, dtype=torch.float64))


def test_of_1_2_and_4_it_is_2():
    assert value(torch.tensor([1.0, 2.0, 4.0], dtype=torch.float64)).item() == pytest.approx(2, rel=4 * eps())


@given(positive)
def test_equal_to_scipy_s_and_its_slopes(losses):
    assert value(losses).item() == pytest.approx(scipy.stats.gmean(losses.numpy()), rel=64 * eps())
    check_slopes(geometric_mean(), lambda losses: losses.prod() ** (1 / len(losses)), losses)


def test_the_direction_is_the_gradient():
    check_direction(geometric_mean(), lambda losses: losses.prod() ** (1 / 3))


# torchjd 0.18, GeometricMean in float64: the gradients at LOSSES
PEER = [
    [0.666666667, 0.333333333, 0.166666667],
    [0.763142828, 0.127190471, 0.381571414],
    [0.151426716, 1.211413729, 0.201902288],
    [0.166666667, 0.166666667, 1.333333333],
]


def test_equal_to_the_peer():
    torch.testing.assert_close(calls(geometric_mean(), LOSSES)[0].tolist(), PEER, atol=1e-9, rtol=0)


@pytest.mark.parametrize("size", [1e-200, 1e200])
def test_neither_small_nor_large_losses_leave_the_range(size):
    weights, _ = calls(geometric_mean(), LOSSES * size)
    torch.testing.assert_close(weights, calls(geometric_mean(), LOSSES)[0])
