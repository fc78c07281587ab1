"""MoDo: the paper's step in plain loops, where it converges to, and its derivatives."""

import numpy as np
import torch
from bounds import check_within, eps
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from scipy.optimize import brentq
from sequences import number

from functional_jd.aggregation.aggregate import aggregate
from functional_jd.aggregators.modo import modo

pairs = hnp.arrays(np.float64, st.tuples(st.just(2), st.integers(1, 5), st.integers(1, 4)), elements=st.integers(-3, 3))


def other(k):
    return number(k) + number(k + 4) / 2


def in_loops(weights, first, second, rate, ridge):
    """The step of the paper, entry by entry; the projection by the root of a scalar equation."""
    moved = []
    for i, w in enumerate(weights):
        slope = sum(np.dot(first[i], second[j]) * weights[j] for j in range(len(weights)))
        moved.append(w - rate * (slope + ridge * w))
    theta = brentq(lambda t: sum(max(y - t, 0) for y in moved) - 1, min(moved) - 2, max(moved), xtol=1e-14)
    return [max(y - theta, 0.0) for y in moved]


@given(pairs, pairs, st.sampled_from([0.01, 0.1, 1.0]), st.sampled_from([0.0, 0.1, 1.0]))
def test_equal_to_the_paper_s_step_in_plain_loops(one, two, rate, ridge):
    rule, state = modo(rate, ridge), None
    m = one.shape[1]
    expected = [1 / m] * m
    for first, second in (one, one[::-1]):
        _, weights, state = aggregate(rule, torch.from_numpy(first), state, torch.from_numpy(second))
        expected = in_loops(expected, first, second, rate, ridge)
        terms = rate * float(np.abs(first).sum() * np.abs(second).sum())
        check_within(weights, torch.tensor(expected, dtype=torch.float64), 1e-14 + 16 * eps() * (1 + terms))


def test_equal_to_the_peer_over_four_calls():
    # torchjd 0.18, MoDoWeighting(gamma=0.01, rho=0.1)(number(k) @ other(k).T) for k = 0 .. 3
    peer = [[0.243333, 0.26, 0.496667], [0.100257, 0.576323, 0.32342], [0.121114, 0.520987, 0.357899]]
    peer += [[0.439142, 0.354583, 0.206275]]
    rule, state = modo(0.01, 0.1), None
    for k, expected in enumerate(peer):
        direction, weights, state = aggregate(rule, number(k), state, other(k))
        torch.testing.assert_close(weights.tolist(), expected, atol=2e-6, rtol=0)
        torch.testing.assert_close(direction, weights @ number(k))


def test_the_same_batch_again_and_again_leads_to_the_min_norm_point():
    rule, state, J = modo(0.01, 0.0), None, torch.tensor([[3.0, 1.0], [-1.0, 2.0], [4.0, 4.0]], dtype=torch.float64)
    for _ in range(1000):
        direction, weights, state = aggregate(rule, J, state, J)
    # No row lies nearer to the origin, seen along the min-norm point, than the point itself.
    products = J @ direction
    assert products.min() >= direction @ direction - 1e-9
    assert weights[2] == 0
