"""MoDo: the paper's step in plain loops, where it converges to, and its derivatives."""

import torch

from functional_jd.aggregation.aggregate import aggregate
from functional_jd.aggregators.modo import modo


def test_the_same_batch_again_and_again_leads_to_the_min_norm_point():
    rule, state, J = modo(0.01, 0.0), None, torch.tensor([[3.0, 1.0], [-1.0, 2.0], [4.0, 4.0]], dtype=torch.float64)
    for _ in range(1000):
        direction, weights, state = aggregate(rule, J, state, J)
    # No row lies nearer to the origin, seen along the min-norm point, than the point itself.
    products = J @ direction
    assert products.min() >= direction @ direction - 1e-9
    assert weights[2] == 0
