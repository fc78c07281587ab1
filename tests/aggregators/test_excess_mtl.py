"""ExcessMTL: the paper's equations in plain loops, entry by entry."""

import numpy as np
import pytest
import torch
from bounds import check_within, eps
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from sequences import number

from functional_jd.aggregation.aggregate import aggregate
from functional_jd.aggregators.excess_mtl import excess_mtl

sequences = hnp.arrays(
    np.float64, st.tuples(st.just(5), st.integers(1, 4), st.integers(1, 4)), elements=st.integers(-3, 3)
)


@pytest.mark.parametrize("scales", [[1e-30, 1.0, 1e30], [1e30] * 3, [1e-30] * 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_after_a_warm_up_the_scale_of_a_row_does_not_matter(scales, dtype):
    factors = torch.tensor(scales, dtype=dtype).unsqueeze(1)
    rule, state, scaled = excess_mtl(n_warmup=2), None, None
    for k in range(5):
        _, expected, state = aggregate(rule, number(k), state)
        _, weights, scaled = aggregate(rule, number(k).to(dtype) * factors, scaled)
        check_within(weights, expected, 64 * eps(dtype) * expected)
    assert (weights - 1 / 3).abs().max() > 0.01


def test_a_row_that_was_zero_so_far_starts_with_its_first_risk():
    J = torch.tensor([[0.0, 0.0], [1.0, 1.0]], dtype=torch.float64)
    rule = excess_mtl(n_warmup=1)
    state = aggregate(rule, J).state
    direction, weights, state = aggregate(rule, J, state)
    assert direction.isfinite().all()
    assert weights[1] > weights[0] > 0
    weights = aggregate(rule, 1e9 * J.flip(0), state).weights
    assert weights[0] > 0.1
