"""Mean: the gradient of the mean of the losses."""

import torch
from bounds import check_within, sum_bound
from hypothesis import given
from hypothesis import strategies as st

from functional_jd.aggregation.aggregate import aggregate
from functional_jd.aggregators.mean import mean


@given(st.lists(st.lists(st.integers(-9, 9).map(float), min_size=3, max_size=3), min_size=1, max_size=6))
def test_the_direction_is_the_mean_of_the_rows(rows):
    J = torch.tensor(rows)
    expected = torch.tensor([sum(column) / len(rows) for column in zip(*rows, strict=True)], dtype=torch.float64)
    check_within(aggregate(mean(), J).direction, expected, 2 * sum_bound(J) / len(J))
