"""SDMGrad: the paper's algorithm in plain loops, where its inner steps lead, and its derivatives."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from scipy.optimize import brentq, minimize
from sequences import number

from functional_jd.aggregation.aggregate import aggregate
from functional_jd.aggregators.sdmgrad import sdmgrad

pairs = hnp.arrays(np.float64, st.tuples(st.just(2), st.integers(1, 5), st.integers(1, 4)), elements=st.integers(-3, 3))


def other(k):
    return number(k) + number(k + 4) / 2


def projected(y):
    theta = brentq(lambda t: np.maximum(y - t, 0).sum() - 1, y.min() - 2, y.max(), xtol=1e-14)
    return np.maximum(y - theta, 0)


def in_loops(w, one, two, u, *, rate, momentum, n_steps, pull):
    m = len(one)
    A = np.array([[np.dot(one[i], two[j]) for j in range(m)] for i in range(m)])
    scale = np.mean([np.sqrt(max(A[i, i], 0)) for i in range(m)])
    if scale > 0:
        velocity = 0
        for _ in range(n_steps):
            velocity = momentum * velocity + A / scale**2 @ (w + pull * u)
            w = projected(w - rate * velocity)
    return w, (w + pull * u) / (1 + pull)


@given(pairs, st.sampled_from([0.05, 0.5]), st.sampled_from([0.0, 0.5]), st.sampled_from([0.0, 0.3, 2.0]))
def test_equal_to_the_paper_s_algorithm_in_plain_loops(pair, rate, momentum, pull):
    settings = {"rate": rate, "momentum": momentum, "n_steps": 4, "pull": pull}
    m = pair.shape[1]
    u = np.arange(m + 1.0)[1:] / (m * (m + 1) / 2)
    rule, state, w = sdmgrad(**settings, preference=list(u)), None, np.full(m, 1 / m)
    for one, two in (pair, pair[::-1]):
        _, weights, state = aggregate(rule, torch.from_numpy(one), state, torch.from_numpy(two))
        w, expected = in_loops(w, one, two, u, **settings)
        np.testing.assert_allclose(weights.numpy(), expected, atol=1e-9)


# torchjd 0.18: SDMGradWeighting(lr=0.02) and SDMGradWeighting(n_iter=3, pref_vector=[.2, .3, .5]), each called with
# number(k) @ other(k).T for k = 0 .. 3
PEER = {
    "slow": (
        {"rate": 0.02},
        [
            [0.244037, 0.270997, 0.484966],
            [0.119908, 0.531999, 0.348093],
            [0.182636, 0.455441, 0.361923],
            [0.429557, 0.345736, 0.224707],
        ],
    ),
    "preferring": (
        {"n_steps": 3, "preference": [0.2, 0.3, 0.5]},
        [
            [0.046154, 0.069231, 0.884615],
            [0.046154, 0.069231, 0.884615],
            [0.046154, 0.241608, 0.712238],
            [0.815385, 0.069231, 0.115385],
        ],
    ),
}


@pytest.mark.parametrize("name", PEER)
def test_equal_to_the_peer_over_four_calls(name):
    settings, peer = PEER[name]
    rule, state = sdmgrad(**settings), None
    for k, expected in enumerate(peer):
        direction, weights, state = aggregate(rule, number(k), state, other(k))
        torch.testing.assert_close(weights.tolist(), expected, atol=2e-6, rtol=0)
        torch.testing.assert_close(direction, weights @ number(k))


def test_many_short_steps_on_one_batch_minimise_the_norm_near_the_preference():
    J, u = number(1), np.array([0.2, 0.3, 0.5])
    weights = aggregate(sdmgrad(0.05, n_steps=3000, pull=0.3, preference=list(u)), J, None, J).weights
    best = minimize(
        lambda w: (w + 0.3 * u) @ J.numpy() @ J.numpy().T @ (w + 0.3 * u),
        np.full(3, 1 / 3),
        bounds=[(0, 1)] * 3,
        constraints={"type": "eq", "fun": lambda w: w.sum() - 1},
        options={"ftol": 1e-14},
    )
    np.testing.assert_allclose(weights.numpy(), (best.x + 0.3 * u) / 1.3, atol=1e-5)


def test_without_a_scale_the_weights_stay():
    J = number(0)
    assert aggregate(sdmgrad(), J, None, -J).weights.tolist() == pytest.approx([1 / 3] * 3)
    assert aggregate(sdmgrad(), 0 * J, None, J).direction.tolist() == [0] * 4


def twice(one, two, u):
    rule = sdmgrad(0.1, n_steps=3, preference=u)
    state = aggregate(rule, one, None, two).state
    return aggregate(rule, two, state, one).direction


def test_derivatives_are_those_of_finite_differences():
    u = torch.tensor([0.2, 0.3, 0.5], dtype=torch.float64)
    inputs = (number(0).requires_grad_(), other(0).requires_grad_(), u.requires_grad_())
    assert torch.autograd.gradcheck(twice, inputs, check_forward_ad=True)
