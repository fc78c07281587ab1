"""DB-MTL: the paper's equations in plain loops, and directions that the current rows do not contain."""

import math

import numpy as np
import pytest
import torch
from bounds import check_within, eps
from hypothesis import given
from hypothesis import strategies as st
from sequences import number, sequences, values

from functional_jd import jacobian_fn
from functional_jd.aggregation.aggregate import aggregate
from functional_jd.aggregators.cr_mogm import cr_mogm
from functional_jd.aggregators.db_mtl import db_mtl
from functional_jd.aggregators.grouped import grouped
from functional_jd.aggregators.mean import mean


def in_loops(sequence, losses, beta, beta_sigma):
    """The direction of every call, number by number."""
    _, m, n = sequence.shape
    average = [[0.0] * n for _ in range(m)]
    for t, (rows, found) in enumerate(zip(sequence.tolist(), losses.tolist(), strict=True), start=1):
        b = beta / t**beta_sigma
        for i in range(m):
            average[i] = [b * old + (1 - b) * new / found[i] for old, new in zip(average[i], rows[i], strict=True)]
        lengths = [math.sqrt(math.fsum(x * x for x in row)) for row in average]
        longest = max(lengths)
        yield [math.fsum(longest / lengths[i] * average[i][p] for i in range(m) if lengths[i]) for p in range(n)]


@given(sequences(), st.sampled_from([0.0, 0.5, 0.9]), st.sampled_from([0.0, 0.5]))
def test_equal_to_the_paper_s_equations_in_plain_loops(case, beta, beta_sigma):
    sequence, losses = case
    rule, state = db_mtl(beta, beta_sigma), None
    for k, expected in enumerate(in_loops(sequence, losses, beta, beta_sigma)):
        J, given = torch.from_numpy(sequence[k]), torch.from_numpy(losses[k])
        direction, _, state = aggregate(rule, J, state, losses=given)
        bound = 64 * eps() * np.abs(sequence).sum()
        check_within(direction, torch.tensor(expected, dtype=torch.float64), bound)


# LibMTL's DB_MTL on number(k) and values(k), k = 0 .. 3, in NumPy and float64, with its 1e-8
PEER = {
    (0.9, 0.0): [
        [-2.420577, -0.6, 1.220577, 0.765704],
        [-2.932991, -0.033379, 1.384251, 0.728936],
        [-4.297512, 0.654527, 0.933582, 1.284174],
        [-3.914278, 0.530153, 1.03701, 1.272249],
    ],
    (0.9, 0.5): [
        [-2.420577, -0.6, 1.220577, 0.765704],
        [-4.005637, 1.511207, 2.093893, -0.596849],
        [-14.915213, 7.927028, 0.575995, 3.051266],
        [-4.655124, 2.430477, 2.867924, 2.226245],
    ],
}


@pytest.mark.parametrize("settings", PEER)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_equal_to_the_peer_over_several_calls(settings, dtype):
    rule, state = db_mtl(*settings), None
    for k, expected in enumerate(PEER[settings]):
        direction, _, state = aggregate(rule, number(k).to(dtype), state, losses=values(k).to(dtype))
        assert direction.dtype == dtype
        expected = torch.tensor(expected, dtype=torch.float64)
        check_within(direction, expected, 1e-5 + 64 * eps(dtype) * expected.abs().max())  # the digits of the peer


def test_what_the_current_rows_do_not_contain_is_carried_over():
    rule, ones = db_mtl(0.5), torch.ones(2)
    state = aggregate(rule, torch.tensor([[0.0, 4.0], [4.0, 0.0]]), losses=ones).state
    direction = aggregate(rule, torch.tensor([[0.0, 0.0], [0.0, 0.0]]), state, losses=ones).direction
    assert direction.tolist() == [1.0, 1.0]


def test_every_group_carries_its_own_rows_and_averages_are_averaged():
    trees = [{"b": number(k)[:, :1], "w": number(k)[:, 1:]} for k in range(3)]
    both, first, second = grouped({"b": db_mtl(), "w": mean()}), None, None
    for k, tree in enumerate(trees):
        direction, _, first = aggregate(both, tree, first, losses=values(k))
        expected, _, second = aggregate(db_mtl(), tree["b"], second, losses=values(k))
        torch.testing.assert_close(direction, {"b": expected, "w": tree["w"].mean(0)})
    directions, state = [], None
    for k in range(2):
        direction, _, state = aggregate(cr_mogm(db_mtl(0.0), 0.25), number(0), state, losses=values(k))
        directions.append(direction)
    plain = [aggregate(db_mtl(0.0), number(0), losses=values(k)).direction for k in range(2)]
    torch.testing.assert_close(directions, [plain[0], 0.25 * plain[0] + 0.75 * plain[1]])


def test_without_memory_it_adds_up_gradients_of_the_log_losses_at_the_length_of_the_longest():
    def losses(x):
        return torch.stack([(x**2).sum() + 1, (x - 2).exp().sum(), x[0] ** 4 + x[1] ** 2 + 3])

    x = torch.tensor([0.5, -1.5], dtype=torch.float64)
    logs = torch.autograd.functional.jacobian(lambda x: losses(x).log(), x)
    expected = (logs / logs.norm(dim=1, keepdim=True)).sum(0) * logs.norm(dim=1).max()
    J, seen = jacobian_fn(losses)(x)
    torch.testing.assert_close(aggregate(db_mtl(0.0), J, losses=seen).direction, expected)


@pytest.mark.parametrize("scales", [[1e-18, 1.0, 1e18], [1e18] * 3, [1e-18] * 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_unit_of_a_loss_does_not_matter(scales, dtype):
    factors, rule, state, scaled = torch.tensor(scales, dtype=dtype), db_mtl(), None, None
    for k in range(3):
        expected, _, state = aggregate(rule, number(k).to(dtype), state, losses=values(k).to(dtype))
        rows, losses = factors.unsqueeze(1) * number(k).to(dtype), factors * values(k).to(dtype)
        direction, _, scaled = aggregate(rule, rows, scaled, losses=losses)
        check_within(direction, expected, 64 * eps(dtype) * expected.abs().max())
