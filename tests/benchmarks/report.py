"""What people read, a line per case as it comes; and the record for machines."""

import os
import platform
from collections.abc import Iterable
from importlib.metadata import version
from pathlib import Path
from typing import Any

from races import Standing

TITLES = {
    "as run": "the whole step as users call it, optimizer included",
    "compiled": "the same, our step in one graph, TorchJD's loop eager",
}

NOTES = """
as run and compiled: ours, `step` with `upgrad`, `adamw` and default arguments, the losses a dict; stacked, the losses
of tasks one tensor; operators, `compiled` with `backend="eager"`; mean, `step` with `mean`. JD, TorchJD's loop with
`UPGrad`, torch's AdamW and, in float16, GradScaler: `mtl_backward` or `backward` with `jac_to_grad`, one row after the
other where the default does not run; for examples the faster of `backward` and `autogram.Engine`. plain, training of
the mean loss, compiled where it says so. limit, one forward pass, the heads once, the trunk once per task, and no more.

All sides give the same direction, or are not timed. Figures are medians; ratios are medians of the rounds' ratios, with
their quartiles. MB are 2^20 bytes. apart: the relative distance of the two directions; the peer adds a ridge of 1e-4 to
the Gramian."""


def line(row: Standing) -> str:
    """Times and ratios of a case, with their quartiles and goals; and why a side is out."""
    goals = {f"{figure.ours}/{figure.against}": figure for figure in row.figures}
    parts = [f"{name} {seconds * 1e3:.4g} ms" for name, seconds in row.seconds.items()]
    of_ours = [(name, ratio) for name, ratio in row.ratios.items() if not name.startswith(("JD", "plain", "limit"))]
    for name, (low, middle, high) in of_ours:
        goal = f", {'reached' if goals[name].reached else 'MISSED'} {goals[name].goal:g}" if name in goals else ""
        parts.append(f"{name} {middle:.3f} [{low:.3f} {high:.3f}]{goal}")
    parts += [f"{name} {size / 2**20:.1f} MB" for name, size in row.memory.items()]
    parts += [f"{name} {far:.0e} apart" for name, far in row.difference.items() if name != "ours"]
    text = f"{row.name:18}{_place(row):16}" + "; ".join(parts)
    return text + "".join(f"\n    {name}: {reason}" for name, reason in row.refused.items())


def goals(rows: Iterable[Standing]) -> str:
    """How many were reached."""
    found = [figure.reached for row in rows for figure in row.figures]
    return f"{sum(found)} of {len(found)} goals reached"


def _place(row: Standing) -> str:
    return row.size if row.device == "cpu" else f"{row.size} {row.device}"


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
    }


def _processor() -> str:
    facts = Path("/proc/cpuinfo")
    lines = facts.read_text().splitlines() if facts.exists() else []
    return next((line.split(": ", 1)[1] for line in lines if line.startswith("model name")), platform.processor())
