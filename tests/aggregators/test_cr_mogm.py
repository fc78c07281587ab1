"""CR-MOGM: the running mean of another rule's weights, whatever the rule."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sequences import number

from functional_jd.aggregation.aggregate import aggregate, start
from functional_jd.aggregation.lifts import stateless
from functional_jd.aggregation.views import full_jacobian
from functional_jd.aggregators.constant import constant
from functional_jd.aggregators.cr_mogm import cr_mogm
from functional_jd.aggregators.mean import mean
from functional_jd.aggregators.upgrad import upgrad


def entrywise():
    """Weights for every entry: how much of a row's absolute values it holds."""
    return stateless(full_jacobian, lambda J: {key: leaf.abs() / leaf.abs().sum() for key, leaf in J.items()})


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
