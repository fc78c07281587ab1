"""Krum and the trimmed mean: by their definitions, and wrong rows that do not get through."""

from fractions import Fraction

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sequences import integer_jacobians, random_rows

import functional_jd as jd


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


def test_of_two_rows_that_are_nearest_to_each_other_the_first_counts():
    many = torch.stack([random_rows(4, 11, seed=seed) for seed in range(50)])
    swept = torch.vmap(lambda J: jd.aggregate(jd.krum(1), J).weights)(many)
    for J, weights in zip(many, swept, strict=True):
        nearest = torch.cdist(J, J).fill_diagonal_(torch.inf).argmin()
        for found in (weights, jd.aggregate(jd.krum(1), J).weights):
            assert found.argmax() == min(divmod(int(nearest), 4))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_the_median_of_low_precision_has_weights_in_float32(dtype):
    J = random_rows(5, 6).to(dtype)
    result = jd.aggregate(jd.trimmed_mean(2), {"a": J})
    assert torch.equal(result.direction["a"], J.median(0).values)
    assert result.weights["a"].dtype == torch.float32


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("trim", [0, 1, 2])
def test_what_is_not_finite_is_not_hidden(bad, trim):
    for row in range(5):
        J = random_rows(5, 3)
        J[row, 1] = bad
        d = jd.aggregate(jd.trimmed_mean(trim), J).direction
        assert d.isfinite().tolist() == [True, False, True]


def test_numbers_of_rows_that_do_not_fit_are_refused():
    for rule, message in (
        (jd.krum(4), "krum: expected at least 7 rows, with n_byzantine=4 .* found 6. Use more"),
        (jd.krum(0, 8), "krum: expected at least 8 rows, .* n_selected=8, found 6. Use more"),
        (jd.trimmed_mean(3), "trimmed_mean: expected at least 7 rows, with trim=3, found 6. Use more"),
    ):
        with pytest.raises(ValueError, match=message):
            jd.aggregate(rule, torch.ones(6, 2))
