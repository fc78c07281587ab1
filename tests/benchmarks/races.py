"""Many sides of one problem, in turns: all must give one direction before any is timed; then time and peak memory."""

import gc
import statistics
from collections.abc import Callable, Sequence
from time import perf_counter
from timeit import Timer
from typing import Any, NamedTuple

from memory import peak_memory
from torch import Tensor
from torch._dynamo.utils import counters

# The largest distance between directions, relatively: rounding of float32, summed in other orders.
_TOLERANCE = 1e-3
# A sample is at least this long, so that the clock is no part of it.
_SAMPLE = 1e-3
# What takes seconds still gets so many rounds: without them there are no quartiles.
FEWEST = 3
_WEIGHED = ("JD", "ours")
_MOST = 200
# A round that takes longer is worth a look for garbage: gigabytes of the peer's graphs would pile up otherwise.
_HEAVY = 0.2


Call = Callable[[], Any]


class Side(NamedTuple):
    """What is timed, and the direction in what it returned or left behind; `None`: it computes none."""

    call: Call
    direction: Callable[[Any], Tensor] | None = None


class Goal(NamedTuple):
    """The time of `ours` at most so many times that of `against`."""

    ours: str
    against: str
    at_most: float


class Race(NamedTuple):
    """A row of a table; it is built only when its turn comes."""

    table: str
    name: str
    size: str
    build: Callable[[], dict[str, Side]]
    goals: tuple[Goal, ...] = ()
    tolerance: float = _TOLERANCE


class Figure(NamedTuple):
    """A ratio and its goal."""

    ours: str
    against: str
    goal: float
    ratio: list[float]  # the quartiles over the rounds; empty if a side raised
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


def run(race: Race, seconds: float) -> Standing:
    """Check that all sides agree, then time them in turns for about so many seconds, then weigh them."""
    sides, refused, difference = _agreeing(race.build(), race.tolerance)
    gc.collect()
    rounds, times = _timed([side.call for side in sides.values()], seconds)
    columns = dict(zip(sides, times, strict=True))
    medians = {name: statistics.median(column) for name, column in columns.items()}
    memory = {name: peak_memory(sides[name].call) for name in _WEIGHED if name in sides}
    figures = [_judged(goal, columns) for goal in race.goals]
    ratios = {
        f"{name}/{other}": _ratio(columns[name], columns[other])
        for name in columns
        for other in ("JD", "limit", "plain", "plain compiled")
        if other in columns and name != other
    }
    how = race.table, race.name, race.size
    return Standing(*how, medians, memory, ratios, figures, difference, refused, rounds)


def _agreeing(sides: dict[str, Side], tolerance: float) -> tuple[dict[str, Side], dict[str, str], dict[str, float]]:
    """The sides that agree with ours; why the others are out; how far apart they all are."""
    kept: dict[str, Side] = {}
    refused: dict[str, str] = {}
    directions: dict[str, Tensor] = {}
    for name, side in sides.items():
        graphs = _graphs()
        try:
            answer = side.call()
            if side.direction is not None:
                directions[name] = side.direction(answer)
            if _graphs() > graphs:  # what compiles once more does so now
                side.call()
                side.call()
            kept[name] = side
        except Exception as error:  # the others still race
            refused[name] = f"{type(error).__name__}: {error}"[:300]
    expected = directions.get("ours")
    difference = {} if expected is None else {name: apart(expected, found) for name, found in directions.items()}
    for name, distance in difference.items():
        if not distance <= tolerance:
            refused[name] = f"another direction, {distance:.0e} away from ours"
            del kept[name]
    return kept, refused, difference


def _graphs() -> int:
    return counters["stats"]["unique_graphs"]


def _timed(sides: Sequence[Call], seconds: float) -> tuple[int, list[list[float]]]:
    """How many rounds take about so many seconds, and for each side the seconds per call in every round."""
    timers = [Timer(side, timer=perf_counter) for side in sides]
    once = [timer.timeit(1) for timer in timers]
    calls = [max(1, int(_SAMPLE / t)) for t in once]
    length = sum(t * n for t, n in zip(once, calls, strict=True))
    rounds = min(_MOST, max(FEWEST, int(seconds / length)))
    times: list[list[float]] = [[] for _ in sides]
    for _ in range(rounds):
        if length > _HEAVY:
            gc.collect()
        for timer, n, column in zip(timers, calls, times, strict=True):
            column.append(timer.timeit(n) / n)
    return rounds, times


def apart(ours: Tensor, peer: Tensor) -> float:
    """The distance between two directions, relative to our own; the largest of a batch `[*, n]`."""
    scale = ours.norm(dim=-1)
    return ((ours - peer).norm(dim=-1) / scale.where(scale > 0, 1)).max().item()


def _judged(goal: Goal, columns: dict[str, list[float]]) -> Figure:
    if goal.ours not in columns or goal.against not in columns:
        return Figure(goal.ours, goal.against, goal.at_most, [], False)
    ratio = _ratio(columns[goal.ours], columns[goal.against])
    return Figure(goal.ours, goal.against, goal.at_most, ratio, ratio[1] <= goal.at_most)


def _ratio(column: list[float], other: list[float]) -> list[float]:
    """The lower quartile, the median, the upper quartile."""
    return statistics.quantiles([a / b for a, b in zip(column, other, strict=True)], n=4, method="inclusive")
