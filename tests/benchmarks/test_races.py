"""Races: another direction is not timed, one side answers for time and memory, and that is what was allocated."""

import json
from functools import partial
from math import pi

import matplotlib.image
import measure
import memory
import numpy as np
import pictures
import pytest
import races
import report
import torch
from burgers import Burgers, burgers
from hypothesis import given
from hypothesis import strategies as st
from models import TOYS, examples, flat, gradients, tasks, values
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


def test_one_side_answers_for_time_and_memory(clock):
    sides = {
        "JD": clock(4e-3, 100),
        "fb": clock(1e-3, 10, None),
        "jacobian": clock(1e-3, 20),
        "auto": clock(2e-3, 50),
    }
    found = race(sides, Goal("auto", "JD", 0.5), Goal("auto", "JD", 0.4, "memory"), Goal("auto", "fb", 1.5))
    assert [(f.ours, f.reached) for f in found.figures] == [("auto", True), ("auto", False), ("auto", False)]
    assert found.figures[0].ratio == pytest.approx([0.5] * 3, abs=1e-12)
    assert found.figures[1].ratio == [0.5]
    assert found.seconds == pytest.approx({"JD": 4e-3, "fb": 1e-3, "jacobian": 1e-3, "auto": 2e-3})
    assert report.against_peer(found._asdict()) == pytest.approx([0.5] * 3)  # whatever an engine by hand takes


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
    found = race(sides, Goal("jacobian", "JD", 0.5), Goal("gramian", "JD", 0.5))
    assert found.seconds.keys() == {"JD", "jacobian"}
    assert found.refused.keys() == {"gramian", "auto"}
    assert [(len(f.ratio), f.reached) for f in found.figures] == [(3, False), (0, False)]
    assert "gramian: another direction" in report.line(found)


def test_who_raises_is_out_and_named(clock):
    def refuse():
        raise NotImplementedError("no such layer")

    found = race({"JD": Side(refuse), "jacobian": clock(3e-3, 20)}, Goal("jacobian", "JD", 0.5))
    assert found.refused == {"JD": "NotImplementedError: no such layer"}
    assert [f.reached for f in found.figures] == [False]
    [verdict] = report.verdicts([found])
    assert report.goals([verdict]).splitlines()[-1] == "0 of 1 goals reached"


@pytest.mark.parametrize("graphs", [1, 2])
def test_what_compiles_twice_is_seen(clock, monkeypatch, graphs):
    compiled = []
    monkeypatch.setattr(races, "_graphs", lambda: len(compiled))
    step = clock(3e-3, 20)

    def call():
        compiled.extend([None] * (len(compiled) < graphs))
        return step.call()

    call.size = 20
    sides = {"JD": clock(4e-3, 100), "ours": Side(call, step.direction)}
    found = run(Race("compiled", "MLP", "T=2", lambda: sides, weighed=("ours",)), seconds=1e-9, rounds=9)
    assert found.compiled == {"ours": (pytest.approx(3e-3), graphs)}
    assert found.memory == {"ours": 20}
    assert report.line(found).endswith(f" 0.0 s, {graphs}")


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
@pytest.mark.parametrize("stacked", [False, True])
def test_losses_are_those_of_the_modules(name, stacked):
    several = tasks(TOYS[name], 3, batch=4)
    found = several.losses(stacked=stacked)(several.tree(values), *several.batch)
    torch.testing.assert_close(found if stacked else torch.stack(list(found.values())), _stacked(several))
    each = examples(TOYS[name], 4)
    torch.testing.assert_close(each.losses()(each.tree(values), *each.batch), each.forward())


def _stacked(model):
    return torch.stack(model.forward()[0])


class Square(torch.nn.Module):
    def forward(self, x):
        return x * x


def test_losses_of_an_equation_hold_its_derivatives():
    # u = s^2 with s = a t + b x + c has u_t = 2 a s, u_x = 2 b s and u_xx = 2 b^2.
    linear = torch.nn.Linear(2, 1)
    model = Burgers(torch.nn.Sequential(linear, Square()), burgers(points=5, width=4).batch)
    (a, b), (inside, start, at, edge) = linear.weight[0], model.batch
    s = linear(inside)
    residual = 2 * a * s + s**2 * 2 * b * s - 0.01 / pi * 2 * b**2
    expected = [(linear(edge) ** 4).mean(), residual.square().mean(), (linear(start) ** 2 - at).square().mean()]
    torch.testing.assert_close(model.forward(), expected)
    torch.testing.assert_close(list(model.losses()(model.tree(values), *model.batch).values()), expected)


@pytest.mark.parametrize("name", ["MLP", "conv", "transformer"])
@pytest.mark.filterwarnings("ignore")
def test_all_sides_give_the_direction_of_a_plain_loop(name):
    pytest.importorskip("torchjd")
    from sides import lean, of_examples, of_tasks

    several, each = partial(tasks, TOYS[name], 3, 4), partial(examples, TOYS[name], 4)
    for make, of in ((several, of_tasks), (each, of_examples)):
        model = make()
        expected = _by_hand(model, model.forward()[0] if of is of_tasks else model.forward(), lean)
        found = {name: side.direction(side.call()) for name, side in of(make).items() if side.direction}
        assert found.keys() >= {"JD", "jacobian", "gramian", "auto"}
        for direction in found.values():
            # Entries cancel, so that only the length bounds the error; norm layers lose some digits more.
            assert (direction - expected).norm() <= 1024 * torch.finfo(torch.float32).eps * expected.norm()


def _by_hand(model, losses, rule):
    """The direction: the rows of the first module, weighed; what the heads learn is not weighed."""
    shared, *heads = [list(module.parameters()) for module in model.modules]
    rows = [torch.autograd.grad(loss, shared, retain_graph=True) for loss in losses]
    J = torch.stack([torch.cat([g.flatten() for g in row]) for row in rows])
    direction = (rule(J @ J.T) @ J).split([p.numel() for p in shared])
    for p, g in zip(shared, direction, strict=True):
        p.grad = g.view_as(p)
    for own in heads:
        for p, g in zip(own, torch.autograd.grad(sum(losses), own), strict=True):
            p.grad = g
    return flat(model.tree(gradients))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", ["tasks", "examples", "burgers"])
def test_steps_are_those_of_the_peer(kind):
    pytest.importorskip("torchjd")
    from as_run import compiled_races
    from steps import limit, ours, peer, plain

    make = {
        "tasks": partial(tasks, TOYS["MLP"], 3, 4),
        "examples": partial(examples, TOYS["MLP"], 4),
        "burgers": partial(burgers, 4, 4),
    }[kind]
    mine, theirs = ours(make, "float32"), peer(make, "float32")
    for _ in range(3):
        found, expected = (side.direction(side.call()) for side in (mine, theirs))
        assert measure.apart(found, expected) < 0.05  # the peer's ridge
    compiled = plain(make, "float32", partial(torch.compile, fullgraph=True, backend="eager"))
    eager = plain(make, "float32")
    for _ in range(2):
        torch.testing.assert_close(flat(compiled.call()), flat(eager.call()))
    assert (limit(make, "float32") is None) == (kind == "examples")
    sides = compiled_races(toy=True)[0].build()
    assert list(sides) == ["JD", "plain", "limit", "plain compiled", "ours", "mean"]


def test_pictures_show_what_is_there(tmp_path, clock):
    goal = Goal("auto", "JD", 0.4, "memory")
    sides = {"JD": 4e-3, "jacobian": 3e-3, "auto": 3e-3}
    how = {"fb": clock(1e-3, 10**5, None)} | {name: clock(seconds, 10**6) for name, seconds in sides.items()}
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
