"""Geometric mean: SciPy's, its slopes, and what lies outside its domain."""

import pytest
import scipy.stats
import torch
from bounds import eps
from hypothesis import given
from hypothesis import strategies as st
from scalarizations import check_direction, check_slopes

from functional_jd.aggregators.geometric_mean import geometric_mean, value

positive = st.lists(st.floats(1e-3, 1e3), min_size=1, max_size=5).map(lambda x: torch.tensor(x, dtype=torch.float64))


@given(positive)
def test_equal_to_scipy_s_and_its_slopes(losses):
    assert value(losses).item() == pytest.approx(scipy.stats.gmean(losses.numpy()), rel=64 * eps())
    check_slopes(geometric_mean(), lambda losses: losses.prod() ** (1 / len(losses)), losses)


def test_the_direction_is_the_gradient():
    check_direction(geometric_mean(), lambda losses: losses.prod() ** (1 / 3))
