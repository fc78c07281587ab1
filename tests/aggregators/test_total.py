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
