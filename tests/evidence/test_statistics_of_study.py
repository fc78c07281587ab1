"""Statistics of the study, on results made by hand and beside published figures."""

import pytest
import study_statistics as statistics
import torch
from study_statistics import difference, holm, joined, scores


def cell(validation, test, **more):
    return {"validation": validation, "test": test, "configurations": [{}] * len(test), "passes": 2, "time": 3.0} | more


def test_validation_chooses_in_every_draw_and_test_is_shown():
    validation = [[[0.1, 0.2, 0.9], [0.1, 0.5, 0.3]], [[0.3, 0.1, 0.8], [0.2, 0.4, 0.4]]]  # [c, d, shares]
    test = [[[1, 2, 3], [4, 5, 6]], [[7, 8, 9], [10, 11, 12]]]
    made = cell(validation, test)
    assert scores(made).tolist() == [3, 12]
    assert scores(made, share=0).tolist() == [7, 10]
    assert scores(made, trials=1).tolist() == [3, 6]
    assert statistics.spent(made) == (4, 6.0)


def test_intervals_of_splits_of_the_same_rows_are_wider():
    """The corrected variance of Nadeau and Bengio: 1/n + n_test / n_train, here 1/10 + 1/3, in place of 1/10."""
    ours = torch.linspace(-1, 1, 10, dtype=torch.float64)
    apart, same = (difference(ours, torch.zeros_like(ours), shared) for shared in (False, True))
    assert (same.high - same.mean) / (apart.high - apart.mean) == pytest.approx((1 + 10 / 3) ** 0.5)
    assert same.mean == apart.mean


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
    went_on, rise = statistics.at_the_end(made, 1 / 3)
    assert not went_on
    assert rise == pytest.approx(0.6 - 0.4)
    assert statistics.at_the_end(made | {"stopped": [False, True]}, 1 / 3)[0]


def test_the_critical_difference_is_that_of_demsar():
    """His example of four methods on fourteen sets, and two of his table of q."""
    assert statistics.critical_difference(4, 14) == pytest.approx(2.569 * (4 * 5 / (6 * 14)) ** 0.5, rel=1e-3)
    assert statistics.critical_difference(10, 15) == pytest.approx(3.164 * (10 * 11 / (6 * 15)) ** 0.5, rel=1e-3)


def test_signed_ranks_are_corrected_for_their_number():
    """Six of six differences of one sign have a chance of 2 / 2^6; of two methods, the smaller counts twice."""
    base = torch.linspace(0.1, 0.6, 6, dtype=torch.float64)
    better = base + torch.linspace(0.01, 0.06, 6, dtype=torch.float64)
    table = torch.stack([base, better, base], dim=1)
    assert statistics.signed_ranks(table, 0) == pytest.approx([1.0, 2 * 2 / 64, 1.0])


def test_holm_multiplies_by_the_tests_that_are_left():
    """The example of Holm's procedure: 0.01, 0.02, 0.03, 0.04 of four tests, and chances never fall nor pass 1."""
    assert holm([0.03, 0.01, 0.04, 0.02]) == pytest.approx([0.06, 0.04, 0.06, 0.06])
    assert holm([0.9, 0.8]) == [1.0, 1.0]
    assert holm([]) == []


@pytest.mark.parametrize(("draws", "least", "most"), [(3, 0.68, 0.82), (10, 0.85, 0.94)])
def test_intervals_of_few_draws_cover_less_than_they_say(draws, least, most):
    """What the page says against its own intervals: by percentiles, of draws from a normal distribution."""
    g, zeros, covered = torch.Generator().manual_seed(0), torch.zeros(draws, dtype=torch.float64), 0
    for _ in range(300):
        ours = torch.randn(draws, generator=g, dtype=torch.float64)
        found = difference(ours, zeros, shared=False, resamples=2000 if draws == 3 else 400)
        covered += found.word == "none seen"
    assert least < covered / 300 < most
