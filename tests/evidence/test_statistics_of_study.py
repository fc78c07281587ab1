"""Statistics of the study, on results made by hand and beside published figures."""

import pytest
import torch
from study_statistics import (
    at_the_end,
    critical_difference,
    difference,
    friedman,
    holm,
    joined,
    mean_ranks,
    passes_taken,
    scores,
    signed_ranks,
    spent,
    students_t,
)


def cell(validation, test, **more):
    return {
        "validation": validation,
        "test": test,
        "configurations": [{}] * len(test),
        "passes": 2,
        "time": 3.0,
        **more,
    }


def test_validation_chooses_in_every_draw_and_test_is_shown():
    validation = [[[0.1, 0.2, 0.9], [0.1, 0.5, 0.3]], [[0.3, 0.1, 0.8], [0.2, 0.4, 0.4]]]  # [c, d, shares]
    test = [[[1, 2, 3], [4, 5, 6]], [[7, 8, 9], [10, 11, 12]]]
    made = cell(validation, test)
    assert scores(made).tolist() == [3, 12]
    assert scores(made, share=0).tolist() == [7, 10]
    assert scores(made, trials=1).tolist() == [3, 6]
    assert spent(made) == (4, 6.0)


def test_an_interval_is_that_of_the_normal_distribution():
    g = torch.Generator().manual_seed(0)
    ours = torch.randn(400, generator=g, dtype=torch.float64)
    found = difference(ours + 5, torch.zeros(400, dtype=torch.float64), shared=False)
    half = 1.96 * float(ours.std()) / 20
    assert found.mean == pytest.approx(5 + float(ours.mean()))
    assert found.low == pytest.approx(found.mean - half, abs=0.1 * half)
    assert found.high == pytest.approx(found.mean + half, abs=0.1 * half)
    assert found.word == "better"
    assert difference(ours, ours, shared=False).word == "none seen"


def test_ten_draws_cover_nine_times_in_ten():
    """What the page says against its own intervals: by percentiles, of ten draws from a normal distribution."""
    g = torch.Generator().manual_seed(0)
    zeros, covered = torch.zeros(10, dtype=torch.float64), 0
    for _ in range(300):
        found = difference(torch.randn(10, generator=g, dtype=torch.float64), zeros, shared=False, resamples=400)
        covered += found.word == "none seen"
    assert 0.85 < covered / 300 < 0.94


def test_three_draws_cover_three_in_four():
    """What the page says of the larger problems: the interval reaches from the smallest difference to the largest."""
    g = torch.Generator().manual_seed(0)
    zeros, covered = torch.zeros(3, dtype=torch.float64), 0
    for _ in range(300):
        ours = torch.randn(3, generator=g, dtype=torch.float64)
        found = difference(ours, zeros, shared=False, resamples=2000)
        assert (found.low, found.high) == pytest.approx((float(ours.min()), float(ours.max())))
        covered += found.word == "none seen"
    assert 0.68 < covered / 300 < 0.82


def test_intervals_of_splits_of_the_same_rows_are_wider():
    """The corrected variance of Nadeau and Bengio: 1/n + n_test / n_train, here 1/10 + 1/3, in place of 1/10."""
    ours = torch.linspace(-1, 1, 10, dtype=torch.float64)
    apart, same = (difference(ours, torch.zeros_like(ours), shared) for shared in (False, True))
    assert (same.high - same.mean) / (apart.high - apart.mean) == pytest.approx((1 + 10 / 3) ** 0.5)
    assert same.mean == apart.mean


def test_students_t_is_wider_than_the_bootstrap_of_ten_draws():
    """The interval of scipy; widened as the other one where draws are splits of the same rows."""
    from scipy import stats

    ours = torch.randn(10, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    zeros = torch.zeros_like(ours)
    found, same = students_t(ours, zeros, shared=False), students_t(ours, zeros, shared=True)
    expected = stats.ttest_1samp(ours.numpy(), 0).confidence_interval(0.95)
    assert (found.low, found.high) == pytest.approx((expected.low, expected.high))
    assert (same.high - same.mean) / (found.high - found.mean) == pytest.approx((1 + 10 / 3) ** 0.5)
    bootstrap = difference(ours, zeros, shared=False)
    assert found.high - found.low > bootstrap.high - bootstrap.low


def test_passes_are_counted_by_the_steps_that_were_taken():
    """Four rates at once for 100 steps, and a fifth for 40; or the first three of them."""
    made = cell([], [], steps=[100, 40], curve=[[[0.1] * 4] * 5, [[0.1]] * 2])
    assert passes_taken(made) == 2 * (4 * 100 + 40)
    assert passes_taken(made, 3) == 2 * 300


def test_a_joined_search_has_so_many_trials():
    """The validation scores of both cells choose together."""
    first = cell([[[0.5] * 3]], [[[1.0] * 3]])
    then = cell([[[0.4] * 3], [[0.6] * 3], [[0.9] * 3]], [[[2.0] * 3], [[3.0] * 3], [[4.0] * 3]])
    assert [scores(joined(first, then, trials)).item() for trials in (1, 2, 3, 4)] == [1, 1, 3, 4]
    assert scores(joined(then, first, 2)).item() == 4


def test_the_end_is_that_of_the_run_with_the_best_rate():
    """A run with another rate may have gone on; a fall does not undo a rise."""
    rose, fell = [[0.1], [0.2], [0.3], [0.4], [0.6], [0.5]], [[0.3], [0.2], [0.1]]
    made = cell([], [], curve=[rose, fell], stopped=[True, False])
    went_on, rise = at_the_end(made, 1 / 3)
    assert not went_on
    assert rise == pytest.approx(0.6 - 0.4)
    assert at_the_end(made | {"stopped": [False, True]}, 1 / 3)[0]


def test_the_critical_difference_is_that_of_demsar():
    """His example of four methods on fourteen sets, and two of his table of q."""
    assert critical_difference(4, 14) == pytest.approx(2.569 * (4 * 5 / (6 * 14)) ** 0.5, rel=1e-3)
    assert critical_difference(10, 15) == pytest.approx(3.164 * (10 * 11 / (6 * 15)) ** 0.5, rel=1e-3)


def test_ranks_share_ties():
    table = torch.tensor([[0.9, 0.5, 0.5], [0.1, 0.3, 0.2]], dtype=torch.float64)
    assert mean_ranks(table).tolist() == [2.0, 1.75, 2.25]
    best = torch.tensor([[0.9, 0.8, 0.1]] * 12, dtype=torch.float64)
    assert friedman(best) == pytest.approx(torch.tensor(-12.0).exp().item())  # chi square of 24 with two degrees


def test_signed_ranks_are_corrected_for_their_number():
    """Six of six differences of one sign have a chance of 2 / 2^6; of two methods, the smaller counts twice."""
    base = torch.linspace(0.1, 0.6, 6, dtype=torch.float64)
    better = base + torch.linspace(0.01, 0.06, 6, dtype=torch.float64)
    table = torch.stack([base, better, base], dim=1)
    assert signed_ranks(table, 0) == pytest.approx([1.0, 2 * 2 / 64, 1.0])


def test_holm_multiplies_by_the_tests_that_are_left():
    """The example of Holm's procedure: 0.01, 0.02, 0.03, 0.04 of four tests, and chances never fall nor pass 1."""
    assert holm([0.03, 0.01, 0.04, 0.02]) == pytest.approx([0.06, 0.04, 0.06, 0.06])
    assert holm([0.9, 0.8]) == [1.0, 1.0]
    assert holm([]) == []
