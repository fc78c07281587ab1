"""PCD: the best of all active sets, the shares it grants, and the running mean of the paper."""

import pytest
import torch
from bounds import gramian_bound

import functional_jd as jd


def test_every_objective_has_its_own_share():
    # Both constraints bind: the second coordinate is 0.5, the third 0.25, and the first is free.
    J = torch.tensor([[1.0, 0.0, 0.0], [0.0, 1.0, 0.0], [0.0, 0.0, 1.0]], dtype=torch.float64)
    expected = torch.tensor([1.0, 0.5, 0.25], dtype=torch.float64)
    direction = jd.aggregate(jd.pcd([0.5, 0.25]), J).direction
    torch.testing.assert_close(direction, expected / expected.norm())


@pytest.mark.parametrize("m", [2, 12, 40])
@pytest.mark.parametrize("tau", [0.0, 0.1])
def test_rows_of_very_different_norms_have_their_shares(m, tau):
    generator = torch.Generator().manual_seed(m)
    N = torch.nn.functional.normalize(torch.randn(m, m + 5, dtype=torch.float64, generator=generator))
    norms = 10 ** torch.linspace(-18, 18, m, dtype=torch.float64).flip(0)[torch.randperm(m, generator=generator)]
    weights = jd.aggregate(jd.pcd(tau), N * norms.unsqueeze(1)).weights
    steps = weights * norms / norms[0]  # of the unit rows, to a direction of length one
    multipliers = steps / steps[0]  # as the problem has them, where the first row counts one
    slack = (N @ (multipliers @ N) - tau)[1:]
    size = multipliers.abs().sum()
    rounding = float(gramian_bound(N))
    assert (steps @ N).norm() == pytest.approx(1, abs=rounding)
    assert multipliers.min() >= -rounding
    assert slack.min() >= -rounding * size
    assert (multipliers[1:] * slack).abs().max() <= rounding * size**2


@pytest.mark.parametrize("tau", [1e-9, 0.02, 1.0, [1e-3, 1.0]])
def test_shares_that_exclude_each_other_are_dropped(tau):
    J = torch.tensor([[1.0, 2.0, 3.0], [0.0, 1.0, 0.0], [0.0, -2.0, 0.0]], dtype=torch.float64)
    torch.testing.assert_close(jd.aggregate(jd.pcd(tau), J).direction, J[0])


def test_without_shares_opposite_rows_leave_what_is_across_them():
    J = torch.tensor([[1.0, 2.0, 3.0], [0.0, 1.0, 0.0], [0.0, -2.0, 0.0]], dtype=torch.float64)
    across = torch.tensor([1.0, 0.0, 3.0], dtype=torch.float64)
    torch.testing.assert_close(jd.aggregate(jd.pcd(0.0), J).direction, across / across.norm() * J[0].norm())


def test_a_first_row_that_is_zero_or_cancelled_gives_zero():
    J = torch.tensor([[3.0, 1.0, 2.0], [-3.0, -1.0, -2.0]], dtype=torch.float64) / 7
    assert jd.aggregate(jd.pcd(0.0), J).direction.tolist() == [0, 0, 0]
    assert jd.aggregate(jd.pcd(), J * torch.tensor([[0.0], [1.0]])).direction.tolist() == [0, 0, 0]
