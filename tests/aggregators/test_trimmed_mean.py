"""Trimmed mean: SciPy's, entry by entry, and wrong rows that do not get through."""

import pytest
import torch
from bounds import check_within, sum_bound
from hypothesis import given
from hypothesis import strategies as st
from sequences import integer_jacobians

from functional_jd.aggregation.aggregate import aggregate
from functional_jd.aggregators.trimmed_mean import trimmed_mean

FIVE = torch.tensor(
    [[5.0, -8.0, 1.0], [6.0, 5.0, 0.0], [8.0, 5.0, 1.0], [5.0, -1.0, 9.0], [-4.0, -9.0, -1.0]], dtype=torch.float64
)


def problems():
    """Jacobians of small integers, where equal entries are frequent, and numbers to trim that fit."""
    return integer_jacobians((1, 7), (1, 4)).flatmap(lambda J: st.tuples(st.just(J), st.integers(0, (len(J) - 1) // 2)))


@given(problems(), st.integers(-60, 60), st.randoms(use_true_random=False))
def test_equivariant_under_scaling_translation_and_the_order_of_rows(problem, exponent, chance):
    J, trim = problem
    order = list(range(len(J)))
    chance.shuffle(order)
    offset = torch.arange(1.0, J.shape[1] + 1, dtype=torch.float64)
    d = aggregate(trimmed_mean(trim), J).direction
    moved = aggregate(trimmed_mean(trim), (J[order] + offset) * 2.0**exponent).direction
    check_within(moved, (d + offset) * 2.0**exponent, 2 * sum_bound(J.abs() + offset) * 2.0**exponent)


@given(problems(), st.sampled_from([-1e30, 1e30]))
def test_with_at_most_trim_wrong_rows_every_entry_lies_between_right_ones(problem, wrong):
    J, trim = problem
    d = aggregate(trimmed_mean(trim), torch.cat([J[trim:], torch.full_like(J[:trim], wrong)])).direction
    assert (d >= J[trim:].amin(0) - sum_bound(J)).all()
    assert (d <= J[trim:].amax(0) + sum_bound(J)).all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_a_tree_of_any_shapes_and_low_precision(dtype):
    generator = torch.Generator().manual_seed(0)
    tree = {
        "b": torch.randn(5, generator=generator).to(dtype),
        "a": [torch.randn(5, 2, 3, generator=generator).to(dtype)],
    }
    result = aggregate(trimmed_mean(2), tree)
    assert torch.equal(result.direction["b"], tree["b"].median())
    assert torch.equal(result.direction["a"][0], tree["a"][0].median(0).values)
    assert result.weights["a"][0].dtype == torch.float32


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("trim", [0, 1, 2])
def test_what_is_not_finite_is_not_hidden(bad, trim):
    for row in range(5):
        J = FIVE.clone()
        J[row, 1] = bad
        d = aggregate(trimmed_mean(trim), J).direction
        assert d.isfinite().tolist() == [True, False, True]


def test_numbers_of_rows_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match=r"trimmed_mean: expected at least 7 rows, with trim=3, found 5. Use more"):
        aggregate(trimmed_mean(3), FIVE)
