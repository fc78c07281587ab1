"""What people read: a line per case as it comes, at the end one table of all goals; and the record for machines."""

import os
import platform
from collections.abc import Iterable, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

from races import Figure, Standing

TITLES = {
    "as run": "the whole step as users call it, optimizer included; milliseconds, ratios beside their goals, MB",
    "compiled": "the same, our step in one graph, TorchJD's loop eager; milliseconds, ratios beside their goals, MB",
    "weights": "weights of a rule; microseconds",
    "batches": "weights of a rule, a batch of 64; microseconds",
}

RATIOS = {
    "as run": ("ours/JD", "stacked/JD", "operators/JD", "mean/plain", "ours/limit", "ours/plain"),
    "compiled": ("ours/JD", "mean/plain", "ours/limit", "ours/plain", "ours/plain compiled"),
}

NOTES = """
as run and compiled: ours, `step` with `upgrad`, `adamw` and default arguments, the losses a dict; stacked, the losses
of tasks one tensor; operators, `compiled` with `backend="eager"`; mean, `step` with `mean`. JD, TorchJD's loop with
`UPGrad`, torch's AdamW and, in float16, GradScaler: `mtl_backward` or `backward` with `jac_to_grad`, one row after the
other where the default does not run; for examples the faster of `backward` and `autogram.Engine`. plain, training of
the mean loss, compiled where it says so. limit, one forward pass, the heads once, the trunk once per task, and no more.
A ratio beside its goal: <= reached, > missed. First call and graphs: of our compiled step, with an empty cache of
compiled code unless TORCHINDUCTOR_CACHE_DIR names one; more graphs than one mean that it compiled again.

All sides give the same direction, or are not timed. Figures are medians; ratios are medians of the rounds' ratios, with
their quartiles. MB are 2^20 bytes. apart: the relative distance of the two directions; the peer approximates in upgrad
and dualproj (ridge 1e-4), mgda (100 steps), cagrad, nash_mtl and fairgrad (their solvers' tolerances). No figure: it is
drawn by chance, or depends on earlier calls. No peer: its solver is not installed."""

_MB = 2**20


class Verdict(NamedTuple):
    """A figure, its goal, and whether it is reached; no figure where a side refused, which reaches nothing."""

    case: str
    against: str
    ours: str
    ratio: list[float]
    goal: float
    reached: bool


def heading(row: Standing) -> str:
    """What stands above a table that begins with this row."""
    title = f"\n{TITLES.get(row.table, row.table)}\n"
    if row.table in RATIOS:
        cells = "".join(f"{name:>21}" for name in (*RATIOS[row.table], "MB, JD's"))
        return title + f"{'':34}{'ours':>9}{cells}" + ("   first call, graphs" if row.table == "compiled" else "")
    names = f"{'ours':>11}{'peer':>11}  {'ratio':>6} {'quartiles':16}{'goal':>5} {'':8}{'apart':>7}"
    return title + f"{'':27}{names}"


def line(row: Standing) -> str:
    """A row of a table."""
    return (_step if row.table in RATIOS else _weights)(row) + _refused(row)


def _weights(row: Standing) -> str:
    text = f"{row.name:21}{row.size:>6}{row.seconds['ours'] * 1e6:11.1f}"
    if "JD" not in row.seconds:
        return f"{text}{'-':>11}"
    low, middle, high = row.ratios["ours/JD"]
    goal, verdict = next(((f"{f.goal:.2f}", "reached" if f.reached else "MISSED") for f in row.figures), ("", ""))
    apart = f"{row.difference['JD']:.0e}" if "JD" in row.difference else ""
    spread = f"[{low:.3f} {high:.3f}]"
    return f"{text}{row.seconds['JD'] * 1e6:11.1f}  {middle:6.3f} {spread:16}{goal:>5} {verdict:8}{apart:>7}"


def _step(row: Standing) -> str:
    goals = {f"{figure.ours}/{figure.against}": figure for figure in row.figures}
    cells = [_ratio(row.ratios.get(name), goals.get(name)) for name in RATIOS[row.table]]
    cells.append(", ".join(f"{row.memory[name] / _MB:.1f}" if name in row.memory else "-" for name in ("ours", "JD")))
    text = f"{row.name:18}{_place(row):16}" + (
        f"{row.seconds['ours'] * 1e3:9.2f}" if "ours" in row.seconds else f"{'-':>9}"
    )
    text += "".join(f"{cell:>21}" for cell in cells)
    if "ours" not in row.compiled:
        return text
    first, graphs = row.compiled["ours"]
    return f"{text}{first:11.1f} s, {graphs}"


def _ratio(ratio: list[float] | None, goal: Figure | None) -> str:
    if ratio is None:
        return "-"
    return f"{ratio[1]:.3f}" if goal is None else f"{ratio[1]:.3f} {'<=' if goal.reached else '>'} {goal.goal:.2f}"


def _place(row: Standing) -> str:
    return row.size if row.device == "cpu" else f"{row.size} {row.device}"


def _refused(row: Standing) -> str:
    return "".join(f"\n    {name}: {reason}" for name, reason in row.refused.items())


def verdicts(rows: Iterable[Standing]) -> list[Verdict]:
    """All goals, in the order in which they were measured."""
    return [
        Verdict(f"{row.table}: {row.name} {_place(row)}", f.against, f.ours, f.ratio, f.goal, f.reached)
        for row in rows
        for f in row.figures
    ]


def goals(found: Sequence[Verdict]) -> str:
    """One table of everything that there is a goal for."""
    head = f"\nto reach\n{'':42}{'ours':10}{'against':>12}{'ratio':>8} {'quartiles':16}{'goal':>5}"
    lines = [head, *map(_goal, found)]
    return "\n".join([*lines, f"\n{sum(verdict.reached for verdict in found)} of {len(found)} goals reached"])


def _goal(verdict: Verdict) -> str:
    text = f"{verdict.case:42}{verdict.ours:10}{verdict.against:>12}"
    if not verdict.ratio:
        return f"{text}{'-':>8} {'':16}{verdict.goal:5.2f} MISSED"
    low, middle, high = verdict.ratio
    spread, end = f"[{low:.3f} {high:.3f}]", "reached" if verdict.reached else "MISSED"
    return f"{text}{middle:8.3f} {spread:16}{verdict.goal:5.2f} {end}"


def record(rows: Iterable[Standing], threads: int = 1) -> dict[str, Any]:
    """Everything, with versions and machine."""
    rows = list(rows)
    names = ("torch", "torchjd", "functional_jd", "numpy")
    machine = {"system": platform.system(), "architecture": platform.machine(), "processor": _processor()}
    malloc = {name: value for name, value in os.environ.items() if name.startswith("MALLOC_")}
    return {
        "versions": {"python": platform.python_version()} | {name: version(name) for name in names},
        "machine": machine | {"cores": os.cpu_count(), "threads": threads, "load": os.getloadavg(), "malloc": malloc},
        "races": [row._asdict() | {"figures": [figure._asdict() for figure in row.figures]} for row in rows],
        "goals": [verdict._asdict() for verdict in verdicts(rows)],
    }


def _processor() -> str:
    facts = Path("/proc/cpuinfo")
    lines = facts.read_text().splitlines() if facts.exists() else []
    return next((line.split(": ", 1)[1] for line in lines if line.startswith("model name")), platform.processor())
