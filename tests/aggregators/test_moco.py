"""MoCo: the published equations in plain loops, and directions that the current rows do not contain."""

import pytest
import torch
from bounds import check_within, eps
from sequences import number, values

from functional_jd.aggregation.aggregate import aggregate
from functional_jd.aggregators.moco import moco


def test_what_the_current_rows_do_not_contain_is_carried_over():
    rule, losses = moco(0.5, 0.0, beta_sigma=0.0), torch.tensor([4.0, 8.0])
    state = aggregate(rule, torch.tensor([[0.0, 3.0], [7.0, 0.0]]), losses=losses).state
    direction = aggregate(rule, torch.zeros(2, 2), state, losses=losses).direction
    torch.testing.assert_close(direction, torch.tensor([1.0, 0.5]))


@pytest.mark.parametrize("scales", [[1e-18, 1.0, 1e18], [1e18] * 3, [1e-18] * 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_length_of_a_row_does_not_matter(scales, dtype):
    factors, state, scaled = torch.tensor(scales, dtype=dtype).unsqueeze(1), None, None
    for k in range(3):
        expected, _, state = aggregate(moco(), number(k).to(dtype), state, losses=values(k))
        direction, _, scaled = aggregate(moco(), factors * number(k).to(dtype), scaled, losses=values(k))
        check_within(direction, expected, 64 * eps(dtype) * expected.abs().max())
