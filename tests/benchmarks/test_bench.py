"""The bench itself: both sides take turns, the figures are what the clock says, and it runs from end to end."""

import json
import re
import subprocess
import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import measure
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from measure import Case, Contest, apart, quartiles


@pytest.fixture
def turns(monkeypatch):
    """A clock that only the sides move on: ours takes 3 ms, the peer 4, 5, 6, ... ms; and what was called when."""
    now, log = [0.0], []
    monkeypatch.setattr(measure, "perf_counter", lambda: now[0])

    def side(name, seconds):
        def solve(index):
            log.append((name, index))
            now[0] += seconds(index)
            return torch.tensor([seconds(index)])

        return solve

    return log, Contest(side("ours", lambda i: 3e-3), side("peer", lambda i: (4 + i) * 1e-3), apart)


def test_the_sides_take_turns_and_the_figures_are_medians(turns):
    log, contest = turns
    row = measure.measure(Case("t", "rule", "m=2", 0.6, lambda: contest), seconds=1e9, rounds=3)
    assert log[-6:] == [("ours", 0), ("peer", 0), ("ours", 1), ("peer", 1), ("ours", 2), ("peer", 2)]
    assert (row.ours, row.peer, row.rounds) == (pytest.approx(3e-3), pytest.approx(5e-3), 3)
    assert row.ratio == pytest.approx([0.55, 0.6, 0.675])  # of 3/6, 3/5, 3/4
    assert row.reached
    assert row.difference == pytest.approx(1 / 3)


@pytest.mark.parametrize(("seconds", "rounds"), [(1e-3, 3), (0.0801, 10), (1e9, 99)])
def test_the_time_allowed_bounds_the_rounds_but_for_the_first_three(turns, seconds, rounds):
    row = measure.measure(Case("t", "rule", "m=2", 0.05, lambda: turns[1]), seconds, rounds=99)
    assert row.rounds == rounds
    assert row.reached is False


def test_what_is_very_slow_is_called_four_times_only_and_without_a_peer_columns_stay_empty(turns, monkeypatch):
    log, contest = turns
    monkeypatch.setattr(measure, "_SLOW", 6e-3)
    measure.measure(Case("t", "rule", "m=2", None, lambda: contest), seconds=1e9, rounds=99)
    assert len(log) == 2 * 4
    row = measure.measure(Case("t", "rule", "m=2", 0.5, lambda: contest._replace(peer=None)), seconds=9, rounds=3)
    assert (row.ours, row.peer, row.ratio, row.reached, row.difference) == (pytest.approx(3e-3), None, None, None, None)


@given(st.lists(st.floats(0, 100), min_size=2, max_size=9))
def test_quartiles_are_those_of_numpy(values):
    assert quartiles(values) == pytest.approx(np.quantile(values, [0.25, 0.5, 0.75]))


@pytest.mark.slow
def test_quick_mode_runs_from_end_to_end(tmp_path):
    pytest.importorskip("torchjd")
    file = tmp_path / "bench.json"
    command = [sys.executable, Path(__file__).parent, "--toy", "--quick", "--rounds", "2", "--json", file]
    command += ["--device", "cpu", "--rows", "2", "3"]
    command += ["--only", "as run", "weights", "batches", "tiny MLP", "upgrad", "trimmed_mean"]
    done = subprocess.run([*map(str, command)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    record = json.loads(file.read_text())
    _check_rules(record["measurements"], done.stdout)
    races = {(race["table"], race["name"], race["size"]): race for race in record["races"]}
    assert {"as run"} == {table for table, _, _ in races}
    assert all(not race["refused"] for race in races.values()), {case: race["refused"] for case, race in races.items()}
    half, full = (races["as run", "tiny MLP", size] for size in ("T=2 float16", "T=2"))
    assert half["seconds"].keys() == {"JD", "plain", "limit", "ours"}
    assert full["seconds"].keys() == {"JD", "plain", "limit", "ours", "stacked", "mean", "operators"}
    assert full["memory"].keys() == {"JD", "ours"}
    assert all(min(race["memory"].values()) > 0 for race in races.values())
    judged = re.findall(r" (reached|MISSED)$", done.stdout.partition("to reach")[2], re.MULTILINE)
    judged.pop()  # "so many goals reached"
    assert [verdict == "reached" for verdict in judged] == [goal["reached"] for goal in record["goals"]]


def test_only_what_is_named_runs_and_graphs_only_by_name():
    pytest.importorskip("torchjd")
    # By its path: Opacus, a peer, installs a package that is called benchmarks, too.
    spec = spec_from_file_location("bench", Path(__file__).with_name("__main__.py"))
    bench = module_from_spec(spec)
    spec.loader.exec_module(bench)
    _chosen, _options = bench._chosen, bench._options

    def chosen(*names):
        return {(case.table, case.name) for case in _chosen(_options(["--toy", "--device", "cpu", *names]))}

    assert {"as run", "weights", "batches"} <= {table for table, _ in chosen()}
    assert not {"compiled", "physics"} & {table for table, _ in chosen()}
    assert chosen("--only", "physics") == {("physics", "Helmholtz"), ("physics", "potential")}
    assert chosen("--only", "compiled", "MLP") == {("compiled", "MLP"), ("compiled", "MLP, each")}
    assert chosen("--only", "as run", "T=32") == {("as run", "MLP"), ("as run", "transformer")}
    assert chosen("--only", "float16", "conv") == {("as run", "conv"), ("as run", "conv, each")}
    with pytest.raises(SystemExit, match=r"unknown names float8.*as run"):
        chosen("--only", "float8")


def _check_rules(rows, text):
    sizes = {(row["table"], row["name"], row["size"]) for row in rows}
    assert {("weights", "upgrad", "m=2"), ("batches", "upgrad", "m=3")} < sizes
    assert ("weights", "trimmed_mean", "m=2") not in sizes  # which takes no fewer than three rows
    for row in rows:
        low, middle, high = row["ratio"]
        assert 0 < low <= middle <= high
        assert row["difference"] is None or row["difference"] < 0.05  # the peer's tolerances
        [line] = [line for line in text.partition("as run and")[0].splitlines() if _opens(line, row)]
        figures = f"{row['ours'] * 1e6:.1f}", f"{row['peer'] * 1e6:.1f}", f"{middle:.3f}"
        assert {row["size"], *figures} < set(line.split())
        assert ("reached" in line, "MISSED" in line) == (row["reached"] is True, row["reached"] is False)


def _opens(line, row):
    return line.startswith(row["name"]) and row["size"] in line and f"{row['ours'] * 1e6:.1f}" in line.split()
