"""Races: another direction is not timed, one side answers for its time, and memory is that of what was allocated."""

from functools import partial

import memory
import pytest
import races
import report
import torch
from burgers import burgers
from models import TOYS, examples, tasks
from races import Goal, Race, Side, run


@pytest.fixture
def clock(monkeypatch):
    """A clock that only the sides move on, and memory as they say; the calls of sides, in order."""
    now, log = [0.0], []
    monkeypatch.setattr(races, "perf_counter", lambda: now[0])
    monkeypatch.setattr(races, "peak_memory", lambda call, device: call() or 20)

    def side(name, seconds, direction=(1.0, 2.0)):
        def call():
            log.append(name)
            now[0] += seconds

        return Side(call, None if direction is None else lambda _: torch.tensor(direction))

    side.log = log
    return side


def race(sides, *goals, table="as run"):
    return run(Race(table, "MLP", "T=2", lambda: sides, goals), seconds=1e-9, rounds=9)


def test_the_sides_take_turns_and_each_answers_for_its_time(clock):
    sides = {"JD": clock("JD", 4e-3), "plain": clock("plain", 1e-3, None), "ours": clock("ours", 2e-3)}
    found = race(sides, Goal("ours", "JD", 0.51), Goal("ours", "plain", 1.5))
    assert [(f.ours, f.reached) for f in found.figures] == [("ours", True), ("ours", False)]
    assert found.figures[0].ratio == pytest.approx([0.5] * 3, abs=4 * torch.finfo(torch.float64).eps)
    assert found.seconds == pytest.approx({"JD": 4e-3, "plain": 1e-3, "ours": 2e-3})
    assert found.memory == dict.fromkeys(sides, 20)
    # Checked, tried once, then in turns, at last weighed.
    assert clock.log == [*sides] * (1 + 1 + races.FEWEST + 1)


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
    from as_run import compiled_races
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
    sides = compiled_races(toy=True)[0].build()
    assert list(sides) == ["JD", "plain", "limit", "plain compiled", "ours", "mean"]
