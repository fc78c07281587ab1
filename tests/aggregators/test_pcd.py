"""PCD: the best of all active sets, the shares it grants, and the running mean of the paper."""

from itertools import combinations

import pytest
import torch
from bounds import check_within, gramian_bound, half_the_digits
from hypothesis import given
from hypothesis import strategies as st
from sequences import integer_jacobians, number

from functional_jd.aggregation.aggregate import aggregate
from functional_jd.aggregators.pcd import pcd

taus = st.sampled_from([0.0, 0.02, 0.5, 1.0])


def best_of_all_active_sets(J, tau, usual=None):
    """The feasible point nearest to the first row among those of all active sets; the first row if there is none."""
    norms = torch.linalg.vector_norm(J, dim=1)
    usual = norms if usual is None else usual
    H = J / torch.where(usual == 0, 1, usual).unsqueeze(1)
    lower = tau * (H**2).sum(1)
    best = None
    for size in range(len(J)):
        for chosen in combinations(range(1, len(J)), size):
            span = H[list(chosen)]
            d = H[0] + torch.linalg.pinv(span) @ (lower[list(chosen)] - span @ H[0]) if chosen else H[0]
            feasible = (H[1:] @ d >= lower[1:] - 1e-9).all()
            if feasible and (best is None or (d - H[0]).norm() < (best - H[0]).norm()):
                best = d
    best = H[0] if best is None else best
    return best * 0 if best.norm() < 1e-9 else best / best.norm() * norms[0]


@given(integer_jacobians((1, 5), (1, 5), 3), taus)
def test_equal_to_the_best_of_all_active_sets(J, tau):
    direction = aggregate(pcd(tau), J).direction
    check_within(direction, best_of_all_active_sets(J, tau), half_the_digits(J[0].norm()))


@given(integer_jacobians((1, 5), (1, 5), 3), taus, st.sampled_from([0.0, 0.9]))
def test_normalised_by_the_running_means_of_the_paper(J, tau, beta):
    rule, state, mean = pcd(tau, beta), None, torch.zeros(len(J), dtype=torch.float64)
    for call, factors in enumerate([1.0, 2.0, 0.25]):
        rows = J * factors ** torch.arange(len(J)).unsqueeze(1)
        direction, _, state = aggregate(rule, rows, state)
        mean = beta * mean + (1 - beta) * (rows**2).sum(1)
        usual = (mean / (1 - beta ** (call + 1))).sqrt()
        check_within(direction, best_of_all_active_sets(rows, tau, usual), half_the_digits(rows[0].norm()))


@pytest.mark.parametrize(("tau", "expected"), [(0.02, [-0.8200, 2.9434, 2.9434]), (0.5, [2.0889, 2.6112, 2.6112])])
def test_the_peer_s_value_on_two_rows(tau, expected):
    J = torch.tensor([[-4.0, 1.0, 1.0], [6.0, 1.0, 1.0]])
    torch.testing.assert_close(aggregate(pcd(tau), J).direction, torch.tensor(expected), atol=1e-4, rtol=0)


def test_equal_to_the_peer_over_four_calls():
    # torchjd 0.18, PCD(tau=0.3, eps=0)(number(k)) for k = 0 .. 3
    peer = [
        [-5.819791, -1.917432, 1.984927, 2.124513],
        [-3.427574, 4.571223, 2.51333, -1.427875],
        [-3.011148, 3.846151, 0.126534, 2.474692],
        [-4.106092, 0.404532, 0.465304, 4.975928],
    ]
    rule, state = pcd(0.3), None
    for k, expected in enumerate(peer):
        direction, _, state = aggregate(rule, number(k), state)
        torch.testing.assert_close(direction.tolist(), expected, atol=1e-5, rtol=0)


def test_every_objective_has_its_own_share():
    # Both constraints bind: the second coordinate is 0.5, the third 0.25, and the first is free.
    J = torch.tensor([[1.0, 0.0, 0.0], [0.0, 1.0, 0.0], [0.0, 0.0, 1.0]], dtype=torch.float64)
    expected = torch.tensor([1.0, 0.5, 0.25], dtype=torch.float64)
    direction = aggregate(pcd([0.5, 0.25]), J).direction
    torch.testing.assert_close(direction, expected / expected.norm())


@pytest.mark.parametrize("m", [2, 12, 40])
@pytest.mark.parametrize("tau", [0.0, 0.1])
def test_rows_of_very_different_norms_have_their_shares(m, tau):
    generator = torch.Generator().manual_seed(m)
    N = torch.nn.functional.normalize(torch.randn(m, m + 5, dtype=torch.float64, generator=generator))
    norms = 10 ** torch.linspace(-18, 18, m, dtype=torch.float64).flip(0)[torch.randperm(m, generator=generator)]
    weights = aggregate(pcd(tau), N * norms.unsqueeze(1)).weights
    steps = weights * norms / norms[0]  # of the unit rows, to a direction of length one
    multipliers = steps / steps[0]  # as the problem has them, where the first row counts one
    slack = (N @ (multipliers @ N) - tau)[1:]
    size = multipliers.abs().sum()
    rounding = float(gramian_bound(N))
    assert (steps @ N).norm() == pytest.approx(1, abs=rounding)
    assert multipliers.min() >= -rounding
    assert slack.min() >= -rounding * size
    assert (multipliers[1:] * slack).abs().max() <= rounding * size**2


@given(integer_jacobians((1, 5), (1, 5), 3), st.integers(-55, 55), st.integers(-55, 55))
def test_scaling_the_first_row_scales_the_direction_and_scaling_others_changes_nothing(J, first, others):
    factors = torch.tensor([2.0**first] + [2.0**others] * (len(J) - 1), dtype=torch.float64).unsqueeze(1)
    expected = aggregate(pcd(0.3), J).direction * 2.0**first
    torch.testing.assert_close(aggregate(pcd(0.3), J * factors).direction, expected, atol=0, rtol=1e-9)


def test_rows_that_are_suddenly_small_still_have_their_shares():
    rule = pcd(0.3)
    state = aggregate(rule, number(0)).state
    direction = aggregate(rule, 1e-14 * number(3), state).direction
    usual = (0.999 * (number(0) ** 2).sum(1) + 1e-28 * (number(3) ** 2).sum(1)).sqrt()
    expected = best_of_all_active_sets(number(3), 0.3, usual)
    check_within(direction * 1e14, expected, gramian_bound(number(3), expected.norm()))
    assert (expected - number(3)[0]).norm() > 1


@pytest.mark.parametrize("tau", [1e-9, 0.02, 1.0, [1e-3, 1.0]])
def test_shares_that_exclude_each_other_are_dropped(tau):
    J = torch.tensor([[1.0, 2.0, 3.0], [0.0, 1.0, 0.0], [0.0, -2.0, 0.0]], dtype=torch.float64)
    torch.testing.assert_close(aggregate(pcd(tau), J).direction, J[0])


def test_without_shares_opposite_rows_leave_what_is_across_them():
    J = torch.tensor([[1.0, 2.0, 3.0], [0.0, 1.0, 0.0], [0.0, -2.0, 0.0]], dtype=torch.float64)
    across = torch.tensor([1.0, 0.0, 3.0], dtype=torch.float64)
    torch.testing.assert_close(aggregate(pcd(0.0), J).direction, across / across.norm() * J[0].norm())


def test_a_first_row_that_is_zero_or_cancelled_gives_zero():
    J = torch.tensor([[3.0, 1.0, 2.0], [-3.0, -1.0, -2.0]], dtype=torch.float64) / 7
    assert aggregate(pcd(0.0), J).direction.tolist() == [0, 0, 0]
    assert aggregate(pcd(), J * torch.tensor([[0.0], [1.0]])).direction.tolist() == [0, 0, 0]


def twice(J):
    rule = pcd(0.4)
    state = aggregate(rule, J).state
    return aggregate(rule, J.sin(), state).direction


def test_derivatives_are_those_of_finite_differences():
    J = number(2).div(5).requires_grad_()
    assert torch.autograd.gradcheck(twice, J, check_forward_ad=True)
    assert torch.autograd.gradgradcheck(twice, J)
