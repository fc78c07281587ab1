"""PCGrad: the paper's projections on the rows themselves, in every order that chance may pick."""

from itertools import permutations, product

import pytest
import torch
from bounds import check_within, eps
from hypothesis import given
from hypothesis import strategies as st
from sequences import integer_jacobians

from functional_jd.aggregation.aggregate import aggregate
from functional_jd.aggregation.hyper_parameters import random_visit_orders
from functional_jd.aggregators.pcgrad import pcgrad
from functional_jd.random import key, split

EXAMPLE = torch.tensor([[-4.0, 1.0, 1.0], [6.0, 1.0, 1.0]])
THREE = torch.tensor([[1.5, 1.0, 2.0], [1.0, -0.5, -2.0], [-2.5, 2.0, -1.0]], dtype=torch.float64)


def projected(J, i, order):
    """Row i after the projections of the paper, in this order, as a vector."""
    p = J[i].clone()
    for j in order:
        if p @ J[j] < 0:
            p -= (p @ J[j]) / (J[j] @ J[j]) * J[j]
    return p


def all_directions(J):
    """The directions of all combinations of orders."""
    m = len(J)
    rows = [[projected(J, i, order) for order in permutations(set(range(m)) - {i})] for i in range(m)]
    return torch.stack([torch.stack(choice).sum(0) for choice in product(*rows)])


@given(integer_jacobians((1, 3), (1, 4)), st.integers(0, 1000))
def test_the_direction_is_that_of_some_orders(J, seed):
    d = aggregate(pcgrad(key(seed)), J).direction
    assert (all_directions(J) - d).abs().amax(1).min() <= 64 * eps() * J.norm()


def test_all_combinations_of_orders_occur():
    expected = all_directions(THREE)
    assert len({tuple(d) for d in expected.round(decimals=8).tolist()}) == 8
    found = torch.vmap(lambda k: aggregate(pcgrad(k), THREE).direction)(split(key(0), 100))
    distances = (found.unsqueeze(1) - expected).abs().amax(2)
    assert (distances.amin(1) <= 64 * eps() * THREE.norm()).all()
    assert set(distances.argmin(1).tolist()) == set(range(8))


@given(integer_jacobians((1, 2), (1, 4)))
def test_two_rows_are_never_conflicted_with(J):
    d = aggregate(pcgrad(key(0)), J).direction
    assert (J @ d >= -64 * eps() * J.norm() ** 2).all()


def test_example():
    """The value that the peer publishes: (-4 + 22 / 38 * 6, ...) + (6 - 22 / 18 * 4, ...)."""
    result = aggregate(pcgrad(key(0)), EXAMPLE)
    torch.testing.assert_close(result.direction, torch.tensor([0.5848, 3.8012, 3.8012]), rtol=0, atol=1e-4)
    weights = torch.tensor([1 + 22 / 18, 1 + 22 / 38], dtype=torch.float64)
    torch.testing.assert_close(result.weights, weights)


def test_equal_to_the_peer_on_two_rows():
    """From PCGrad of torchjd 0.18."""
    J = torch.tensor([[1.0, 0.0, 2.0], [0.0, 2.0, -2.0]])
    torch.testing.assert_close(aggregate(pcgrad(key(7)), J).direction, torch.tensor([1.8, 3.0, 0.6]))


@pytest.mark.parametrize(("m", "n"), [(5, 4), (66, 40), (150, 30)])
def test_many_rows_are_projected_as_the_paper_does(m, n):
    J = torch.randn(m, n, generator=torch.Generator().manual_seed(m), dtype=torch.float64)
    J = J - J.mean(0)
    orders = random_visit_orders(split(key(3))[0], m)
    rows = torch.stack([projected(J, i, order) for i, order in enumerate(orders.tolist())])
    found = aggregate(pcgrad(key(3)), J)
    check_within(found.direction, rows.sum(0), m * n * eps() * found.weights @ J.abs())


def test_every_call_draws_again():
    rule, state, seen = pcgrad(key(0)), None, set()
    for _ in range(30):
        result = aggregate(rule, THREE, state)
        state = result.state
        seen.add(tuple(result.weights.tolist()))
    assert len(seen) > 3


def test_every_row_may_have_a_scale_of_its_own():
    for scales in ([1e-18, 1e18], [1e18, 1e18], [1e-18, 1e-18]):
        c = torch.tensor(scales, dtype=torch.float64)
        J = EXAMPLE.double()
        expected = c @ torch.stack([projected(J, 0, [1]), projected(J, 1, [0])])
        found = aggregate(pcgrad(key(0)), c.unsqueeze(1) * J).direction
        check_within(found, expected, 64 * eps() * expected.abs())
