"""ConFIG: the pseudo-inverse of the unit rows themselves, the peer's numbers, derivatives by differences."""

import pytest
import torch
from bounds import check_within, eps, gramian_bound
from sequences import DEPENDENT, J3
from torch.func import jacfwd

from functional_jd.aggregation.aggregate import aggregate
from functional_jd.aggregators.config import config


def direction(J, preference=None):
    return aggregate(config(preference), J).direction


@pytest.mark.parametrize("J", [J3, DEPENDENT])
@pytest.mark.parametrize("size", [1e-300, 1e-160, 1e160, 1e300])
def test_only_ratios_of_the_preference_matter(J, size):
    u = torch.tensor([1.0, 2, 0.5], dtype=torch.float64)
    check_within(direction(J, size * u), direction(J, u), gramian_bound(J, direction(J, u).abs().max()))


@pytest.mark.parametrize("angle", [1e-2, 1e-3, 1e-4])
def test_derivatives_are_accurate_where_two_rows_are_nearly_parallel(angle):
    half, norms = torch.tensor(angle / 2, dtype=torch.float64), torch.tensor([[2.0], [3.0]], dtype=torch.float64)

    def turned(x):  # the first row turns away from the second one by x
        angles = torch.stack([half + x, -half])
        return direction(norms * torch.stack([angles.cos(), angles.sin()], dim=1))

    # Halfway between both rows, as long as the projections of both on it: `5 cos(half + x / 2)` at the angle x / 2.
    expected = 2.5 * torch.stack([-half.sin(), half.cos()])
    slope = jacfwd(turned)(torch.zeros((), dtype=torch.float64))
    check_within(slope, expected, 64 * eps() / angle**3)  # what rounding of the cosines does to them
