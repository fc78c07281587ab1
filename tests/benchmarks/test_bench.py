"""The bench itself: it runs from end to end, sides that agree race in turns, and tables stand between their marks."""

import json
import os
import re
import subprocess
import sys
from functools import partial
from pathlib import Path

import memory
import page
import pytest
import races
import report
import shard_table
import torch
from burgers import burgers
from models import TOYS, examples, tasks
from races import Goal, Race, Side, run


@pytest.mark.slow
def test_it_runs_from_end_to_end(tmp_path):
    pytest.importorskip("torchjd")
    file = tmp_path / "bench.json"
    command = [sys.executable, Path(__file__).parent, "--toy", "--json", file]
    command += ["--only", "as run", "tiny MLP"]
    done = subprocess.run([*map(str, command)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    record = json.loads(file.read_text())
    races = {(race["table"], race["name"], race["size"]): race for race in record["races"]}
    assert all(not race["refused"] for race in races.values()), {case: race["refused"] for case, race in races.items()}
    half, full = (races["as run", "tiny MLP", size] for size in ("T=2 float16", "T=2"))
    assert half["seconds"].keys() == {"JD", "plain", "limit", "ours"}
    assert full["seconds"].keys() == {"JD", "plain", "limit", "ours", "stacked", "mean", "operators"}
    assert full["memory"].keys() == {"JD", "ours"}
    assert min(half["memory"].values()) > 0
    reached = [figure["reached"] for race in record["races"] for figure in race["figures"]]
    assert f"{sum(reached)} of {len(reached)} goals reached" in done.stdout


def test_the_other_tables_are_filled(monkeypatch, capsys, tmp_path):
    import every_few_steps
    import fronts_table

    monkeypatch.setattr(fronts_table, "STEPS", 4)
    monkeypatch.setattr(fronts_table, "has_peer", lambda: False)
    *_, line = fronts_table.worth_lines(["VLMOP2"], ["EPO"])
    name, method, gradients, _, steps, *_ = [cell.strip() for cell in line.split("|")[1:-1]]
    assert (name, method) == ("VLMOP2", "EPO")
    assert 0 < float(gradients) < float(steps) < 100  # a step takes the gradients of both losses
    for setting, value in {"SEEDS": 1, "EPOCHS": 1, "BATCH": 200, "EVERY": {"mean": (1,)}}.items():
        monkeypatch.setattr(every_few_steps, setting, value)
    monkeypatch.setattr(every_few_steps, "RULES", {"mean": every_few_steps.jd.mean})
    every_few_steps.main()
    assert capsys.readouterr().out.count("| `mean` | 1 |") == 2
    pytest.importorskip("torchjd")
    import first_call

    monkeypatch.setattr(first_call, "_TIMED", 3)
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    found = first_call.measured("tiny MLP", "T=2", "ours", toy=True, backend="eager")
    assert found["graphs"] == 1
    assert found["lines"] == 0  # nothing was written in C++


@pytest.fixture
def clock(monkeypatch):
    """A clock that only the sides move on, and memory as they say; the calls of sides, in order."""
    now, log = [0.0], []
    monkeypatch.setattr(races, "perf_counter", lambda: now[0])
    monkeypatch.setattr(races, "peak_memory", lambda call: call() or 20)

    def side(name, seconds, direction=(1.0, 2.0)):
        def call():
            log.append(name)
            now[0] += seconds

        return Side(call, None if direction is None else lambda _: torch.tensor(direction))

    side.log = log
    return side


def race(sides, *goals, table="as run"):
    return run(Race(table, "MLP", "T=2", lambda: sides, goals), seconds=1e-9)


def test_the_sides_take_turns_and_each_answers_for_its_time(clock):
    sides = {"JD": clock("JD", 4e-3), "plain": clock("plain", 1e-3, None), "ours": clock("ours", 2e-3)}
    found = race(sides, Goal("ours", "JD", 0.51), Goal("ours", "plain", 1.5))
    assert [(f.ours, f.reached) for f in found.figures] == [("ours", True), ("ours", False)]
    assert found.figures[0].ratio == pytest.approx([0.5] * 3, abs=4 * torch.finfo(torch.float64).eps)
    assert found.seconds == pytest.approx({"JD": 4e-3, "plain": 1e-3, "ours": 2e-3})
    assert found.memory == {"JD": 20, "ours": 20}
    # Checked, tried once, then in turns, at last weighed.
    assert clock.log == [*sides] * (1 + 1 + races.FEWEST) + ["JD", "ours"]


def test_a_side_with_another_direction_or_an_error_is_not_timed_and_reaches_no_goal(clock):
    def refuse():
        raise NotImplementedError("no such layer")

    sides = {
        "JD": clock("JD", 4e-3),
        "ours": clock("ours", 3e-3),
        "stacked": clock("stacked", 1e-3, (1.0, 2.1)),
        "mean": clock("mean", 1e-3, (1.0, float("nan"))),
        "operators": Side(refuse),
    }
    found = race(sides, Goal("ours", "JD", 0.5), Goal("stacked", "JD", 0.5), Goal("operators", "JD", 0.5))
    assert found.seconds.keys() == {"JD", "ours"}
    assert found.refused.keys() == {"stacked", "mean", "operators"}
    assert found.refused["operators"] == "NotImplementedError: no such layer"
    assert [(len(f.ratio), f.reached) for f in found.figures] == [(3, False), (0, False), (0, False)]
    assert "stacked: another direction" in report.line(found)
    assert report.goals([found]) == "0 of 3 goals reached"


@pytest.mark.filterwarnings("ignore")
def test_peak_memory_counts_what_lives_at_once():
    keep = {}

    def call():
        keep["old"] = torch.empty(1000, dtype=torch.uint8)  # the one of the last call goes, and is no gain
        for size in (5000, 9000, 2000):
            torch.empty(size, dtype=torch.uint8)
        return torch.empty(3000, dtype=torch.uint8)

    assert memory.peak_memory(call) == memory.peak_memory(call) == 10000


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", ["tasks", "examples", "burgers"])
def test_steps_are_those_of_the_peer(kind):
    pytest.importorskip("torchjd")
    from as_run import races_of
    from steps import limit, loop, of_mean, ours, peer

    make = {
        "tasks": partial(tasks, TOYS["MLP"], 3, 4),
        "examples": partial(examples, TOYS["MLP"], 4),
        "burgers": partial(burgers, 4, 4),
    }[kind]
    mine, theirs = ours(make, "float32"), peer(make, "float32")
    for _ in range(3):
        found, expected = (side.direction(side.call()) for side in (mine, theirs))
        assert races.apart(found, expected) < 0.05  # the peer's ridge
    compiled = partial(torch.compile, fullgraph=True, backend="eager")
    ways = [lambda model, f=f: of_mean(f(model.mean)) for f in (compiled, lambda loss: loss)]
    sides = [loop(way, make, "float32") for way in ways]
    for _ in range(2):
        torch.testing.assert_close(*(side.direction(side.call()) for side in sides))
    assert (limit(make, "float32") is None) == (kind == "examples")
    sides = races_of("compiled", toy=True)[0].build()
    assert list(sides) == ["JD", "plain", "limit", "plain compiled", "ours", "mean"]


def test_the_chart_shows_the_figures_of_the_table(tmp_path):
    pytest.importorskip("matplotlib")
    text, stored = (page.DOCS / f"benchmarks.{kind}" for kind in ("md", "svg"))
    page.draw(page.cpu_rows(text.read_text(encoding="utf-8")), tmp_path / "fresh.svg")
    bars = [
        [float(n) for n in re.findall(r"-?\d+\.\d+", path.read_text(encoding="utf-8").partition("</metadata>")[2])]
        for path in (stored, tmp_path / "fresh.svg")
    ]
    assert bars[0] == pytest.approx(bars[1], abs=2), "run: python tests/benchmarks/page.py"


LAYERS, M = 4, shard_table.OBJECTIVES
AGAIN = (LAYERS - 1) / LAYERS  # a backward pass needs the weights of all layers but the first
SENT = {
    "`DistributedDataParallel`, the mean": 2,
    "`fully_shard`, the mean": 3,
    "`sharded`, the mean": 2 + AGAIN,
    "`fully_shard`, `upgrad` by hand": 1 + 2 * M,
    "`sharded`, `upgrad`, loop": 1 + M * (1 + AGAIN),
    "`sharded`, `upgrad`, vmap": 1 + M + AGAIN,
}


@pytest.mark.slow
def test_what_is_sent_is_known_in_units_of_the_parameters():
    script = Path(shard_table.__file__)
    command = [sys.executable, str(script), "96", str(LAYERS), "2"]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "KINETO_LOG_LEVEL": "99"}
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=300, cwd=script.parents[2], env=environment, check=True
    )
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in done.stdout.splitlines()[2:]]
    sent = {name: float(numbers) for name, _, _, numbers, _ in rows}
    # Biases are replicated, a hundredth of the numbers: an all-reduce sends them twice; and figures are rounded.
    assert sent == pytest.approx(SENT, abs=0.05 + 2 * (1 + M) / 97)
    assert all(float(row[2]) > 3 for row in rows), "parameters and two moments at least"
