"""Two sides of a case, timed in turn in one process: what the machine does to one, it does to the other."""

import gc
import statistics
from collections.abc import Callable
from time import perf_counter
from typing import Any, NamedTuple

from torch import Tensor

Side = Callable[[int], Any]
"""`side(i)` solves problem i; a side takes any i, and has a few problems that it takes in turn."""


class Contest(NamedTuple):
    """What is timed. `compare(ours(0), peer(0))`: how far the answers are apart, relatively; `None`: they may be."""

    ours: Side
    peer: Side | None
    compare: Callable[[Any, Any], float] | None = None


class Case(NamedTuple):
    """A row of a table; it is built only when its turn comes."""

    table: str
    name: str
    size: str
    goal: float | None
    build: Callable[[], Contest]


class Measurement(NamedTuple):
    """Seconds per call (medians), and the quartiles of the ratios of the rounds."""

    table: str
    name: str
    size: str
    ours: float
    peer: float | None = None
    ratio: list[float] | None = None
    goal: float | None = None
    reached: bool | None = None
    difference: float | None = None
    rounds: int = 0


# A sample is at least this long, so that the clock is no part of it.
_SAMPLE = 1e-3
# What takes seconds still gets so many rounds: without them there are no quartiles.
_FEWEST = 3
# A warm-up that takes longer is not repeated to learn how long a call takes.
_SLOW = 0.5


def measure(case: Case, seconds: float, rounds: int) -> Measurement:
    """Time both sides in turn, A B A B, for about so many seconds and at most so many rounds."""
    ours, peer, compare = case.build()
    sides = [ours] if peer is None else [ours, peer]
    start = perf_counter()
    answers = [side(0) for side in sides]
    warm_up = perf_counter() - start
    difference = compare(*answers) if compare and peer else None
    if warm_up > _SLOW:
        return _row(case, _interleaved(sides, [1] * len(sides), min(rounds, _FEWEST)), difference)
    once = [_sample(side, 1, 1) for side in sides]
    calls = [max(1, int(_SAMPLE / t)) for t in once]
    length = sum(t * n for t, n in zip(once, calls, strict=True))
    rounds = min(rounds, max(_FEWEST, int(seconds / length)))
    return _row(case, _interleaved(sides, calls, rounds), difference)


def quartiles(values: list[float]) -> list[float]:
    """The lower quartile, the median, the upper quartile."""
    return statistics.quantiles(values, n=4, method="inclusive")


def apart(ours: Tensor, peer: Tensor) -> float:
    """The distance between two directions, relative to our own; the largest of a batch `[*, n]`."""
    scale = ours.norm(dim=-1)
    return ((ours - peer).norm(dim=-1) / scale.where(scale > 0, 1)).max().item()


def _row(case: Case, times: list[list[float]], difference: float | None) -> Measurement:
    medians = [statistics.median(column) for column in times]
    row = Measurement(case.table, case.name, case.size, medians[0], goal=case.goal, rounds=len(times[0]))
    if len(times) == 1:
        return row
    ratio = quartiles([ours / peer for ours, peer in zip(*times, strict=True)])
    reached = None if case.goal is None else ratio[1] <= case.goal
    return row._replace(peer=medians[1], ratio=ratio, reached=reached, difference=difference)


def _interleaved(sides: list[Side], calls: list[int], rounds: int) -> list[list[float]]:
    times: list[list[float]] = [[] for _ in sides]
    gc.collect()
    gc.disable()
    try:
        for index in range(rounds):
            for side, n, column in zip(sides, calls, times, strict=True):
                column.append(_sample(side, index, n))
    finally:
        gc.enable()
    return times


def _sample(side: Side, index: int, calls: int) -> float:
    start = perf_counter()
    for _ in range(calls):
        side(index)
    return (perf_counter() - start) / calls
