"""Unit sum, and a rule of normalized rows: against the balancer of EnCodec, and rows that are divided by hand."""

import math

import pytest
import torch
from bounds import eps
from hypothesis import given
from hypothesis import strategies as st

import functional_jd as jd
from functional_jd import aggregators

ROWS = torch.tensor([[3.0, 4.0, 0.0], [0.0, -2.0, 1.0], [100.0, 1.0, -1.0]], dtype=torch.float64)
LOSSES = torch.tensor([0.5, 4.0, 100.0], dtype=torch.float64)


def test_of_two_rows_it_is_the_mean_of_the_unit_rows():
    found = jd.aggregate(jd.unit_sum(), torch.tensor([[3.0, 4.0], [0.0, 2.0]]))
    torch.testing.assert_close(found.direction, torch.tensor([0.3, 0.9]))
    assert found.weights.tolist() == [0.1, 0.25]


@pytest.mark.parametrize("momentum", [0.5, 0.999])
def test_with_momentum_it_is_the_balancer_of_encodec(momentum):
    """Section 3.4: g_i times u_i by the bias-corrected moving average of its norm."""
    u, state, total, share = [1.0, 2.0, 1.0], None, torch.zeros(3, dtype=torch.float64), 0.0
    for call in range(6):
        rows = ROWS * torch.tensor([[1.0 + call], [0.5**call], [1.0]])
        total, share = momentum * total + rows.norm(dim=1), momentum * share + 1
        found = jd.aggregate(jd.unit_sum(u, momentum), rows, state)
        torch.testing.assert_close(found.direction, torch.tensor(u).double() / (total / share) @ rows)
        state = found.state


@given(st.lists(st.floats(1e-9, 1e9), min_size=3, max_size=3))
def test_no_unit_of_a_loss_matters_and_the_length_is_bounded(units):
    expected = jd.aggregate(jd.unit_sum([1.0, 2.0, 0.0]), ROWS).direction
    found = jd.aggregate(jd.unit_sum([1.0, 2.0, 0.0]), torch.tensor(units, dtype=torch.float64)[:, None] * ROWS)
    torch.testing.assert_close(found.direction, expected)
    assert found.direction.norm() <= 3 * (1 + 2**12 * eps())


def test_a_row_of_zeros_has_no_weight_and_vanishes_slowly_with_momentum():
    rows = ROWS * torch.tensor([[1.0], [0.0], [1.0]])
    assert jd.aggregate(jd.unit_sum(), rows).weights[1] == 0
    rule = jd.unit_sum(momentum=0.9)
    small = jd.aggregate(rule, ROWS * torch.tensor([[1.0], [1e-3], [1.0]]), jd.aggregate(rule, ROWS).state)
    assert 100 * (small.weights[1] * ROWS[1] * 1e-3).norm() < 1 / 3  # which it is without momentum


RULES = [jd.mgda(), jd.cagrad(0.5), jd.upgrad(), jd.config(), jd.mean(), jd.nash_mtl(), jd.clipped(2.0), jd.stch()]
SIZES = {"norm": ROWS.norm(dim=1), "loss": LOSSES, "both": ROWS.norm(dim=1) * LOSSES}


@pytest.mark.parametrize("by", SIZES)
@pytest.mark.parametrize("rule", RULES)
def test_a_normalized_rule_receives_the_divided_rows(rule, by):
    found = jd.aggregate(aggregators.normalized(rule, by), ROWS, losses=LOSSES)
    expected = jd.aggregate(rule, ROWS / SIZES[by][:, None], losses=LOSSES)
    torch.testing.assert_close(found.direction, expected.direction)
    torch.testing.assert_close(found.weights, expected.weights / SIZES[by])


@pytest.mark.parametrize("by", SIZES)
@pytest.mark.parametrize("rule", [jd.mgda(), jd.mean(), jd.trimmed_mean(1), jd.imtl_l(), jd.db_mtl()])
def test_in_a_step_the_engine_gives_it_the_same(rule, by):
    losses = lambda w: (torch.tensor([[1.0, 2.0], [-3.0, 0.5], [0.1, 9.0]], dtype=w.dtype) @ w - 1).square()
    start = torch.tensor([0.3, 0.2], dtype=torch.float64)
    how = {"losses": losses, "aggregator": aggregators.normalized(rule, by), "optimizer": jd.sgd(1.0)}
    if rule.view.products == "rows":
        with pytest.raises(ValueError, match="rule must have one weight per row"):
            jd.step(jd.train_state(start, **how), **how)
        return
    state, info = jd.step(jd.train_state(start, **how), **how)
    J, L = jd.jacobian_fn(losses)(start)
    found = jd.aggregate(how["aggregator"], J, losses=L)
    torch.testing.assert_close(info.weights, found.weights)
    torch.testing.assert_close(start - state.params, found.direction)


@given(st.sampled_from(["norm", "loss", "both"]), st.integers(-20, 20))
def test_a_normalized_rule_ignores_the_unit_of_a_loss(by, exponent):
    c = torch.tensor([1.0, 2.0**exponent, 1.0], dtype=torch.float64)
    rule = aggregators.normalized(jd.mgda(), by)
    expected = jd.aggregate(rule, ROWS, losses=LOSSES).direction
    found = jd.aggregate(rule, c[:, None] * ROWS, losses=c * LOSSES).direction
    if by == "both":  # which divides by the unit twice
        found, expected = (
            jd.aggregate(
                aggregators.normalized(aggregators.normalized(jd.mgda()), by), c[:, None] * ROWS, losses=LOSSES
            ).direction,
            jd.aggregate(aggregators.normalized(aggregators.normalized(jd.mgda()), by), ROWS, losses=LOSSES).direction,
        )
    torch.testing.assert_close(found, expected, rtol=2**22 * eps(), atol=2**22 * eps())


def test_normalized_composes():
    both = aggregators.normalized(jd.cr_mogm(aggregators.normalized(jd.mgda(), "loss")), "norm")
    fresh, repeated = jd.held(both)
    found = jd.aggregate(fresh, ROWS, losses=LOSSES)
    again = jd.aggregate(repeated, ROWS, found.state, losses=LOSSES)
    assert torch.equal(found.weights, again.weights)
    grouped = jd.grouped({"a": aggregators.normalized(jd.mgda()), "b": jd.mean()})
    assert jd.aggregate(grouped, {"a": ROWS, "b": ROWS}).direction["a"].isfinite().all()
    with pytest.raises(ValueError, match=r"^normalized: rule must be for all parameters, found a rule by groups"):
        aggregators.normalized(grouped)
    assert jd.aggregate(aggregators.normalized(jd.mgda(), "loss"), ROWS, losses=-LOSSES).direction.isnan().all()


def test_uw_so_is_the_softmax_of_inverse_losses():
    found = jd.aggregate(aggregators.uw_so(1.0), torch.eye(2), losses=torch.tensor([1.0, 2.0])).weights
    expected = math.exp(1) / (math.exp(1) + math.exp(0.5))
    torch.testing.assert_close(found, torch.tensor([expected, 1 - expected], dtype=torch.float64))


@given(st.floats(0.01, 100.0), st.floats(0.1, 10.0))
def test_uw_so_needs_another_temperature_in_another_unit(unit, temperature):
    weights = jd.aggregate(aggregators.uw_so(temperature), ROWS, losses=LOSSES).weights
    again = jd.aggregate(aggregators.uw_so(temperature / unit), ROWS, losses=unit * LOSSES).weights
    torch.testing.assert_close(weights, again)
    assert (weights.diff() <= 0).all()  # the losses ascend
