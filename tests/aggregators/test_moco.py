"""MoCo: the published equations in plain loops, and directions that the current rows do not contain."""

import math

import pytest
import torch
from bounds import check_within, eps
from hypothesis import given
from hypothesis import strategies as st
from sequences import number, sequences, values

from functional_jd.aggregation.aggregate import aggregate
from functional_jd.aggregators.moco import moco


def in_loops(sequence, losses, beta, gamma, rho, beta_sigma, gamma_sigma):
    """The weights and the direction of every call, number by number."""
    _, m, n = sequence.shape
    y, w = [[0.0] * n for _ in range(m)], [1 / m] * m
    for t, (rows, found) in enumerate(zip(sequence.tolist(), losses.tolist(), strict=True), start=1):
        b, c = beta / t**beta_sigma, gamma / t**gamma_sigma
        for i in range(m):
            length = math.sqrt(math.fsum(x * x for x in rows[i]))
            y[i] = [old - b * (old - (found[i] * x / length if x else 0)) for old, x in zip(y[i], rows[i], strict=True)]
        walked = []
        for i in range(m):
            pull = rho * w[i] + sum(w[j] * sum(a * b for a, b in zip(y[i], y[j], strict=True)) for j in range(m))
            walked.append(w[i] - c * pull)
        grown = [math.exp(x) for x in walked]
        w = [x / sum(grown) for x in grown]
        yield w, [sum(w[i] * y[i][p] for i in range(m)) for p in range(n)]


@given(sequences(0), st.sampled_from([0.1, 0.5, 1.0]), st.sampled_from([0.0, 0.1]), st.sampled_from([0.0, 0.5]))
def test_equal_to_the_published_equations_in_plain_loops(case, beta, rho, sigma):
    sequence, losses = case
    rule, state = moco(beta, 0.2, rho, beta_sigma=sigma, gamma_sigma=0.5 - sigma), None
    for k, (weights, expected) in enumerate(in_loops(sequence, losses, beta, 0.2, rho, sigma, 0.5 - sigma)):
        J, given = torch.from_numpy(sequence[k]), torch.from_numpy(losses[k])
        direction, _, state = aggregate(rule, J, state, losses=given)
        bound = 64 * eps() * (1 + losses.max() ** 2)  # rows are as long as their losses; the weights see squares
        check_within(direction, torch.tensor(expected, dtype=torch.float64), bound)
        check_within(state.weights, torch.tensor(weights, dtype=torch.float64), bound)


# LibMTL's MoCo on number(k) and values(k), k = 0 .. 3, in NumPy and float64, with its 1e-8
DEFAULT = [
    [-0.397082, -0.062031, 0.273021, -0.075582],
    [-0.400857, 0.191835, 0.220896, -0.097287],
    [-0.399906, 0.275795, 0.069273, 0.016312],
    [-0.398785, 0.284672, 0.032297, 0.166863],
]
OTHER = [
    [-0.609897, -0.105257, 0.399383, -0.033214],
    [-0.463783, 0.432259, 0.211962, -0.112856],
    [-0.429635, 0.444357, -0.093988, 0.12818],
    [-0.309868, 0.34817, -0.001959, 0.41409],
]


@pytest.mark.parametrize(
    ("rule", "peer"), [(moco(), DEFAULT), (moco(0.8, 0.3, 0.2, beta_sigma=0.2, gamma_sigma=0.1), OTHER)]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_equal_to_the_peer_over_several_calls(rule, peer, dtype):
    state = None
    for k, expected in enumerate(peer):
        direction, _, state = aggregate(rule, number(k).to(dtype), state, losses=values(k).to(dtype))
        assert direction.dtype == dtype
        torch.testing.assert_close(direction.tolist(), expected, atol=2e-6, rtol=0)


def test_what_the_current_rows_do_not_contain_is_carried_over():
    rule, losses = moco(0.5, 0.0, beta_sigma=0.0), torch.tensor([4.0, 8.0])
    state = aggregate(rule, torch.tensor([[0.0, 3.0], [7.0, 0.0]]), losses=losses).state
    direction = aggregate(rule, torch.zeros(2, 2), state, losses=losses).direction
    torch.testing.assert_close(direction, torch.tensor([1.0, 0.5]))


def test_the_average_forgets_noise_that_the_current_rows_have():
    generator = torch.Generator().manual_seed(0)
    clean, losses, rule, state = number(1), torch.ones(3, dtype=torch.float64), moco(0.5, 0.0), None
    mean = clean.div(clean.norm(dim=1, keepdim=True)).mean(0)
    for _ in range(400):
        noisy = clean + 3 * torch.randn(3, 4, generator=generator, dtype=torch.float64)
        direction, _, state = aggregate(rule, noisy, state, losses=losses)
    alone = noisy.div(noisy.norm(dim=1, keepdim=True)).mean(0)
    cosine = lambda x: torch.cosine_similarity(x, mean, dim=0)
    assert cosine(direction) > 0.95 > cosine(alone)


@pytest.mark.parametrize("scales", [[1e-18, 1.0, 1e18], [1e18] * 3, [1e-18] * 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_length_of_a_row_does_not_matter(scales, dtype):
    factors, state, scaled = torch.tensor(scales, dtype=dtype).unsqueeze(1), None, None
    for k in range(3):
        expected, _, state = aggregate(moco(), number(k).to(dtype), state, losses=values(k))
        direction, _, scaled = aggregate(moco(), factors * number(k).to(dtype), scaled, losses=values(k))
        check_within(direction, expected, 64 * eps(dtype) * expected.abs().max())
