"""Krum and the trimmed mean: by their definitions, and wrong rows that do not get through."""

from fractions import Fraction

import pytest
import torch
from bounds import check_within, sum_bound
from hypothesis import given
from hypothesis import strategies as st
from sequences import integer_jacobians

import functional_jd as jd

SIX = torch.tensor([[-6.0, -4.0], [2.0, 7.0], [4.0, -8.0], [-4.0, 4.0], [2.0, -6.0], [8.0, -1.0]], dtype=torch.float64)


def krum_problems():
    """Jacobians of small integers, whose scores are exact and often equal, and numbers of rows that fit."""
    return integer_jacobians((3, 7), (1, 3)).flatmap(
        lambda J: st.tuples(st.just(J), st.integers(0, len(J) - 3), st.integers(1, len(J)))
    )


def selected(J, n_byzantine, n_selected):
    """The rows that the paper selects, in exact arithmetic; equal scores go by the order of the rows."""
    rows = [[Fraction(x) for x in row] for row in J.tolist()]
    scores = []
    for i, one in enumerate(rows):
        others = [sum((x - y) ** 2 for x, y in zip(one, other, strict=True)) for j, other in enumerate(rows) if j != i]
        scores.append((sum(sorted(others)[: len(rows) - n_byzantine - 2]), i))
    return {i for _, i in sorted(scores)[:n_selected]}


@given(krum_problems())
def test_the_rows_of_the_lowest_scores_count_the_same(problem):
    J, n_byzantine, n_selected = problem
    chosen = selected(J, n_byzantine, n_selected)
    weights = jd.aggregate(jd.krum(n_byzantine, n_selected), J).weights
    expected = [1 / n_selected if i in chosen else 0.0 for i in range(len(J))]
    assert torch.equal(weights, torch.tensor(expected, dtype=torch.float64))


@given(krum_problems(), st.integers(-60, 60))
def test_equivariant_under_scaling_and_translation(problem, exponent):
    J, *numbers = problem
    moved = (J + torch.arange(1.0, J.shape[1] + 1)) * 2.0**exponent
    assert torch.equal(jd.aggregate(jd.krum(*numbers), moved).weights, jd.aggregate(jd.krum(*numbers), J).weights)


def test_distances_count_squared():
    """Squares to the three closest: 1 + 18 + 50 = 69 for the first row, 17 + 18 + 25 = 60 for the last.

    Not squared, they are 1 + 4.2 + 7.1 = 12.3 and 4.1 + 4.2 + 5 = 13.4.
    """
    J = torch.tensor([[5.0, 8.0], [7.0, 1.0], [4.0, 8.0], [4.0, 1.0], [8.0, 5.0]])
    assert jd.aggregate(jd.krum(0), J).weights.tolist() == [0.0, 0.0, 0.0, 0.0, 1.0]


def test_rows_that_are_wrong_by_any_amount_do_not_count():
    right = torch.randn(7, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    for size in (1e2, 1e18):
        wrong = size * torch.tensor([[1.0, 1.0, -1.0, 0.0], [1.0, 1.0, -1.0, 1e-3]], dtype=torch.float64)
        weights = jd.aggregate(jd.krum(2, 3), torch.cat([wrong, right])).weights
        assert torch.equal(weights[:2], torch.zeros(2, dtype=torch.float64))


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
    d = jd.aggregate(jd.trimmed_mean(trim), J).direction
    moved = jd.aggregate(jd.trimmed_mean(trim), (J[order] + offset) * 2.0**exponent).direction
    check_within(moved, (d + offset) * 2.0**exponent, 2 * sum_bound(J.abs() + offset) * 2.0**exponent)


@given(problems(), st.sampled_from([-1e30, 1e30]))
def test_with_at_most_trim_wrong_rows_every_entry_lies_between_right_ones(problem, wrong):
    J, trim = problem
    d = jd.aggregate(jd.trimmed_mean(trim), torch.cat([J[trim:], torch.full_like(J[:trim], wrong)])).direction
    assert (d >= J[trim:].amin(0) - sum_bound(J)).all()
    assert (d <= J[trim:].amax(0) + sum_bound(J)).all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_a_tree_of_any_shapes_and_low_precision(dtype):
    generator = torch.Generator().manual_seed(0)
    tree = {
        "b": torch.randn(5, generator=generator).to(dtype),
        "a": [torch.randn(5, 2, 3, generator=generator).to(dtype)],
    }
    result = jd.aggregate(jd.trimmed_mean(2), tree)
    assert torch.equal(result.direction["b"], tree["b"].median())
    assert torch.equal(result.direction["a"][0], tree["a"][0].median(0).values)
    assert result.weights["a"][0].dtype == torch.float32


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("trim", [0, 1, 2])
def test_what_is_not_finite_is_not_hidden(bad, trim):
    for row in range(5):
        J = FIVE.clone()
        J[row, 1] = bad
        d = jd.aggregate(jd.trimmed_mean(trim), J).direction
        assert d.isfinite().tolist() == [True, False, True]


def test_numbers_of_rows_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match=r"krum: expected at least 7 rows, with n_byzantine=4 .* found 6. Use more"):
        jd.aggregate(jd.krum(4), SIX)
    with pytest.raises(ValueError, match=r"krum: expected at least 8 rows, .* n_selected=8, found 6. Use more"):
        jd.aggregate(jd.krum(0, 8), SIX)
    with pytest.raises(ValueError, match=r"trimmed_mean: expected at least 7 rows, with trim=3, found 5. Use more"):
        jd.aggregate(jd.trimmed_mean(3), FIVE)
