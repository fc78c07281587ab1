"""Races: whoever gives another direction is not timed, the faster engine is judged, memory is what was allocated."""

import json

import matplotlib.image
import measure
import memory
import numpy as np
import pictures
import pytest
import races
import report
import torch
from hypothesis import given
from hypothesis import strategies as st
from models import TOYS, examples, flat, tasks, values
from races import Goal, Race, Side, run


@pytest.fixture
def clock(monkeypatch):
    """A clock that only the sides move on, and memory as they say."""
    now = [0.0]
    monkeypatch.setattr(measure, "perf_counter", lambda: now[0])
    monkeypatch.setattr(races, "perf_counter", lambda: now[0])
    monkeypatch.setattr(races, "peak_memory", lambda call, device: call() or call.size)

    class Call:
        def __init__(self, seconds, size):
            self.seconds, self.size = seconds, size

        def __call__(self):
            now[0] += self.seconds

    def side(seconds, size, direction=(1.0, 2.0)):
        found = None if direction is None else lambda _: torch.tensor(direction)
        return Side(Call(seconds, size), found)

    return side


def race(sides, *goals):
    return run(Race("tasks", "MLP", "T=2", lambda: sides, goals), seconds=1e-9, rounds=9)


def test_the_faster_engine_answers_for_time_and_memory(clock):
    sides = {
        "JD": clock(4e-3, 100),
        "fb": clock(1e-3, 10, None),
        "jacobian": clock(3e-3, 20),
        "gramian": clock(2e-3, 50),
    }
    found = race(sides, Goal("JD", 0.5), Goal("JD", 0.4, "memory"), Goal("fb", 2.5))
    assert [(f.ours, f.reached) for f in found.figures] == [("gramian", True), ("gramian", False), ("gramian", True)]
    assert found.figures[0].ratio == pytest.approx([0.5] * 3, abs=1e-12)
    assert found.figures[1].ratio == [0.5]
    assert found.seconds == pytest.approx({"JD": 4e-3, "fb": 1e-3, "jacobian": 3e-3, "gramian": 2e-3})


def test_the_sides_take_turns(clock):
    log = []
    sides = {"JD": clock(1e-2, 1), "jacobian": clock(2e-2, 1)}
    noted = {
        name: Side(lambda name=name, side=side: (log.append(name), side.call())[1], side.direction)
        for name, side in sides.items()
    }
    for name in sides:
        noted[name].call.__dict__["size"] = 1
    race(noted)
    # Checked, tried once, then in turns, at last weighed.
    assert log == ["JD", "jacobian"] * (len(log) // 2)
    assert len(log) == 2 * (1 + 1 + measure.FEWEST + 1)


def test_another_direction_is_not_timed_and_reaches_no_goal(clock):
    sides = {
        "JD": clock(4e-3, 100),
        "jacobian": clock(3e-3, 20),
        "gramian": clock(1e-3, 5, (1.0, 2.1)),
        "auto": clock(1e-3, 5, (1.0, float("nan"))),
    }
    found = race(sides, Goal("JD", 0.5), Goal("JD", 0.5, ours=("gramian",)))
    assert found.seconds.keys() == {"JD", "jacobian"}
    assert found.refused.keys() == {"gramian", "auto"}
    assert [(f.ours, f.reached) for f in found.figures] == [("jacobian", False), ("", False)]
    assert "gramian: another direction" in report.line(found)


def test_who_raises_is_out_and_named(clock):
    def refuse():
        raise NotImplementedError("no such layer")

    found = race({"JD": Side(refuse), "jacobian": clock(3e-3, 20)}, Goal("JD", 0.5))
    assert found.refused == {"JD": "NotImplementedError: no such layer"}
    assert [f.reached for f in found.figures] == [False]
    [verdict] = report.verdicts([found])
    assert report.goals([verdict]).splitlines()[-1] == "0 of 1 goals reached"


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(1, 9)), max_size=30))
def test_the_highest_level_is_that_of_the_blocks_alive(steps):
    # At each step an address gets a block of some size or gives back the one it has; and strangers go that never came.
    alive, sizes, changes = {}, [0], []
    for address, size in steps:
        if address in alive:
            changes.append((address, -alive.pop(address)))
        else:
            alive[address] = size
            changes += [(address + 100, -7), (address, size)]
        sizes.append(sum(alive.values()))
    assert memory.highest(changes) == max(sizes)


@pytest.mark.filterwarnings("ignore")
def test_peak_memory_counts_what_lives_at_once():
    keep = {}

    def call():
        keep["old"] = torch.empty(1000, dtype=torch.uint8)  # the one of the last call goes, and is no gain
        for size in (5000, 9000, 2000):
            torch.empty(size, dtype=torch.uint8)
        return torch.empty(3000, dtype=torch.uint8)

    assert memory.peak_memory(call) == memory.peak_memory(call) == 10000


@pytest.mark.parametrize("name", TOYS)
@pytest.mark.filterwarnings("ignore:.*enable_nested_tensor")
def test_losses_are_those_of_the_modules(name):
    several = tasks(TOYS[name], 3, batch=4)
    torch.testing.assert_close(torch.stack(several.losses()(several.params, several.x, several.y)), _stacked(several))
    each = examples(TOYS[name], 4)
    torch.testing.assert_close(each.losses()(values(each.model), each.x, each.y), each.forward())


def _stacked(model):
    return torch.stack(model.forward()[0])


@pytest.mark.parametrize("name", ["MLP", "conv", "transformer"])
@pytest.mark.filterwarnings("ignore")
def test_all_sides_give_the_direction_of_a_plain_loop(name):
    pytest.importorskip("torchjd")
    from sides import lean, of_examples, of_tasks

    several = tasks(TOYS[name], 3, batch=4)
    each = examples(TOYS[name], 4)
    for model, sides, losses, weights in (
        (several, of_tasks(several), several.forward()[0], list(several.trunk.named_parameters())),
        (each, of_examples(each), each.forward(), list(each.model.named_parameters())),
    ):
        rows = [torch.autograd.grad(loss, [p for _, p in weights], retain_graph=True) for loss in losses]
        J = torch.stack([flat(dict(zip([name for name, _ in weights], row, strict=True))) for row in rows])
        expected = lean(J @ J.T) @ J
        if model is several:  # what the heads learn stands before the trunk, unweighted
            heads = dict(several.heads.named_parameters())
            gradient = torch.autograd.grad(sum(several.forward()[0]), list(heads.values()))
            expected = torch.cat([flat(dict(zip(heads, gradient, strict=True))), expected])
        found = {name: side.direction(side.call()) for name, side in sides.items() if side.direction}
        assert found.keys() >= {"JD", "jacobian", "gramian", "auto"}
        for direction in found.values():
            # Entries cancel, so that only the length bounds the error; norm layers lose some digits more.
            assert (direction - expected).norm() <= 1024 * torch.finfo(torch.float32).eps * expected.norm()


def test_pictures_show_what_is_there(tmp_path, clock):
    goal = Goal("JD", 0.4)
    how = {"JD": clock(4e-3, 10**6), "fb": clock(1e-3, 10**5, None), "jacobian": clock(3e-3, 10**6)}
    rows = [
        run(Race(table, name, size, lambda: how, (goal,)), 1e-9, 9)
        for table, name, size in [("tasks", "MLP", "T=2"), ("tasks", "MLP", "T=8"), ("growth", "with m", "m=2")]
    ]
    record = json.loads(
        json.dumps({"races": [r._asdict() | {"figures": [f._asdict() for f in r.figures]} for r in rows]})
    )
    written = pictures.draw(record, tmp_path)
    assert [path.name for path in written] == ["ratio.png", "growth.png", "memory.png"]
    assert all(np.ptp(matplotlib.image.imread(path)) > 0 for path in written)
    assert pictures.draw({"races": []}, tmp_path) == []
