"""What people read, a line per case as it comes; and the record for machines."""

import os
import platform
from collections.abc import Iterable
from importlib.metadata import version
from typing import Any

from races import Standing

TITLES = {
    "as run": "the whole step as users call it, optimizer included",
    "compiled": "the same, our step in one graph, TorchJD's loop eager",
}

NOTES = """
ours, `step` with `upgrad`, `adamw` and default arguments, the losses a dict; stacked, the losses of tasks one tensor;
operators, `compiled` with `backend="eager"`; mean, `step` with `mean`. JD, TorchJD's loop with `UPGrad`. plain,
training of the mean loss, compiled where it says so. limit, one forward pass, the heads once, the trunk once per task.

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
    text = f"{row.name:18}{row.size:16}" + "; ".join(parts)
    return text + "".join(f"\n    {name}: {reason}" for name, reason in row.refused.items())


def goals(rows: Iterable[Standing]) -> str:
    """How many were reached."""
    found = [figure.reached for row in rows for figure in row.figures]
    return f"{sum(found)} of {len(found)} goals reached"


def record(rows: Iterable[Standing]) -> dict[str, Any]:
    """Everything, with versions and machine."""
    names = ("torch", "torchjd", "functional_jd", "numpy")
    return {
        "versions": {"python": platform.python_version()} | {name: version(name) for name in names},
        "machine": {"platform": platform.platform(), "cores": os.cpu_count(), "load": os.getloadavg()},
        "races": [row._asdict() | {"figures": [figure._asdict() for figure in row.figures]} for row in rows],
    }
