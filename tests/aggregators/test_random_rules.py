"""PCGrad, GradVac and GradDrop: the papers' algorithms on the rows themselves, in every order that chance picks."""

from itertools import permutations

import pytest
import torch
from bounds import check_within, eps, half_the_digits
from hypothesis import given
from hypothesis import strategies as st

import functional_jd as jd
from functional_jd.aggregation.hyper_parameters import random_visit_orders
from functional_jd.aggregators.gradvac import GradVacState


@given(st.integers(-(2**63), 2**64 - 1), st.integers(1, 9))
def test_every_row_meets_all_others_once(seed, m):
    orders = random_visit_orders(jd.random.key(seed), m)
    assert orders.shape == (m, m - 1)
    for i, order in enumerate(orders.tolist()):
        assert sorted(order) == [j for j in range(m) if j != i]


def test_all_pairs_of_orders_are_equally_likely():
    n = 7200
    orders = torch.vmap(random_visit_orders, in_dims=(0, None))(jd.random.split(jd.random.key(0), n), 4)
    for one, two in [(0, 1), (1, 3), (2, 3)]:
        for first in permutations(sorted({0, 1, 2, 3} - {one})):
            for second in permutations(sorted({0, 1, 2, 3} - {two})):
                here = (orders[:, one] == torch.tensor(first)).all(1) & (orders[:, two] == torch.tensor(second)).all(1)
                assert abs(int(here.sum()) - n / 36) < 5 * (n / 36) ** 0.5


def projected(J, i, order):
    """Row i after the projections of the paper, in this order, as a vector."""
    p = J[i].clone()
    for j in order:
        if p @ J[j] < 0:
            p -= (p @ J[j]) / (J[j] @ J[j]) * J[j]
    return p


@pytest.mark.parametrize(("m", "n"), [(1, 4), (5, 4), (66, 40), (150, 30)])
def test_many_rows_are_projected_as_the_paper_does(m, n):
    J = torch.randn(m, n, generator=torch.Generator().manual_seed(m), dtype=torch.float64)
    J = J - J.mean(0)
    orders = random_visit_orders(jd.random.split(jd.random.key(3))[0], m)
    rows = torch.stack([projected(J, i, order) for i, order in enumerate(orders.tolist())])
    found = jd.aggregate(jd.pcgrad(jd.random.key(3)), J)
    check_within(found.direction, rows.sum(0), m * n * eps() * found.weights @ J.abs())


def test_rows_that_were_always_parallel_or_opposite_change_nothing_and_cancel():
    for sign, expected in ((1.0, 2.0), (-1.0, 0.0)):
        g = torch.tensor([0.1, 0.7, -0.3], dtype=torch.float64)
        J, state = torch.stack([g, sign * g]), None
        for _ in range(80):  # by now the targets have become +-1, where the formula divides by zero
            result = jd.aggregate(jd.gradvac(jd.random.key(0)), J, state)
            check_within(result.direction, expected * g, half_the_digits(g.norm()))
            state = result.state
        assert abs(float(state.targets[0, 1]) - sign) <= 64 * eps()


def test_a_row_of_zeros_moves_no_row_whatever_its_target():
    J = torch.tensor([[1.0, 0.0], [0.0, 0.0], [-0.6, 0.8]], dtype=torch.float64)
    targets = torch.tensor([[0.0, 0.9, 0.5], [0.0, 0.0, 0.0], [0.0, 0.9, 0.0]], dtype=torch.float64)
    # Row 0 gets the cosine 1/2 with row 2, and row 2 the cosine 0 with row 0.
    expected = torch.stack([J[0] + (0.5 * 0.8 / 0.75**0.5 + 0.6) * J[2], J[2] + 0.6 * J[0]]).sum(0)
    for seed in range(4):  # row 1 comes first for some of the keys
        found = jd.aggregate(jd.gradvac(jd.random.key(seed)), J, GradVacState(jd.random.key(seed), targets)).direction
        check_within(found, expected, 16 * eps() * 3)


MANY = 40_000


@pytest.mark.parametrize("column", [[3.0, -1.0, 0.0], [-1e-18, -2e-18, 1e-18], [1e18, -3e18, 2e17]])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_sign_is_picked_as_often_as_its_share_so_that_the_mean_is_the_sum(column, dtype):
    column = torch.tensor(column, dtype=dtype)
    positive, size = column.clamp(min=0).sum(), column.abs().sum()
    d = jd.aggregate(jd.graddrop(jd.random.key(0)), column.unsqueeze(1).expand(-1, MANY)).direction
    share = float((d > 0).double().mean())
    expected = float(positive / size)
    deviation = (expected * (1 - expected) / MANY) ** 0.5
    assert abs(share - expected) < 4 * deviation
    assert abs(float(d.double().mean() / size) - float(column.sum() / size)) < 4 * deviation


def test_the_signs_of_different_entries_and_calls_are_independent():
    rule, J = jd.graddrop(jd.random.key(0)), {"a": torch.tensor([[1.0], [-1.0]]).expand(2, MANY // 2)}
    J["b"] = J["a"].clone()
    first = jd.aggregate(rule, J)
    second = jd.aggregate(rule, J, first.state)
    signs = torch.stack([result.direction[name] for result in (first, second) for name in ("a", "b")]).double()
    assert (torch.corrcoef(signs) - torch.eye(4)).abs().max() < 4 * (MANY / 2) ** -0.5
    neighbours = torch.stack([signs[0, :-1], signs[0, 1:]])
    assert abs(float(torch.corrcoef(neighbours)[0, 1])) < 4 * (MANY / 2) ** -0.5


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_the_largest_numbers_of_a_dtype_do_not_overflow(dtype):
    most = torch.finfo(dtype).max
    J = torch.tensor([[most], [most], [-most], [-most]], dtype=dtype).expand(4, MANY)
    weights = jd.aggregate(jd.graddrop(jd.random.key(0)), J).weights
    assert weights.dtype == torch.float32
    assert abs(float(weights[0].mean()) - 0.5) < 4 * 0.5 * MANY**-0.5


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_what_is_not_finite_stays_so_in_its_entry_whatever_chance_says(bad):
    J = torch.tensor([[bad, 1.0], [1.0, 1.0], [-1.0, 1.0]])
    found = torch.vmap(lambda k: jd.aggregate(jd.graddrop(k), J).direction)(jd.random.split(jd.random.key(0), 20))
    assert not found[:, 0].isfinite().any()
    assert torch.equal(found[:, 1], torch.full((20,), 3.0))
