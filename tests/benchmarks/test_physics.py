"""The race of networks that solve equations: validation points choose, test points are shown."""

import itertools
import time

import pytest
from page import BEGIN, END
from physics import OURS, Found, best_setting, least_error, main, means, read, table


class Made:
    """An equation whose errors were written down; the network is the number of its step."""

    validation = (0.9, 0.3, 0.2, 0.4)
    test = (0.8, 0.1, 0.5, 0.6)

    def error(self, params, split):
        return getattr(self, split)[params]


def test_the_error_is_that_of_the_moment_that_validation_chooses(monkeypatch):
    monkeypatch.setattr("physics._LOOKS", 4)
    steps, shares = itertools.count(), []

    def advance(share):
        shares.append(share)
        return next(steps)

    ticks = itertools.count()
    found = least_error(Made(), advance, 4.0, clock=lambda: float(next(ticks)))  # every step takes a second
    assert found == (0.2, 0.5)  # not the least test error, 0.1
    assert shares == pytest.approx([0, 0.25, 0.5, 0.75])  # what a rate falls with


def test_time_is_that_of_the_cpu():
    calls = itertools.count(1)

    def advance(_):
        time.sleep(0.03)  # longer than all that is given, but no time of the CPU
        start = time.process_time()
        while time.process_time() < start + 0.005:
            pass
        next(calls)
        return 0

    least_error(Made(), advance, 0.02)
    assert next(calls) > 2


def test_the_first_seed_chooses_the_setting_and_every_seed_is_shown():
    errors = {"small": {0: (0.3, 0.1), 1: (9, 9)}, "middle": {0: (0.2, 0.4), 1: (0.5, 0.6)}, "large": {0: (0.25, 0.2)}}
    asked = []

    def maker(setting):
        def make(seed):
            def method(_):
                return None

            method.of = setting, seed
            return method

        return make

    def run(method):
        asked.append(method.of)
        setting, seed = method.of
        return errors[setting][seed]

    found = best_setting({name: maker(name) for name in errors}, run, seeds=(0, 1))
    assert found == Found("middle", False, [0.4, 0.6])
    assert asked == [("small", 0), ("middle", 0), ("large", 0), ("middle", 1)]
    errors["large"][0], errors["large"][1] = (0.1, 0.7), (0.1, 0.8)
    assert best_setting({name: maker(name) for name in errors}, run, seeds=(0, 1)) == Found("large", True, [0.7, 0.8])
    pair = {name: maker(name) for name in ("middle", "large")}
    assert not best_setting(pair, run, seeds=(0, 1)).at_end  # a pair has no inside


def test_the_table_says_what_is_missed():
    found = {
        "Helmholtz": {
            "Adam": Found("rate 0.1", True, [0.4, 0.1]),
            OURS: Found("damping 0.001", False, [0.002, 0.0002]),
        },
        "Burgers": {"Adam": Found("rate 0.01", False, [0.4]), OURS: Found("damping 0.001", False, [0.2])},
        "Allen-Cahn": {"Adam": Found("rate 0.01", False, [0.1]), OURS: Found("damping 0.001", False, [0.5])},
    }
    lines = table(found).splitlines()
    assert [line.split(" | ")[-2:] for line in lines[2:4]] == [["1/316", "1/200, reached |"], ["", " |"]]
    assert "rate 0.1 (the end of its grid)" in lines[2]
    assert "| 5 |" in lines[6], "worse is above one"
    short = means(found).splitlines()
    assert short[3] == "| Burgers | 0.2 | 0.4 | 1/2 |"
    assert short[-1].endswith("Missed: 1/10 on Burgers (1/2). Reached: 1/200 on Helmholtz (1/316).")


def test_what_was_found_is_not_run_again(tmp_path, monkeypatch):
    asked, kept = [], tmp_path / "physics.json"

    def raced(equation, seconds):
        asked.append(equation.name)
        return {"Adam": Found("rate 0.01", False, [0.4]), OURS: Found("damping 0.001", False, [0.001])}

    monkeypatch.setattr("physics.race", raced)
    pages = tmp_path / "tests" / "benchmarks" / "REPORT.md", tmp_path / "docs" / "guides" / "physics.md"
    for page, name in zip(pages, ("equations", "errors"), strict=True):
        page.parent.mkdir(parents=True)
        page.write_text(f"before\n{BEGIN.format(name).replace('page.py', 'physics.py')}\n{END.format(name)}\nafter\n")
    main(["6", "Burgers", "--json", str(kept)])
    main(["6", "--json", str(kept), "--root", str(tmp_path)])
    assert asked == ["Burgers", "Helmholtz", "Poisson 5-d", "Allen-Cahn"]
    assert read(kept, 6.0)["Burgers"][OURS] == Found("damping 0.001", False, [0.001])
    for page in pages:
        text = page.read_text()
        assert text.startswith("before")
        assert text.endswith("after\n")
        assert "| Helmholtz |" in text
    with pytest.raises(SystemExit, match="move it away"):
        main(["7", "--json", str(kept)])
