"""What people read: a line per case as it comes, at the end one table of all goals; and the record for machines."""

import os
import platform
from collections.abc import Iterable, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

from measure import Measurement
from races import ENGINES, Standing

Row = Measurement | Standing

TITLES = {
    "weights": "weights of a rule; microseconds",
    "batches": "weights of a rule, a batch of 64; microseconds",
    "steps": "the whole step of several tasks in mixed precision, and that of a rule that needs no rows; microseconds",
    "tasks": "one direction of several tasks on a trunk; milliseconds, MB at the peak",
    "examples": "one direction of a batch, every example an objective; milliseconds, MB at the peak",
    "compiled": "one direction of a batch, eager and compiled; milliseconds, MB at the peak",
    "growth": "one direction of 8 tasks on an MLP, one quantity varied; milliseconds, MB at the peak",
}

SIDES = {
    "tasks": ("fb", "limit", "JD", "jacobian", "gramian", "auto"),
    "examples": ("fb", "JD", "Engine", "jacobian", "gramian", "auto"),
    "compiled": ("fb", "fb compiled", "jacobian", "gramian", "jacobian compiled", "gramian compiled"),
    "growth": ("fb", "limit", "JD", "jacobian", "gramian", "auto"),
}

NOTES = """
Sides: fb, plain forward and backward; limit, one forward and a backward pass of the trunk per task; JD, TorchJD's
`backward` or `mtl_backward` with `jac_to_grad`; Engine, its `autogram.Engine`; jacobian and gramian, our engines called
by hand; auto, `step(engine="auto")` without an optimizer. All give the same direction, or are not timed. Figures are
medians; ratio: the median of the rounds' ratios, with their quartiles, that of our faster engine to the peer. MB are
2^20 bytes. apart: the relative distance of the two directions; the peer approximates in upgrad and dualproj (ridge
1e-4), mgda (100 steps), cagrad, nash_mtl and fairgrad (their solvers' tolerances). No figure: it is drawn by chance, or
depends on earlier calls. No peer: its solver is not installed."""

_MB = 2**20


class Verdict(NamedTuple):
    """A figure, its goal, and whether it is reached; no figure where a side refused, which reaches nothing."""

    case: str
    what: str
    against: str
    ours: str
    ratio: list[float]
    goal: float
    reached: bool


def heading(row: Row) -> str:
    """What stands above a table that begins with this row."""
    title = f"\n{TITLES.get(row.table, row.table)}\n"
    if isinstance(row, Standing):
        return title + f"{'':28}" + "".join(f"{name:>18}" for name in SIDES[row.table]) + f"{'ratio':>9} quartiles"
    names = f"{'ours':>11}{'peer':>11}  {'ratio':>6} {'quartiles':16}{'goal':>5} {'':8}{'apart':>7}"
    return title + f"{'':27}{names}"


def line(row: Row) -> str:
    """A row of a table."""
    return _standing(row) if isinstance(row, Standing) else _measurement(row)


def _measurement(row: Measurement) -> str:
    text = f"{row.name:21}{row.size:>6}{row.ours * 1e6:11.1f}"
    if row.peer is None or row.ratio is None:
        return f"{text}{'-':>11}"
    low, middle, high = row.ratio
    goal = "" if row.goal is None else f"{row.goal:.2f}"
    verdict = {None: "", True: "reached", False: "MISSED"}[row.reached]
    apart = "" if row.difference is None else f"{row.difference:.0e}"
    spread = f"[{low:.3f} {high:.3f}]"
    return f"{text}{row.peer * 1e6:11.1f}  {middle:6.3f} {spread:16}{goal:>5} {verdict:8}{apart:>7}"


def _standing(row: Standing) -> str:
    place = row.size if row.device == "cpu" else f"{row.size} {row.device}"
    cells = [
        f"{row.seconds[name] * 1e3:9.2f} ({row.memory[name] / _MB:6.1f})" if name in row.seconds else "-"
        for name in SIDES[row.table]
    ]
    text = f"{row.name:16}{place:>12}" + "".join(f"{cell:>18}" for cell in cells)
    ratio = against_peer(row._asdict())
    if ratio is not None:
        low, middle, high = ratio
        text += f"{middle:9.3f} [{low:.3f} {high:.3f}]"
    return text + "".join(f"\n    {name}: {reason}" for name, reason in row.refused.items())


def against_peer(row: dict[str, Any]) -> list[float] | None:
    """The quartiles of the ratio of our faster engine to the peer's Engine, or its Jacobian; compiled, to plain fb."""
    form = "{} compiled" if row["table"] == "compiled" else "{}"
    able = [name for engine in ENGINES if (name := form.format(engine)) in row["seconds"]]
    if not able:
        return None
    best = min(able, key=row["seconds"].__getitem__)
    found = [row["ratios"].get(f"{best}/{peer}") for peer in ("Engine", "JD", "fb")]
    return next((ratio for ratio in found if ratio is not None), None)


def verdicts(rows: Iterable[Row]) -> list[Verdict]:
    """All goals, in the order in which they were measured."""
    found: list[Verdict] = []
    for row in rows:
        case = f"{row.table}: {row.name} {row.size}"
        if isinstance(row, Measurement):
            if row.goal is not None and row.ratio is not None:
                found.append(Verdict(case, "time", row.against, "", row.ratio, row.goal, bool(row.reached)))
            continue
        case = case if row.device == "cpu" else f"{case} {row.device}"
        found += [Verdict(case, f.what, f.against, f.ours, f.ratio, f.goal, f.reached) for f in row.figures]
    return found


def goals(found: Sequence[Verdict]) -> str:
    """One table of everything that there is a goal for."""
    head = f"\nto reach\n{'':34}{'':8}{'ours':18}{'against':>12}{'ratio':>8} {'quartiles':16}{'goal':>5}"
    lines = [head, *map(_goal, found)]
    return "\n".join([*lines, f"\n{sum(verdict.reached for verdict in found)} of {len(found)} goals reached"])


def _goal(verdict: Verdict) -> str:
    text = f"{verdict.case:34}{verdict.what:8}{verdict.ours:18}{verdict.against:>12}"
    if not verdict.ratio:
        return f"{text}{'-':>8} {'':16}{verdict.goal:5.2f} MISSED"
    low, middle, high = verdict.ratio if len(verdict.ratio) == 3 else verdict.ratio * 3
    spread = f"[{low:.3f} {high:.3f}]" if len(verdict.ratio) == 3 else ""
    return f"{text}{middle:8.3f} {spread:16}{verdict.goal:5.2f} {'reached' if verdict.reached else 'MISSED'}"


def slow_choices(rows: Iterable[Row]) -> str:
    """Where `auto` took a quarter longer than the faster engine by hand: a wrong choice, or what a step costs."""
    lines = []
    for row in rows:
        if isinstance(row, Standing) and {"auto", "jacobian", "gramian"} <= row.seconds.keys():
            best = min(("jacobian", "gramian"), key=row.seconds.__getitem__)
            excess = row.seconds["auto"] / row.seconds[best]
            if excess > 1.25:
                lines.append(f"  {row.table}: {row.name} {row.size}: {excess:.2f} times {best}")
    return "\n".join(["\nauto, where it takes more than 1.25 times our faster engine", *lines]) if lines else ""


def record(rows: Iterable[Row], threads: int = 1) -> dict[str, Any]:
    """Everything, with versions and machine."""
    rows = list(rows)
    names = ("torch", "torchjd", "functional_jd", "numpy")
    machine = {"system": platform.system(), "architecture": platform.machine(), "processor": _processor()}
    malloc = {name: value for name, value in os.environ.items() if name.startswith("MALLOC_")}
    standings = [row for row in rows if isinstance(row, Standing)]
    return {
        "versions": {"python": platform.python_version()} | {name: version(name) for name in names},
        "machine": machine | {"cores": os.cpu_count(), "threads": threads, "load": os.getloadavg(), "malloc": malloc},
        "measurements": [row._asdict() for row in rows if isinstance(row, Measurement)],
        "races": [row._asdict() | {"figures": [figure._asdict() for figure in row.figures]} for row in standings],
        "goals": [verdict._asdict() for verdict in verdicts(rows)],
    }


def _processor() -> str:
    facts = Path("/proc/cpuinfo")
    lines = facts.read_text().splitlines() if facts.exists() else []
    return next((line.split(": ", 1)[1] for line in lines if line.startswith("model name")), platform.processor())
