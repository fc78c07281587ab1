"""CR-MOGM: the running mean of another rule's weights, whatever the rule."""

import pytest
import torch
from bounds import check_within, eps
from hypothesis import given
from hypothesis import strategies as st

from functional_jd.aggregation.aggregate import Aggregator, aggregate, start
from functional_jd.aggregation.lifts import stateless
from functional_jd.aggregation.views import full_jacobian, no_gradients
from functional_jd.aggregators.constant import constant
from functional_jd.aggregators.cr_mogm import cr_mogm
from functional_jd.aggregators.mean import mean
from functional_jd.aggregators.upgrad import upgrad
from functional_jd.core.tree import tree_leaves


def number(k):
    return ((torch.arange(12).reshape(3, 4) * (k + 3) + k * k) % 11 - 5).double()


def counting():
    """Weights 1, 2, 3, ... call after call, on every row."""

    def update(seen, calls):
        return seen + calls + 1, calls + 1

    return Aggregator(no_gradients, lambda seen: torch.zeros((), dtype=torch.float64), update)


def entrywise():
    """Weights for every entry: how much of a row's absolute values it holds."""
    return stateless(full_jacobian, lambda J: {key: leaf.abs() / leaf.abs().sum() for key, leaf in J.items()})


@given(st.floats(0, 0.99), st.integers(1, 8))
def test_equal_to_the_running_mean_in_plain_numbers(momentum, calls):
    rule, state, expected = cr_mogm(counting(), momentum), None, 1.0
    for call in range(calls):
        expected = momentum * expected + (1 - momentum) * (call + 1)
        _, weights, state = aggregate(rule, number(call), state)
        check_within(weights, torch.full((3,), expected, dtype=torch.float64), 4 * calls * eps() * expected)


def test_equal_to_the_peer_over_four_calls():
    # torchjd 0.18, CRMOGMWeighting(w, alpha=0.5) where w returns the rows [1, 2, 3], [3, 2, 1], [0, 0, 4], [1, 1, 1]
    given = torch.tensor([[1.0, 2.0, 3.0], [3.0, 2.0, 1.0], [0.0, 0.0, 4.0], [1.0, 1.0, 1.0]], dtype=torch.float64)
    rule, state = cr_mogm(stateless(full_jacobian, lambda J: J[:, 0]), 0.5), None
    for weights, expected in zip(given, [[1.0, 2.0, 3.0], [2.0] * 3, [1.0, 1.0, 3.0], [1.0, 1.0, 2.0]], strict=True):
        seen, state = aggregate(rule, weights.unsqueeze(1), state)[1:]
        torch.testing.assert_close(seen.tolist(), expected)


@pytest.mark.parametrize("rule", [upgrad(), mean(), constant([0.1, 0.2, 0.3]), cr_mogm(upgrad())])
def test_the_first_call_is_the_rule_bit_for_bit_whatever_init_saw(rule):
    expected = aggregate(rule, number(0))
    assert torch.equal(aggregate(cr_mogm(rule), number(0)).direction, expected.direction)
    elsewhere = start(cr_mogm(rule), number(1) * torch.nan)
    assert torch.equal(aggregate(cr_mogm(rule), number(0), elsewhere).direction, expected.direction)


@given(st.lists(st.floats(-1e18, 1e18), min_size=1, max_size=4), st.floats(0, 0.999))
def test_weights_that_never_change_stay_bit_for_bit(weights, momentum):
    rule, state, J = cr_mogm(constant(weights), momentum), None, torch.ones(len(weights), 2)
    for _ in range(3):
        seen, state = aggregate(rule, J, state)[1:]
        assert seen.tolist() == weights


def test_weights_entry_by_entry_are_averaged_entry_by_entry():
    trees = [{"w": number(k)[:, :3], "b": number(k)[:, 3]} for k in range(2)]
    first, second = (aggregate(entrywise(), tree).weights for tree in trees)
    rule = cr_mogm(entrywise(), 0.25)
    state = aggregate(rule, trees[0]).state
    weights = aggregate(rule, trees[1], state).weights
    torch.testing.assert_close(weights["w"], 0.25 * first["w"] + 0.75 * second["w"])
    torch.testing.assert_close(weights["b"], 0.25 * first["b"] + 0.75 * second["b"])


def test_the_state_keeps_its_shapes_and_dtypes_from_the_start_on():
    rule = cr_mogm(cr_mogm(upgrad()))
    old = start(rule, number(0))
    new = aggregate(rule, number(0), old).state
    kind = lambda state: [(leaf.shape, leaf.dtype) for leaf in tree_leaves(state)]
    assert kind(old) == kind(new)
    assert type(old) is type(new)


def twice(J):
    rule = cr_mogm(upgrad(), 0.7)
    state = aggregate(rule, J).state
    return aggregate(rule, J.sin(), state).direction


def test_derivatives_are_those_of_finite_differences():
    J = number(2).div(5).requires_grad_()
    assert torch.autograd.gradcheck(twice, J, check_forward_ad=True)


def test_a_batch_is_the_loop():
    batch = torch.stack([number(k) for k in range(3)])
    loop = torch.stack([twice(J) for J in batch])
    torch.testing.assert_close(torch.vmap(twice)(batch), loop)


@pytest.mark.parametrize("momentum", [-0.1, 1.0, torch.nan])
def test_momentum_is_checked(momentum):
    with pytest.raises(ValueError, match=r"cr_mogm: momentum must be in \[0, 1\), found"):
        cr_mogm(mean(), momentum)


def test_a_builder_is_no_rule():
    with pytest.raises(TypeError, match=r"cr_mogm: expected a rule, found function. Call its builder"):
        cr_mogm(upgrad)
