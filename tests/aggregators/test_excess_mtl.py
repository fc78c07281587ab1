"""ExcessMTL: the paper's equations in plain loops, entry by entry."""

import math

import numpy as np
import pytest
import torch
from bounds import check_within, eps
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from sequences import number

from functional_jd.aggregation.aggregate import aggregate
from functional_jd.aggregators.excess_mtl import excess_mtl

sequences = hnp.arrays(
    np.float64, st.tuples(st.just(5), st.integers(1, 4), st.integers(1, 4)), elements=st.integers(-3, 3)
)


def in_loops(sequence, rate, n_warmup):
    """The weights of every call, number by number."""
    _, m, n = sequence.shape
    squares, weights, past, baseline = np.zeros((m, n)), [1 / m] * m, [], None
    for call, rows in enumerate(sequence):
        squares = squares + rows**2
        risk = [
            sum(rows[i, p] ** 2 / math.sqrt(squares[i, p]) for p in range(n) if squares[i, p] > 0) for i in range(m)
        ]
        past.append(risk)
        if call + 1 == max(n_warmup, 1):
            baseline = [sum(column) / len(past) for column in zip(*past, strict=True)]
        if call >= n_warmup:
            for i in range(m):
                baseline[i] = baseline[i] or risk[i]
            gain = risk if call == 0 else [r / b if b else 0 for r, b in zip(risk, baseline, strict=True)]
            grown = [w * math.exp(rate * g) for w, g in zip(weights, gain, strict=True)]
            weights = [w / sum(grown) for w in grown]
        yield weights


@given(sequences, st.sampled_from([0.1, 1.0]), st.integers(0, 3))
def test_equal_to_the_paper_s_equations_in_plain_loops(sequence, rate, n_warmup):
    rule, state = excess_mtl(rate, n_warmup), None
    for rows, expected in zip(sequence, in_loops(sequence, rate, n_warmup), strict=True):
        _, weights, state = aggregate(rule, torch.from_numpy(rows), state)
        exponents = 1 + rate * np.abs(sequence).sum()
        check_within(weights, torch.tensor(expected, dtype=torch.float64), 64 * eps() * exponents)


def test_the_peer_s_value_on_two_rows():
    J = torch.tensor([[-4.0, 1.0, 1.0], [6.0, 1.0, 1.0]])
    expected = torch.tensor([4.80797, 1.0, 1.0])
    torch.testing.assert_close(aggregate(excess_mtl(), J).direction, expected, atol=1e-4, rtol=0)


# torchjd 0.18, ExcessMTLWeighting(0.1, 0) and ExcessMTLWeighting(0.5, 2) on number(k) for k = 0 .. 3
PEER = {
    (0.1, 0): [[0.344253, 0.344253, 0.311493], [0.342748, 0.340252, 0.317], [0.341374, 0.338312, 0.320314]],
    (0.5, 2): [[1 / 3] * 3, [1 / 3] * 3, [0.328428, 0.329497, 0.342076], [0.319834, 0.340607, 0.339559]],
}


@pytest.mark.parametrize("settings", PEER)
def test_equal_to_the_peer_over_several_calls(settings):
    rule, state = excess_mtl(*settings), None
    for k, expected in enumerate(PEER[settings]):
        direction, weights, state = aggregate(rule, number(k), state)
        torch.testing.assert_close(weights.tolist(), expected, atol=1e-5, rtol=0)
        torch.testing.assert_close(direction, weights @ number(k))


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
