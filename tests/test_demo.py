"""The demo: what people see, what they are told when they err, and that it learns."""

import importlib
import re
import sys
from pathlib import Path

import pytest
import torch
from sklearn.datasets import load_digits

import functional_jd.__main__ as demo
from functional_jd import jacobian_fn
from functional_jd.random import key

ROOT = Path(__file__).parents[1]
DIGITS = ("left digit", "right digit")


@pytest.fixture
def tiny(monkeypatch):
    monkeypatch.setattr(demo, "TRAIN_IMAGES", 64)
    monkeypatch.setattr(demo, "TEST_IMAGES", 50)
    monkeypatch.setattr(demo, "BATCH_SIZE", 32)


def run(capsys, *arguments):
    """The rows of the table, by label, and the text below it."""
    assert demo.main(arguments) == 0
    out, err = capsys.readouterr()
    assert err == ""
    assert re.match(r"training under \w+( and \w+)*: \d+ epochs each\n", out)
    rows = {label: cells.split() for label, cells in re.findall(r"(?m)^  (\S.*?)  +(\S.*)$", out)}
    return rows, out.rpartition("\n\n")[2]


def refusal(capsys, code, *arguments):
    """The one line that bad flags get."""
    with pytest.raises(SystemExit) as stopped:
        demo.main(arguments)
    out, err = capsys.readouterr()
    assert (stopped.value.code, out, err.count("\n")) == (code, "", 1)
    return err


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_the_table_has_a_column_per_rule_and_numbers_that_can_be(tiny, capsys, dtype):
    rows, end = run(capsys, "--epochs", "1", "--dtype", dtype)
    assert rows["after training"] == ["mean", "config"]
    assert rows["skipped steps"][1:3] == ["of", "2"]
    for side in ("left", "right"):
        for cell in rows[f"test accuracy, {side} digit"]:
            assert 0 <= float(cell.removesuffix("%")) <= 100
            assert round(float(cell.removesuffix("%")) / 2, 3).is_integer(), "one image of 50 is 2 %"
    mean, config = rows["test accuracy, left digit"]
    assert f"{mean} under mean, {config} under config" in end
    assert "the step is skipped and that scale halved" in end


def test_same_seed_same_numbers_and_another_seed_others(tiny, capsys):
    flags = ("--epochs", "2", "--rule", "upgrad", "--seed")
    first, again, other = (run(capsys, *flags, seed) for seed in ("3", "3", "4"))
    assert first == again
    assert first != other


@pytest.mark.parametrize("side", [0, 1])
def test_no_digit_is_in_both_sets_and_labels_name_the_digits_that_are_seen(side):
    """Columns 0 to 3 show the left digit alone, 8 to 11 the right one: halves of digits that only one set has seen."""
    data, own = load_digits(), slice(8 * side, 8 * side + 4)
    everything = (torch.tensor(data.images).float() / 16)[:, :, 4 * side : 4 * side + 4].flatten(1).tolist()
    known = set(zip(map(tuple, everything), data.target.tolist(), strict=True))
    seen = []
    for x, y in demo.train_and_test_images(key(0)):
        halves = [tuple(half) for half in x[:, 0, :, own].flatten(1).tolist()]
        assert set(zip(halves, y[:, side].tolist(), strict=True)) <= known
        seen.append(set(halves))
    assert seen[0] & seen[1] <= {tuple(half) for half in everything if everything.count(half) > 1}


def trained_a_little():
    """Heads that are no longer zero, so that the trunk has rows."""
    params = demo.initial_params(key(0))
    for task, head in params["heads"].items():
        head["weight"] = torch.randn(head["weight"].shape, generator=torch.Generator().manual_seed(len(task))) / 4
    return params


def test_the_small_gradient_underflows_unless_it_has_its_own_scale():
    params, images = trained_a_little(), tuple(part[:64] for part in demo.train_and_test_images(key(0))[0])
    losses = demo.jd.multitask(demo.jd.autocast(demo.features), demo.jd.autocast(demo.task_losses))

    def row(losses, scale):
        jacobian, _, _ = jacobian_fn(losses, scale=torch.tensor([1.0, 1.0, scale]))(params, *images)
        return torch.cat([leaf[2].flatten() for leaf in jacobian.shared.values()])

    exact = row(demo.EXACT, 1.0)
    assert row(losses, 1.0).count_nonzero() == 0
    assert row(losses, 2.0**16).sub(exact).norm() > 0.1 * exact.norm()
    assert row(losses, 2.0**36).sub(exact).norm() < 0.02 * exact.norm()
    assert exact.count_nonzero() > len(exact) / 2


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--rule", "best"), ("--rule", "upgrad", "'best'")),
        (("--rule", "constant"), ("--rule", "'constant'")),  # needs weights
        (("--dtype", "float8"), ("--dtype", "float16", "float8")),
        (("--epochs", "0"), ("--epochs", "at least 1", "'0'")),
        (("--seed", "one"), ("--seed", "'one'")),
        (("--seed", str(2**64)), ("--seed", "64 bits")),
        (("--device", "abacus"), ("--device", "'abacus'")),
        (("--device", "cuda:99"), ("--device", "'cuda:99'")),
    ],
    ids=lambda value: " ".join(value[:2]),
)
def test_bad_flags_get_one_line_before_training_starts(monkeypatch, capsys, flags, words):
    monkeypatch.setattr(demo, "train", lambda *_: pytest.fail("training started"))
    line = refusal(capsys, 2, *flags)
    assert all(word in line for word in words)


def test_a_missing_extra_gets_one_line_with_the_cure(monkeypatch, capsys):
    monkeypatch.setattr(demo, "train", lambda *_: pytest.fail("training started"))
    monkeypatch.setitem(sys.modules, "sklearn", None)
    err = refusal(capsys, 1)
    assert "sklearn" in err
    assert 'pip install "functional_jd[demo]"' in err


@pytest.mark.slow
def test_the_readme_shows_what_it_draws(monkeypatch, capsys, tmp_path):
    monkeypatch.syspath_prepend(str(ROOT / "docs"))
    train, reports = demo.train, {}
    monkeypatch.setattr(demo, "train", lambda rule, settings: reports.setdefault(rule, train(rule, settings)))
    rows, _ = run(capsys)
    importlib.import_module("make_pictures").demo(reports, tmp_path / "demo.svg")
    left, right = ([float(cell.removesuffix("%")) for cell in rows[f"test accuracy, {side}"]] for side in DIGITS)
    image = [float(cell) for cell in rows[f"test reconstruction, rms error (of {demo.GREY_LEVELS} grey levels)"]]
    assert image[1] < 0.8 * image[0]
    readme = (ROOT / "README.md").read_text(encoding="utf-8").partition("## Example")[0]
    written = [float(n) for n in re.findall(r"(\d+) %", readme.partition("![")[0])]
    # Other CPUs round otherwise: `mean` hardly trains the left digit, so that its accuracy is largely chance.
    for share, found, chance in zip(written, [*left, right[0]], (10, 3, 3), strict=True):
        assert share == pytest.approx(found, abs=chance)
    assert re.findall(r"(\d+) %", readme.partition("![")[2]) == [f"{n:.0f}" for n in written[:2]]
    stored, fresh = (
        [float(n) for n in re.findall(r"\d+\.\d+", path.read_text(encoding="utf-8").partition("<metadata")[0])]
        + [float(n) for n in re.findall(r"\d+\.\d+", path.read_text(encoding="utf-8").partition("</metadata>")[2])]
        for path in (ROOT / "docs" / "demo.svg", tmp_path / "demo.svg")
    )
    assert stored == pytest.approx(fresh, abs=25)  # ten hundredths of the height
