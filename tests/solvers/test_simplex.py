"""The projection on the simplex: its conditions of optimality, far from one too, and its derivatives."""

import numpy as np
import pytest
import torch
from bounds import eps, sum_bound
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from functional_jd.solvers.linear_program import simplex_projection

points = hnp.arrays(np.float64, st.integers(1, 8), elements=st.integers(-12, 12).map(lambda n: n / 4)).map(
    torch.from_numpy
)


@given(points, st.integers(-60, 60))
def test_nearest_by_the_conditions_of_optimality(y, exponent):
    y = y * 2.0**exponent
    w = simplex_projection(y)
    assert (w >= 0).all()
    assert abs(w.sum() - 1) <= 4 * sum_bound(w)
    # y - w is one number on the support, and y lies below it elsewhere.
    theta = (y - w)[w > 0]
    rounding = 4 * len(y) * eps() * y.abs().max().clamp(min=1)
    assert theta.max() - theta.min() <= rounding
    assert (y[w == 0] <= theta.min() + rounding).all()


def test_one_is_not_lost_beside_large_entries():
    assert simplex_projection(torch.tensor([1e36, -1e36, 5.0], dtype=torch.float64)).tolist() == [1, 0, 0]
    assert simplex_projection(torch.tensor([1e36, 1e36, 5.0], dtype=torch.float64)).tolist() == [0.5, 0.5, 0]


@pytest.mark.parametrize("poison", [torch.nan, torch.inf, -torch.inf])
def test_what_is_not_finite_is_nan_in_its_row_only(poison):
    y = torch.zeros(2, 3, dtype=torch.float64)
    y[0, 1] = poison
    w = simplex_projection(y)
    assert w[0].isnan().all()
    torch.testing.assert_close(w[1], torch.full((3,), 1 / 3, dtype=torch.float64))


def test_derivatives_are_those_of_finite_differences():
    y = torch.tensor([[0.3, 0.8, -2.0, 0.6], [0.1, 0.2, 0.3, 0.35]], dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(simplex_projection, y, check_forward_ad=True, check_batched_grad=True)
    assert torch.autograd.gradgradcheck(simplex_projection, y)
