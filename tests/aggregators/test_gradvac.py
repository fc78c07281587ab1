"""GradVac: the paper's algorithm on the rows themselves, call after call, and the singular cosines it leaves out."""

import numpy as np
import pytest
import torch
from bounds import check_within, eps, half_the_digits

from functional_jd.aggregation.aggregate import aggregate
from functional_jd.aggregators.gradvac import GradVacState, gradvac
from functional_jd.random import key

THREE = torch.tensor([[1.5, 1.0, 2.0], [1.0, -0.5, -2.0], [-2.5, 2.0, -1.0]], dtype=torch.float64)
TARGETS = torch.tensor([[0.0, 0.3, 0.5], [-0.4, 0.0, -0.2], [0.1, 0.7, 0.0]], dtype=torch.float64)


def bent(J, targets, i, order, beta):
    """Row i and its targets after the paper's algorithm, in this order, as vectors."""
    p, learnt = J[i].copy(), targets[i].copy()
    for j in order:
        cosine = p @ J[j] / np.linalg.norm(p) / np.linalg.norm(J[j])
        target = targets[i, j]
        if cosine < target:
            reach = target * (1 - cosine**2) ** 0.5 - cosine * (1 - target**2) ** 0.5
            p += np.linalg.norm(p) * reach / np.linalg.norm(J[j]) / (1 - target**2) ** 0.5 * J[j]
        learnt[j] = (1 - beta) * target + beta * cosine
    return p, learnt


def test_equal_to_the_peer_on_two_rows_call_after_call():
    """From GradVac(beta=0.5) of torchjd 0.18; the fourth and fifth call bend rows that do not conflict."""
    Js = torch.tensor(
        [
            [[0, -1, 0], [0, 1, 0]],
            [[-2, 0, -2], [-1, -3, -3]],
            [[1, 1, 3], [2, -1, 2]],
            [[1, -1, 2], [1, 1, 0]],
            [[1, -1, 1], [2, 3, 1]],
        ],
        dtype=torch.float32,
    )
    expected = torch.tensor(
        [[0, 0, 0], [-3, -3, -5], [3, 0, 5], [2.97512, 0.48756, 2.48756], [3.6119, 1.84702, 2.52012]]
    )
    state, digits = None, 1e-5
    for J, direction in zip(Js, expected, strict=True):
        result = aggregate(gradvac(key(3)), J, state)
        check_within(result.direction, direction, digits)
        state = result.state


def test_two_rows_of_any_scales_come_as_close_as_their_target():
    c = torch.tensor([[1e18], [1e-18]], dtype=torch.float64)
    J = c * torch.tensor([[1.0, 0.0], [0.0, 1.0]], dtype=torch.float64)
    targets = torch.tensor([[0.0, 0.6], [0.8, 0.0]], dtype=torch.float64)
    result = aggregate(gradvac(key(0)), J, GradVacState(key(0), targets))
    # (1, 0) is bent to (1, 3/4), of cosine 0.6 with (0, 1), and (0, 1) to (4/3, 1), of cosine 0.8 with (1, 0).
    expected = torch.tensor([1 + 1e-36 * 4 / 3, 1e-36 + 0.75], dtype=torch.float64) * 1e18
    check_within(result.direction, expected, 64 * eps() * expected)


@pytest.mark.parametrize("beta", [0.5, 1.0])
@pytest.mark.parametrize(
    "J",
    [
        [[0.0, 0.0], [0.0, 0.0], [0.0, 0.0]],
        [[1.0, 2.0], [1.0, 2.0], [2.0, 4.0]],
        [[1.0, 2.0], [-1.0, -2.0], [0.0, 0.0]],
        [[1.0, 0.0], [-0.5, 0.75**0.5], [-0.5, -(0.75**0.5)]],
        [[0.1, 0.3], [-0.3, -0.9], [0.7, 0.2]],
    ],
)
def test_degenerate_rows_stay_finite_for_a_hundred_calls(J, beta):
    J, state = torch.tensor(J, dtype=torch.float64), None
    for _ in range(100):
        result = aggregate(gradvac(key(0), beta), J, state)
        state = result.state
        assert result.weights.isfinite().all()
        assert state.targets.isfinite().all()
        assert (state.targets.abs() <= 1 + 64 * eps()).all()


def test_rows_that_were_always_parallel_or_opposite_change_nothing_and_cancel():
    for sign, expected in ((1.0, 2.0), (-1.0, 0.0)):
        g = torch.tensor([0.1, 0.7, -0.3], dtype=torch.float64)
        J, state = torch.stack([g, sign * g]), None
        for _ in range(80):  # by now the targets have become +-1, where the formula divides by zero
            result = aggregate(gradvac(key(0)), J, state)
            check_within(result.direction, expected * g, half_the_digits(g.norm()))
            state = result.state
        assert abs(float(state.targets[0, 1]) - sign) <= 64 * eps()


def test_one_row_is_kept_and_rows_of_zeros_add_nothing():
    assert torch.equal(aggregate(gradvac(key(0)), THREE[:1]).direction, THREE[0])
    targets = torch.full((3, 3), 0.5, dtype=torch.float64)
    J = torch.tensor([[1.0, 2.0], [0.0, 0.0], [0.0, 0.0]], dtype=torch.float64)
    assert torch.equal(aggregate(gradvac(key(0)), J, GradVacState(key(0), targets)).direction, J[0])


def test_derivatives_by_finite_differences_in_the_rows_and_in_the_targets():
    f = lambda J, t: aggregate(gradvac(key(0)), J, GradVacState(key(4), t)).direction
    g = lambda J, t: aggregate(gradvac(key(0)), J, GradVacState(key(4), t)).state.targets
    inputs = THREE.clone().requires_grad_(), TARGETS.clone().requires_grad_()
    assert torch.autograd.gradcheck(f, inputs, check_forward_ad=True)
    assert torch.autograd.gradcheck(g, inputs, check_forward_ad=True)
    torch.testing.assert_close(torch.func.jacrev(f)(THREE, TARGETS), torch.func.jacfwd(f)(THREE, TARGETS))


def test_a_row_of_zeros_moves_no_row_whatever_its_target():
    J = torch.tensor([[1.0, 0.0], [0.0, 0.0], [-0.6, 0.8]], dtype=torch.float64)
    targets = torch.tensor([[0.0, 0.9, 0.5], [0.0, 0.0, 0.0], [0.0, 0.9, 0.0]], dtype=torch.float64)
    # Row 0 gets the cosine 1/2 with row 2, and row 2 the cosine 0 with row 0.
    expected = torch.stack([J[0] + (0.5 * 0.8 / 0.75**0.5 + 0.6) * J[2], J[2] + 0.6 * J[0]]).sum(0)
    for seed in range(4):  # row 1 comes first for some of the keys
        found = aggregate(gradvac(key(seed)), J, GradVacState(key(seed), targets)).direction
        check_within(found, expected, 16 * eps() * 3)
