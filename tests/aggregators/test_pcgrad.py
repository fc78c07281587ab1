"""PCGrad: the paper's projections on the rows themselves, in every order that chance may pick."""

import pytest
import torch
from bounds import check_within, eps

from functional_jd.aggregation.aggregate import aggregate
from functional_jd.aggregation.hyper_parameters import random_visit_orders
from functional_jd.aggregators.pcgrad import pcgrad
from functional_jd.random import key, split

THREE = torch.tensor([[1.5, 1.0, 2.0], [1.0, -0.5, -2.0], [-2.5, 2.0, -1.0]], dtype=torch.float64)


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
