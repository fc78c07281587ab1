"""Rules with a memory: what units and lengths do not change, and what is carried over from call to call."""

import numpy as np
import pytest
import torch
from bounds import check_within, eps, half_the_digits
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from sequences import number, values

from functional_jd.aggregation.aggregate import aggregate
from functional_jd.aggregators.cr_mogm import cr_mogm
from functional_jd.aggregators.db_mtl import db_mtl
from functional_jd.aggregators.excess_mtl import excess_mtl
from functional_jd.aggregators.grouped import grouped
from functional_jd.aggregators.mean import mean
from functional_jd.aggregators.moco import moco
from functional_jd.aggregators.modo import modo
from functional_jd.aggregators.random_weights import random_weights
from functional_jd.aggregators.sdmgrad import sdmgrad
from functional_jd.random import key


def test_modo_on_the_same_batch_again_and_again_leads_to_the_min_norm_point():
    rule, state, J = modo(0.01, 0.0), None, torch.tensor([[3.0, 1.0], [-1.0, 2.0], [4.0, 4.0]], dtype=torch.float64)
    for _ in range(1000):
        direction, weights, state = aggregate(rule, J, state, J)
    # No row lies nearer to the origin, seen along the min-norm point, than the point itself.
    products = J @ direction
    assert products.min() >= (1 - half_the_digits()) * (direction @ direction)
    assert weights[2] == 0


@given(st.integers(0, 2**63), st.integers(1, 9))
def test_random_weights_are_positive_add_up_to_one_and_change_at_every_call(seed, m):
    rule, rows = random_weights(key(seed)), torch.zeros(m, 2)
    first = aggregate(rule, rows)
    second = aggregate(rule, rows, first.state)
    for weights in (first.weights, second.weights):
        assert weights.dtype == torch.float64
        assert (weights > 0).all()
        torch.testing.assert_close(weights.sum(), torch.ones((), dtype=torch.float64))
    assert torch.equal(first.weights, aggregate(rule, rows).weights)
    assert m == 1 or not torch.equal(first.weights, second.weights)


def test_moco_carries_over_what_the_current_rows_do_not_contain():
    rule, losses = moco(0.5, 0.0, beta_sigma=0.0), torch.tensor([4.0, 8.0])
    state = aggregate(rule, torch.tensor([[0.0, 3.0], [7.0, 0.0]]), losses=losses).state
    direction = aggregate(rule, torch.zeros(2, 2), state, losses=losses).direction
    torch.testing.assert_close(direction, torch.tensor([1.0, 0.5]))


@pytest.mark.parametrize("scales", [[1e-18, 1.0, 1e18], [1e18] * 3, [1e-18] * 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_length_of_a_row_does_not_matter_to_moco(scales, dtype):
    factors, state, scaled = torch.tensor(scales, dtype=dtype).unsqueeze(1), None, None
    for k in range(3):
        expected, _, state = aggregate(moco(), number(k).to(dtype), state, losses=values(k))
        direction, _, scaled = aggregate(moco(), factors * number(k).to(dtype), scaled, losses=values(k))
        check_within(direction, expected, 64 * eps(dtype) * expected.abs().max())


def other(k):
    return number(k) + number(k + 4) / 2


def test_without_a_scale_the_weights_of_sdmgrad_stay():
    J = number(0)
    assert aggregate(sdmgrad(), J, None, -J).weights.tolist() == pytest.approx([1 / 3] * 3)
    assert aggregate(sdmgrad(), 0 * J, None, J).direction.tolist() == [0] * 4


def twice(one, two, u):
    rule = sdmgrad(0.1, n_steps=3, preference=u)
    state = aggregate(rule, one, None, two).state
    return aggregate(rule, two, state, one).direction


def test_derivatives_of_sdmgrad_are_those_of_finite_differences():
    u = torch.tensor([0.2, 0.3, 0.5], dtype=torch.float64)
    inputs = (number(0).requires_grad_(), other(0).requires_grad_(), u.requires_grad_())
    assert torch.autograd.gradcheck(twice, inputs, check_forward_ad=True)


sequences = hnp.arrays(
    np.float64, st.tuples(st.just(5), st.integers(1, 4), st.integers(1, 4)), elements=st.integers(-3, 3)
)


@pytest.mark.parametrize("scales", [[1e-30, 1.0, 1e30], [1e30] * 3, [1e-30] * 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_after_a_warm_up_of_excess_mtl_the_scale_of_a_row_does_not_matter(scales, dtype):
    factors = torch.tensor(scales, dtype=dtype).unsqueeze(1)
    rule, state, scaled = excess_mtl(n_warmup=2), None, None
    for k in range(5):
        _, expected, state = aggregate(rule, number(k), state)
        _, weights, scaled = aggregate(rule, number(k).to(dtype) * factors, scaled)
        check_within(weights, expected, 64 * eps(dtype) * expected)
    assert (weights - 1 / 3).abs().max() > 0.01


def test_a_row_that_was_zero_so_far_starts_with_its_first_risk_in_excess_mtl():
    J = torch.tensor([[0.0, 0.0], [1.0, 1.0]], dtype=torch.float64)
    rule = excess_mtl(n_warmup=1)
    state = aggregate(rule, J).state
    direction, weights, state = aggregate(rule, J, state)
    assert direction.isfinite().all()
    assert weights[1] > weights[0] > 0
    weights = aggregate(rule, 1e9 * J.flip(0), state).weights
    assert weights[0] > 0.1


def test_db_mtl_carries_over_what_the_current_rows_do_not_contain():
    rule, ones = db_mtl(0.5), torch.ones(2)
    state = aggregate(rule, torch.tensor([[0.0, 4.0], [4.0, 0.0]]), losses=ones).state
    direction = aggregate(rule, torch.tensor([[0.0, 0.0], [0.0, 0.0]]), state, losses=ones).direction
    assert direction.tolist() == [1.0, 1.0]


def test_every_group_of_db_mtl_carries_its_own_rows_and_averages_are_averaged():
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


@pytest.mark.parametrize("scales", [[1e-18, 1.0, 1e18], [1e18] * 3, [1e-18] * 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_unit_of_a_loss_does_not_matter_to_db_mtl(scales, dtype):
    factors, rule, state, scaled = torch.tensor(scales, dtype=dtype), db_mtl(), None, None
    for k in range(3):
        expected, _, state = aggregate(rule, number(k).to(dtype), state, losses=values(k).to(dtype))
        rows, losses = factors.unsqueeze(1) * number(k).to(dtype), factors * values(k).to(dtype)
        direction, _, scaled = aggregate(rule, rows, scaled, losses=losses)
        check_within(direction, expected, 64 * eps(dtype) * expected.abs().max())
