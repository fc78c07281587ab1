"""Moving averages of rows: the sum over all calls, split in what the current rows count and what they do not have."""

import pytest
import torch
from bounds import eps
from hypothesis import given
from hypothesis import strategies as st

from functional_jd.aggregation.combine import average_as_weights, next_average, zero_rows
from functional_jd.aggregation.views import row_norms
from functional_jd.testing.strategies import jacobians

LIKE = {"w": torch.zeros(2, 2), "b": torch.zeros(())}
# Small integers and halves: exact in float64, in whatever order they are added up.
rows = jacobians(3, like=LIKE, wide=False)
weights = st.lists(st.integers(-4, 4), min_size=3, max_size=3).map(lambda w: torch.tensor(w, dtype=torch.float64) / 2)
keeps = st.sampled_from([0.0, 0.25, 0.5]).map(lambda keep: torch.tensor(keep, dtype=torch.float64))


@given(st.lists(st.tuples(rows, weights, keeps), min_size=1, max_size=4))
def test_an_average_is_the_sum_of_what_every_call_left_in_it(calls):
    average = zero_rows(calls[0][0])
    for J, factors, keep in calls:
        average = next_average(average, keep, J, factors)
    for key in LIKE:
        for i in range(3):
            expected = torch.zeros_like(average[key][i])
            for t, (J, factors, _) in enumerate(calls):
                left = factors[i]
                for _, _, keep in calls[t + 1 :]:
                    left = left * keep
                expected = expected + left * J[key][i]
            assert torch.equal(average[key][i], expected)


@given(rows, rows, weights, weights, keeps)
def test_weights_of_the_current_rows_and_the_rest_add_up_to_the_averages(before, J, factors, w, keep):
    after, split = next_average(before, keep, J, factors), average_as_weights(before, keep, factors, w)
    for key, leaf in J.items():
        found = (split[key].weights * leaf).sum(0) + split[key].rest
        expected = sum(w[i] * after[key][i] for i in range(3))
        assert torch.equal(found, expected)


@given(rows)
def test_norms_are_those_of_the_flattened_rows(J):
    expected = [torch.cat([J["w"][i].reshape(-1), J["b"][i].reshape(1)]).square().sum().sqrt() for i in range(3)]
    torch.testing.assert_close(row_norms(J), torch.stack(expected))


def test_half_precision_is_remembered_in_float32_and_measured_in_float64():
    J = torch.full((1, 4), 60000.0, dtype=torch.float16)
    assert zero_rows(J).dtype == torch.float32
    assert row_norms(J).tolist() == [J[0, 0].item() * 2]
    tiny = torch.full((1, 4), 1e-30)
    assert row_norms(tiny).tolist() == pytest.approx([2e-30], rel=eps(torch.float32), abs=0)
