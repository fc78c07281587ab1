"""GradVac: the paper's algorithm on the rows themselves, call after call, and the singular cosines it leaves out."""

from itertools import permutations, product

import numpy as np
import pytest
import torch
from bounds import check_within, eps, gramian_bound, half_the_digits
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from functional_jd.aggregation.aggregate import aggregate
from functional_jd.aggregators.gradvac import GradVacState, gradvac
from functional_jd.aggregators.pcgrad import pcgrad
from functional_jd.random import key, split

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


def all_outcomes(J, targets, beta):
    """Directions and targets of all combinations of orders: one row each."""
    J, targets, m = J.numpy(), targets.numpy(), len(J)
    rows = [[bent(J, targets, i, order, beta) for order in permutations(set(range(m)) - {i})] for i in range(m)]
    outcomes = [[sum(p for p, _ in choice), *(t for _, t in choice)] for choice in product(*rows)]
    return torch.from_numpy(np.stack([np.concatenate(outcome) for outcome in outcomes]))


def generic(m, n):
    return hnp.arrays(np.float64, (m, n), elements=st.integers(-40, 40).map(lambda k: (k + 0.5) / 8)).map(
        torch.from_numpy
    )


@settings(max_examples=25)
@given(st.lists(generic(3, 5), min_size=3, max_size=3), st.integers(0, 1000), st.sampled_from([0.0, 0.1, 0.5, 0.9]))
def test_every_call_is_the_algorithm_with_some_orders(Js, seed, beta):
    rule, targets, state = gradvac(key(seed), beta), torch.zeros(3, 3, dtype=torch.float64), None
    for J in Js:
        rows = torch.nn.functional.normalize(J, dim=1)
        assume((rows @ rows.mT - torch.eye(3)).abs().max() < 0.999)  # nearby the plain algorithm divides by zero
        result = aggregate(rule, J, state)
        found = torch.cat([result.direction, result.state.targets.flatten()])
        assert (all_outcomes(J, targets, beta) - found).abs().amax(1).min() <= half_the_digits(1 + J.norm())
        state, targets = result.state, result.state.targets


def test_all_combinations_of_orders_occur():
    expected = all_outcomes(THREE, TARGETS, 0.5)[:, :3]
    assert len({tuple(d) for d in expected.round(decimals=8).tolist()}) == 8
    f = lambda k: aggregate(gradvac(key(0)), THREE, GradVacState(k, TARGETS)).direction
    distances = (torch.vmap(f)(split(key(0), 100)).unsqueeze(1) - expected).abs().amax(2)
    assert (distances.amin(1) <= gramian_bound(THREE, THREE.norm())).all()
    assert set(distances.argmin(1).tolist()) == set(range(8))


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
    state = None
    for J, direction in zip(Js, expected, strict=True):
        result = aggregate(gradvac(key(3)), J, state)
        torch.testing.assert_close(result.direction, direction, rtol=0, atol=1e-4)
        state = result.state


@given(st.integers(1, 4).flatmap(lambda m: generic(m, 3)), st.integers(0, 1000))
def test_the_first_call_is_pcgrad_with_the_same_key(J, seed):
    mine, other = aggregate(gradvac(key(seed)), J), aggregate(pcgrad(key(seed)), J)
    check_within(mine.direction, other.direction, 64 * eps() * J.norm())
    assert torch.equal(mine.state.key, other.state)


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
