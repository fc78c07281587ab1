"""What a step launches on an accelerator, where it waits, and the memory that it holds: ceilings.

A ceiling is what is counted today, and is lowered by whoever mends; it is never raised. Counts are exact, and the same
on every machine. TorchJD 0.18 launches 48, 90 and 234 with `UPGrad` in the first, third and last case, plain training
31, 79 and 145: `REPORT.md` has them all.
"""

import pytest
from device_steps import CASES, FORMS, ONE_SCALE, ours, peers, plain

CEILINGS: dict[tuple[str, str], tuple[int | None, ...]] = {
    ("one scale", "mean"): (37, 37, 85, 61, 151),
    ("one scale", "upgrad"): (43, 43, 79, 82, 208),
    ("one scale", "config"): (43, 43, 79, 82, 208),
    **{("one scale", rule): (43, None, 79, None, 208) for rule in ("mgda", "cagrad")},
    ("one scale", "nash_mtl"): (45, None, 81, None, 210),
    ("a scale per objective", "mean"): (70, None, 106, 90, 182),
    ("a scale per objective", "upgrad"): (50, None, 86, 89, 215),
    **{("a scale per objective", rule): (50, None, 86, None, 215) for rule in ("mgda", "config")},
    ("autocast float16", "mean"): (93, None, None, 137, None),
    ("autocast float16", "upgrad"): (71, None, None, 136, None),
}
"""By form and rule: the launches for each of `CASES`. A rule that searches waits for a copy and for the way back."""
COUNTED = [(*key, case, most) for key, row in CEILINGS.items() for case, most in zip(CASES, row, strict=True) if most]


@pytest.mark.parametrize(("form", "rule", "case", "most"), COUNTED)
def test_a_step_stays_below_its_ceiling(form, rule, case, most):
    found = ours(case, rule, form)
    assert found.launches <= most
    assert found.waits <= (0 if rule == "mean" else 2)


PEAKS = {
    ("one scale", "mean"): {("MLP", 8): 848, ("transformer", 3): 2017},
    ("one scale", "upgrad"): {("MLP", 8): 6608, ("conv", 4): 4439, ("transformer", 3): 4283},
    ("a scale per objective", "mean"): {("MLP", 8): 848, ("transformer", 3): 2030},
}
"""By form and rule: by case the kilobytes above what was alive before: rows, joined rows, and the next state."""


@pytest.mark.parametrize(("form", "rule", "case"), [(*key, case) for key, cases in PEAKS.items() for case in cases])
def test_a_step_holds_no_more_memory_than_its_ceiling(form, rule, case):
    assert ours(case, rule, form).peak <= 1000 * PEAKS[form, rule][case]


@pytest.mark.parametrize("case", [CASES[0], CASES[2], CASES[4]])
def test_a_scale_for_each_objective_costs_little_more_than_one_where_no_rows_are_needed(case):
    assert ours(case, "mean", FORMS[1]).launches <= 1.25 * ours(case, "mean", ONE_SCALE).launches


def test_the_peer_and_plain_training_are_counted_on_the_same_device():
    pytest.importorskip("torchjd")
    case = CASES[0]
    ordinary, peer = plain(case), peers(case, "upgrad")
    assert (ordinary.launches, peer.launches) == (31, 48)
    assert ordinary.waits == 0
    assert peer.waits >= 2  # the Gramian goes to the host, and weights come back
    assert plain(case, FORMS[2]).launches > ordinary.launches


def test_a_count_is_exact():
    assert ours(CASES[0], "mean") == ours(CASES[0], "mean")
    assert plain(CASES[0]) == plain(CASES[0])
