"""Total: the gradient of the sum of the losses."""

import torch
from bounds import check_within, sum_bound
from hypothesis import given
from hypothesis import strategies as st

from functional_jd.aggregation.aggregate import aggregate
from functional_jd.aggregators.total import total


@given(st.lists(st.lists(st.integers(-9, 9).map(float), min_size=3, max_size=3), min_size=1, max_size=6))
def test_the_direction_is_the_sum_of_the_rows(rows):
    expected = [sum(column) for column in zip(*rows, strict=True)]
    J = torch.tensor(rows)
    check_within(aggregate(total(), J).direction, torch.tensor(expected), sum_bound(J))


def test_the_direction_is_the_gradient_of_the_sum_of_the_losses():
    losses = lambda x: torch.stack([x.square().sum(), x.sin().sum(), x.prod()])
    x = torch.tensor([0.3, -1.2, 2.0])
    J = torch.func.jacrev(losses)(x)
    check_within(aggregate(total(), J).direction, torch.func.grad(lambda x: losses(x).sum())(x), 2 * sum_bound(J))
