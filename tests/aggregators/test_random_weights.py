"""Random weights: the softmax of independent normal numbers, anew at every call."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from functional_jd.aggregation.aggregate import aggregate
from functional_jd.aggregators.random_weights import random_weights
from functional_jd.random import key


@given(st.integers(0, 2**63), st.integers(1, 9))
def test_weights_are_positive_add_up_to_one_and_change_at_every_call(seed, m):
    rule, rows = random_weights(key(seed)), torch.zeros(m, 2)
    first = aggregate(rule, rows)
    second = aggregate(rule, rows, first.state)
    for weights in (first.weights, second.weights):
        assert weights.dtype == torch.float64
        assert (weights > 0).all()
        torch.testing.assert_close(weights.sum(), torch.ones((), dtype=torch.float64))
    assert torch.equal(first.weights, aggregate(rule, rows).weights)
    assert m == 1 or not torch.equal(first.weights, second.weights)
