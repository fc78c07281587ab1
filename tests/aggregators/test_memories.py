"""Rules with a memory: what units and lengths do not change, and what is carried over from call to call."""

import pytest
import torch
from bounds import check_within, eps
from hypothesis import given
from hypothesis import strategies as st
from sequences import number, values

import functional_jd as jd
from functional_jd.aggregation.aggregate import start
from functional_jd.aggregation.combine import averaged, zero_rows
from functional_jd.aggregation.views import full_jacobian, row_norms
from functional_jd.testing.strategies import jacobians


def test_without_a_scale_the_weights_of_sdmgrad_stay():
    J = number(0)
    assert jd.aggregate(jd.sdmgrad(), J, None, -J).weights.tolist() == pytest.approx([1 / 3] * 3)
    assert jd.aggregate(jd.sdmgrad(), 0 * J, None, J).direction.tolist() == [0] * 4


def test_a_row_that_was_zero_so_far_starts_with_its_first_risk_in_excess_mtl():
    J = torch.tensor([[0.0, 0.0], [1.0, 1.0]], dtype=torch.float64)
    rule = jd.excess_mtl(n_warmup=1)
    state = jd.aggregate(rule, J).state
    direction, weights, state = jd.aggregate(rule, J, state)
    assert direction.isfinite().all()
    assert weights[1] > weights[0] > 0
    weights = jd.aggregate(rule, 1e9 * J.flip(0), state).weights
    assert weights[0] > 0.1


def test_averages_of_db_mtl_are_averaged():
    directions, state = [], None
    for k in range(2):
        direction, _, state = jd.aggregate(jd.cr_mogm(jd.db_mtl(0.0), 0.25), number(0), state, losses=values(k))
        directions.append(direction)
    plain = [jd.aggregate(jd.db_mtl(0.0), number(0), losses=values(k)).direction for k in range(2)]
    torch.testing.assert_close(directions, [plain[0], 0.25 * plain[0] + 0.75 * plain[1]])


@pytest.mark.parametrize("scales", [[1e-18, 1.0, 1e18], [1e18] * 3, [1e-18] * 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_unit_of_a_loss_does_not_matter_to_db_mtl(scales, dtype):
    factors, rule, state, scaled = torch.tensor(scales, dtype=dtype), jd.db_mtl(), None, None
    for k in range(3):
        expected, _, state = jd.aggregate(rule, number(k).to(dtype), state, losses=values(k).to(dtype))
        rows, losses = factors.unsqueeze(1) * number(k).to(dtype), factors * values(k).to(dtype)
        direction, _, scaled = jd.aggregate(rule, rows, scaled, losses=losses)
        check_within(direction, expected, 64 * eps(dtype) * expected.abs().max())


def entrywise():
    """Weights for every entry: how much of a row's absolute values it holds."""
    return jd.stateless(full_jacobian, lambda J: {key: leaf.abs() / leaf.abs().sum() for key, leaf in J.items()})


@pytest.mark.parametrize("rule", [jd.upgrad(), jd.mean(), jd.constant([0.1, 0.2, 0.3]), jd.cr_mogm(jd.upgrad())])
def test_the_first_call_is_the_rule_bit_for_bit_whatever_init_saw(rule):
    expected = jd.aggregate(rule, number(0))
    assert torch.equal(jd.aggregate(jd.cr_mogm(rule), number(0)).direction, expected.direction)
    elsewhere = start(jd.cr_mogm(rule), number(1) * torch.nan)
    assert torch.equal(jd.aggregate(jd.cr_mogm(rule), number(0), elsewhere).direction, expected.direction)


@given(st.lists(st.floats(-1e18, 1e18), min_size=1, max_size=4), st.floats(0, 0.999))
def test_weights_that_never_change_stay_bit_for_bit(weights, momentum):
    rule, state, J = jd.cr_mogm(jd.constant(weights), momentum), None, torch.ones(len(weights), 2)
    for _ in range(3):
        seen, state = jd.aggregate(rule, J, state)[1:]
        assert seen.tolist() == weights


def test_weights_entry_by_entry_are_averaged_entry_by_entry():
    trees = [{"w": number(k)[:, :3], "b": number(k)[:, 3]} for k in range(2)]
    first, second = (jd.aggregate(entrywise(), tree).weights for tree in trees)
    rule = jd.cr_mogm(entrywise(), 0.25)
    state = jd.aggregate(rule, trees[0]).state
    weights = jd.aggregate(rule, trees[1], state).weights
    torch.testing.assert_close(weights["w"], 0.25 * first["w"] + 0.75 * second["w"])
    torch.testing.assert_close(weights["b"], 0.25 * first["b"] + 0.75 * second["b"])


LIKE = {"w": torch.zeros(2, 2), "b": torch.zeros(())}
# Small integers and halves: exact in float64, in whatever order they are added up.
some_rows = jacobians(3, like=LIKE, wide=False)
some_weights = st.lists(st.integers(-4, 4), min_size=3, max_size=3).map(
    lambda w: torch.tensor(w, dtype=torch.float64) / 2
)
keeps = st.sampled_from([0.0, 0.25, 0.5]).map(lambda keep: torch.tensor(keep, dtype=torch.float64))


@given(st.lists(st.tuples(some_rows, some_weights, keeps), min_size=1, max_size=4))
def test_an_average_is_the_sum_of_what_every_call_left_in_it(calls):
    average = zero_rows(calls[0][0])
    for J, factors, keep in calls:
        average, _ = averaged(average, keep, J, factors)
    for name in LIKE:
        for i in range(3):
            expected = torch.zeros_like(average[name][i])
            for t, (J, factors, _) in enumerate(calls):
                left = factors[i]
                for _, _, keep in calls[t + 1 :]:
                    left = left * keep
                expected = expected + left * J[name][i]
            assert torch.equal(average[name][i], expected)


@given(some_rows, some_rows, some_weights, some_weights, keeps)
def test_weights_of_the_current_rows_and_the_rest_add_up_to_the_averages(before, J, factors, w, keep):
    after, as_weights = averaged(before, keep, J, factors)
    split = as_weights(w)
    for name, leaf in J.items():
        found = (split[name].weights * leaf).sum(0) + split[name].rest
        expected = sum(w[i] * after[name][i] for i in range(3))
        assert torch.equal(found, expected)


def test_half_precision_is_remembered_in_float32_and_measured_in_float64():
    J = torch.full((1, 4), 60000.0, dtype=torch.float16)
    assert zero_rows(J).dtype == torch.float32
    assert row_norms(J).tolist() == [J[0, 0].item() * 2]
    tiny = torch.full((1, 4), 1e-30)
    assert row_norms(tiny).tolist() == pytest.approx([2e-30], rel=eps(torch.float32), abs=0)
