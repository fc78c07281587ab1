"""Two sides of a case, timed in turn in one process: what the machine does to one, it does to the other."""

import gc
import statistics
from collections.abc import Callable, Sequence
from time import perf_counter
from typing import Any, NamedTuple

import torch
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
    device: str = "cpu"
    quick: bool = True  # whether `--quick` keeps it
    against: str = "JD"


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
    against: str = "JD"


# A sample is at least this long, so that the clock is no part of it.
_SAMPLE = 1e-3
# What takes seconds still gets so many rounds: without them there are no quartiles.
FEWEST = 3
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
        return _row(case, in_turns(sides, [1] * len(sides), min(rounds, FEWEST), case.device), difference)
    calls, rounds = plan(sides, seconds, rounds, case.device)
    return _row(case, in_turns(sides, calls, rounds, case.device), difference)


def plan(sides: Sequence[Side], seconds: float, rounds: int, device: str) -> tuple[list[int], int]:
    """How many calls make a sample of each side, and how many rounds of samples take about so many seconds."""
    once = [_sample(side, 1, 1, device) for side in sides]
    calls = [max(1, int(_SAMPLE / t)) for t in once]
    length = sum(t * n for t, n in zip(once, calls, strict=True))
    return calls, min(rounds, max(FEWEST, int(seconds / length)))


def quartiles(values: list[float]) -> list[float]:
    """The lower quartile, the median, the upper quartile."""
    return statistics.quantiles(values, n=4, method="inclusive")


def apart(ours: Tensor, peer: Tensor) -> float:
    """The distance between two directions, relative to our own; the largest of a batch `[*, n]`."""
    scale = ours.norm(dim=-1)
    return ((ours - peer).norm(dim=-1) / scale.where(scale > 0, 1)).max().item()


def _row(case: Case, times: list[list[float]], difference: float | None) -> Measurement:
    medians = [statistics.median(column) for column in times]
    fixed = {"goal": case.goal, "rounds": len(times[0]), "against": case.against}
    row = Measurement(case.table, case.name, case.size, medians[0], **fixed)
    if len(times) == 1:
        return row
    ratio = quartiles([ours / peer for ours, peer in zip(*times, strict=True)])
    reached = None if case.goal is None else ratio[1] <= case.goal
    return row._replace(peer=medians[1], ratio=ratio, reached=reached, difference=difference)


def in_turns(sides: Sequence[Side], calls: list[int], rounds: int, device: str = "cpu") -> list[list[float]]:
    """Seconds per call, for each side a list: one sample per round."""
    times: list[list[float]] = [[] for _ in sides]
    gc.collect()
    gc.disable()
    try:
        for index in range(rounds):
            for side, n, column in zip(sides, calls, times, strict=True):
                column.append(_sample(side, index, n, device))
    finally:
        gc.enable()
    return times


def _sample(side: Side, index: int, calls: int, device: str) -> float:
    if device == "cuda":
        return _sample_by_events(side, index, calls)
    start = perf_counter()
    for _ in range(calls):
        side(index)
    return (perf_counter() - start) / calls


def _sample_by_events(side: Side, index: int, calls: int) -> float:
    """What the device's own clock says, from the first kernel to the last; the queue is empty before and after."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    start.record()
    for _ in range(calls):
        side(index)
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1e3 / calls
