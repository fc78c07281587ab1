"""IMTL-G: equal projections, the paper's closed form on the rows, the peer's numbers, derivatives by differences."""

import numpy as np
import pytest
import torch
from bounds import check_within, eps, gramian_bound, half_the_digits
from hypothesis import assume, given
from sequences import integer_jacobians
from torch.func import jacfwd

from functional_jd.aggregation.aggregate import aggregate
from functional_jd.aggregators.imtl_g import imtl_g


def direction(J):
    return aggregate(imtl_g(), J).direction


@given(integer_jacobians(rows=(2, 6)).map(torch.Tensor.numpy))
def test_the_papers_closed_form_on_the_rows(J):
    assume(np.linalg.matrix_rank(J) == len(J))
    units = J / np.linalg.norm(J, axis=1, keepdims=True)
    U, D = units[:1] - units[1:], J[:1] - J[1:]
    assume(np.linalg.cond(U @ D.T) < 1 / half_the_digits())
    others = np.linalg.solve((D @ U.T).T, U @ J[0])  # the paper's alpha = g_1 U' (D U')^-1
    expected = np.concatenate([[1 - others.sum()], others])
    found, rows = aggregate(imtl_g(), torch.from_numpy(J)).weights, torch.from_numpy(J)
    bound = gramian_bound(rows, np.abs(expected).max() * (1 + np.linalg.cond(U @ D.T)))
    check_within(found, torch.from_numpy(expected), bound)


@pytest.mark.parametrize("exponent", [-100, -40, 0, 40, 100])
def test_rows_of_zeros_do_not_tell_what_is_short(exponent):
    J = torch.tensor([[0.0], [1.0], [1.0]], dtype=torch.float64) * 2.0**exponent
    torch.testing.assert_close(direction(J), J[1])


@pytest.mark.parametrize("angle", [1e-2, 1e-3, 1e-4])
def test_derivatives_are_accurate_where_two_rows_are_nearly_parallel(angle):
    half, norms = torch.tensor(angle / 2, dtype=torch.float64), torch.tensor([[2.0], [3.0]], dtype=torch.float64)

    def turned(x):  # the first row turns away from the second one by x
        angles = torch.stack([half + x, -half])
        return direction(norms * torch.stack([angles.cos(), angles.sin()], dim=1))

    # The weights stay 3/5 and 2/5: the direction is `12/5 cos(half + x / 2)` at the angle x / 2.
    expected = 1.2 * torch.stack([-half.sin(), half.cos()])
    slope = jacfwd(turned)(torch.zeros((), dtype=torch.float64))
    check_within(slope, expected, 64 * eps() / angle**3)  # what rounding of the cosines does to them
