"""Many sides of one problem, in turns: all must give one direction before any is timed; then time and peak memory."""

import gc
import statistics
from collections.abc import Callable
from functools import partial
from time import perf_counter
from typing import Any, NamedTuple

from measure import FEWEST, apart, in_turns, plan, quartiles
from memory import peak_memory
from torch import Tensor

ENGINES = ("jacobian", "gramian")

TOLERANCE = 1e-3
"""The largest distance from the rows' direction, relatively: rounding of float32, summed in other orders."""

# A round that takes longer is worth a look for garbage: gigabytes of the peer's graphs would pile up otherwise.
_HEAVY = 0.2


class Side(NamedTuple):
    """What is timed, and the direction in what it returned or left behind; `None`: it computes none."""

    call: Callable[[], Any]
    direction: Callable[[Any], Tensor] | None = None


class Goal(NamedTuple):
    """The figure that is judged: that of `ours` at most so many times that of `against`."""

    against: str
    at_most: float
    what: str = "time"  # time | memory
    ours: tuple[str, ...] = ENGINES


class Race(NamedTuple):
    """A row of a table; it is built only when its turn comes."""

    table: str
    name: str
    size: str
    build: Callable[[], dict[str, Side]]
    goals: tuple[Goal, ...] = ()
    device: str = "cpu"
    quick: bool = False  # whether `--quick` keeps it


class Figure(NamedTuple):
    """A ratio and its goal; `ours` is the engine that was taken: the fastest of those that may."""

    what: str
    ours: str
    against: str
    goal: float
    ratio: list[float]  # the quartiles over the rounds; for memory the one number; empty where a side refused
    reached: bool


class Standing(NamedTuple):
    """Seconds per call and bytes at the peak, medians by side; quartiles of the rounds' ratios by pair of sides."""

    table: str
    name: str
    size: str
    seconds: dict[str, float]
    memory: dict[str, int]
    ratios: dict[str, list[float]]
    figures: list[Figure]
    difference: dict[str, float]
    refused: dict[str, str]
    rounds: int
    device: str


def run(race: Race, seconds: float, rounds: int) -> Standing:
    """Check that all sides agree, then time them in turns for about so many seconds, then weigh them."""
    sides, refused, difference = _agreeing(race.build())
    gc.collect()
    calls, times = _timed([side.call for side in sides.values()], seconds, rounds, race.device)
    columns = dict(zip(sides, times, strict=True))
    medians = {name: statistics.median(column) for name, column in columns.items()}
    memory = {name: peak_memory(side.call, race.device) for name, side in sides.items()}
    figures = [_judged(goal, columns, memory) for goal in race.goals]
    ratios = {
        f"{name}/{other}": _ratio(columns[name], columns[other])
        for name in columns
        for other in ("JD", "Engine", "fb", "limit", "fb compiled")
        if other in columns and name != other
    }
    how = race.table, race.name, race.size
    return Standing(*how, medians, memory, ratios, figures, difference, refused, calls, race.device)


def _agreeing(sides: dict[str, Side]) -> tuple[dict[str, Side], dict[str, str], dict[str, float]]:
    """The sides that give the first one's direction; why the others are out; how far apart they all are."""
    kept: dict[str, Side] = {}
    refused: dict[str, str] = {}
    directions = {}
    for name, side in sides.items():
        try:
            answer = side.call()
            if side.direction is not None:
                directions[name] = side.direction(answer)
            kept[name] = side
        except Exception as error:  # the others still race
            refused[name] = f"{type(error).__name__}: {error}"[:300]
    if "jacobian" not in directions:
        return kept, refused, {}
    expected = directions["jacobian"]
    difference = {name: apart(expected, found) for name, found in directions.items()}
    for name, distance in difference.items():
        if not distance <= TOLERANCE:
            refused[name] = f"another direction, {distance:.0e} away from that of the rows"
            del kept[name]
    return kept, refused, difference


def _timed(sides: list[Callable[[], Any]], seconds: float, rounds: int, device: str) -> tuple[int, list[list[float]]]:
    indexed = [partial(_indexed, side) for side in sides]
    start = perf_counter()
    calls, planned = plan(indexed, seconds, rounds, device)
    if perf_counter() - start < _HEAVY:
        return planned, in_turns(indexed, calls, planned, device)
    rounds = min(rounds, max(planned, FEWEST))
    each = [in_turns(indexed, calls, 1, device) for _ in range(rounds)]
    return rounds, [[turn[index][0] for turn in each] for index in range(len(sides))]


def _indexed(call: Callable[[], Any], _: int) -> Any:
    return call()


def _judged(goal: Goal, columns: dict[str, list[float]], memory: dict[str, int]) -> Figure:
    able = [name for name in goal.ours if name in columns]
    if not able or goal.against not in columns:
        return Figure(goal.what, "", goal.against, goal.at_most, [], False)
    # One engine must answer for time and memory both: the faster one.
    name = min(able, key=lambda name: statistics.median(columns[name]))
    if goal.what == "memory":
        ratio = [memory[name] / memory[goal.against]]
    else:
        ratio = _ratio(columns[name], columns[goal.against])
    middle = ratio[len(ratio) // 2]
    return Figure(goal.what, name, goal.against, goal.at_most, ratio, middle <= goal.at_most)


def _ratio(column: list[float], other: list[float]) -> list[float]:
    return quartiles([a / b for a, b in zip(column, other, strict=True)])
