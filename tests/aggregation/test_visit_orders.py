"""Random orders: each row meets all others, every order equally often, independently of the other rows."""

from itertools import permutations

import torch
from hypothesis import given
from hypothesis import strategies as st

from functional_jd.aggregation.hyper_parameters import random_visit_orders
from functional_jd.random import key, split


@given(st.integers(-(2**63), 2**64 - 1), st.integers(1, 9))
def test_every_row_meets_all_others_once(seed, m):
    orders = random_visit_orders(key(seed), m)
    assert orders.shape == (m, m - 1)
    for i, order in enumerate(orders.tolist()):
        assert sorted(order) == [j for j in range(m) if j != i]


def test_all_pairs_of_orders_are_equally_likely():
    n = 7200
    orders = torch.vmap(random_visit_orders, in_dims=(0, None))(split(key(0), n), 4)
    for one, two in [(0, 1), (1, 3), (2, 3)]:
        for first in permutations(sorted({0, 1, 2, 3} - {one})):
            for second in permutations(sorted({0, 1, 2, 3} - {two})):
                here = (orders[:, one] == torch.tensor(first)).all(1) & (orders[:, two] == torch.tensor(second)).all(1)
                assert abs(int(here.sum()) - n / 36) < 5 * (n / 36) ** 0.5
