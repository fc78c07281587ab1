"""Pictures of the diagnosis: ratios to the peer, how cost grows, and what memory it takes."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from report import against_peer

# Okabe and Ito's colours, which everybody tells apart; and a marker each, for print in grey.
_STYLES = {
    "tiny MLP": ("#56B4E9", "v"),
    "MLP": ("#0072B2", "o"),
    "large MLP": ("#D55E00", "s"),
    "conv": ("#009E73", "^"),
    "transformer": ("#CC79A7", "D"),
    "fb": ("#000000", "."),
    "JD": ("#D55E00", "s"),
    "Engine": ("#E69F00", "P"),
    "jacobian": ("#56B4E9", "^"),
    "gramian": ("#0072B2", "o"),
    "auto": ("#CC79A7", "D"),
}
_LABELS = {
    "fb": "plain forward + backward",
    "JD": "TorchJD",
    "Engine": "TorchJD's Engine",
    "jacobian": "ours, jacobian",
    "gramian": "ours, gramian",
    "auto": "ours, step(auto)",
}
_QUANTITIES = {"m": "objectives m", "n": "parameters n of the trunk", "batch": "batch"}
_SETTINGS = {
    "font.size": 10,
    "axes.grid": True,
    "grid.alpha": 0.3,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "lines.markersize": 5,
    "svg.fonttype": "none",
}


def draw(record: dict[str, Any], folder: Path) -> list[Path]:
    """Draw what the record has figures for, as PNG; with CUDA, each picture once per device."""
    written: list[Path] = []
    with mpl.rc_context(_SETTINGS):
        for device in dict.fromkeys(row["device"] for row in record["races"]):
            races = [row for row in record["races"] if row["device"] == device]
            for name, picture in (("ratio", _ratios), ("growth", _growth), ("memory", _memory)):
                figure = picture(races)
                if figure is not None:
                    path = folder / (f"{name}.png" if device == "cpu" else f"{name}_{device}.png")
                    figure.savefig(path, dpi=150)
                    written.append(path)
    return written


def _ratios(races: list[dict[str, Any]]) -> Figure | None:
    """A step without an optimizer against the peer by m, a panel for tasks and one for examples."""
    panels = [
        ("tasks", "several tasks on a trunk", "tasks T", "time, times TorchJD's mtl_backward"),
        ("examples", "every example an objective", "examples m", "time, times TorchJD's Engine"),
    ]
    panels = [panel for panel in panels if any(row["table"] == panel[0] for row in races)]
    if not panels:
        return None
    figure, axes = _panels(len(panels))
    for axis, (table, title, xlabel, ylabel) in zip(axes, panels, strict=True):
        chosen = [row for row in races if row["table"] == table]
        for index, name in enumerate(dict.fromkeys(row["name"] for row in chosen)):
            _curve_of_ratios(axis, name, [row for row in chosen if row["name"] == name], 1.06 ** (index - 2))
        axis.axhline(1, color="black", linewidth=0.8)
        _log_log(axis, [_x(row) for row in chosen])
        axis.set(title=title, xlabel=xlabel, ylabel=ylabel)
        axis.legend(fontsize=8)
    return figure


def _curve_of_ratios(axis: Axes, name: str, rows: list[dict[str, Any]], shift: float) -> None:
    """A model's ratios, beside those of the others rather than upon them."""
    color, marker = _STYLES[name]
    points = [(_x(row) * shift, ratio) for row in rows if (ratio := against_peer(row)) is not None]
    if not points:
        return
    xs, middles = [x for x, _ in points], [ratio[1] for _, ratio in points]
    spread = [[ratio[1] - ratio[0] for _, ratio in points], [ratio[2] - ratio[1] for _, ratio in points]]
    axis.errorbar(xs, middles, spread, color=color, marker=marker, capsize=2, linewidth=1.2, label=name)


def _growth(races: list[dict[str, Any]]) -> Figure | None:
    """Milliseconds per direction by m, n and batch."""
    chosen = [row for row in races if row["table"] == "growth"]
    quantities = [q for q in _QUANTITIES if any(row["name"] == f"with {q}" for row in chosen)]
    if not quantities:
        return None
    figure, axes = _panels(len(quantities), sharey=True)
    for axis, quantity in zip(axes, quantities, strict=True):
        rows = sorted((row for row in chosen if row["name"] == f"with {quantity}"), key=_x)
        for side in ("fb", "JD", "jacobian", "gramian"):
            points = [(_x(row), row["seconds"][side] * 1e3) for row in rows if side in row["seconds"]]
            color, marker = _STYLES[side]
            dashes = "--" if side == "fb" else "-"
            axis.plot(*zip(*points, strict=True), dashes, color=color, marker=marker, label=_LABELS[side])
        _log_log(axis, [_x(row) for row in rows])
        axis.set(title=f"with {_QUANTITIES[quantity]}", xlabel=_QUANTITIES[quantity])
    axes[0].set_ylabel("ms per direction, tasks on an MLP")
    axes[0].legend(fontsize=8)
    return figure


def _memory(races: list[dict[str, Any]]) -> Figure | None:
    """MB at the peak, by case, the largest size of each model and those with a goal."""
    chosen = [row for row in races if row["table"] in ("tasks", "examples") and row["name"] != "tiny MLP"]
    last = {(row["table"], row["name"]): row for row in chosen}
    chosen = [
        row
        for row in chosen
        if row is last[row["table"], row["name"]] or any(goal["what"] == "memory" for goal in row["figures"])
    ]
    if not chosen:
        return None
    figure, (axis,) = _panels(1, height=0.6 + 0.55 * len(chosen))
    for y, row in enumerate(chosen):
        for side in ("fb", "JD", "Engine", "jacobian", "gramian"):
            if side in row["memory"]:
                color, marker = _STYLES[side]
                axis.plot(row["memory"][side] / 2**20, y, color=color, marker=marker, linestyle="", markersize=7)
    axis.set_xscale("log")
    marks = _marks(*axis.get_xlim())
    axis.set_xticks(marks, [f"{mark:g}" for mark in marks])
    axis.minorticks_off()
    axis.set_yticks(range(len(chosen)), [f"{row['name']}, {row['size']}" for row in chosen])
    axis.invert_yaxis()
    axis.set(xlabel="MB at the peak above the model", title="memory of one direction")
    for side in ("fb", "JD", "Engine", "jacobian", "gramian"):
        color, marker = _STYLES[side]
        axis.plot([], [], color=color, marker=marker, linestyle="", markersize=7, label=_LABELS[side])
    axis.legend(fontsize=8, bbox_to_anchor=(1.01, 1), loc="upper left")
    return figure


def _panels(count: int, height: float = 4.2, sharey: bool = False) -> tuple[Figure, Sequence[Axes]]:
    figure = Figure(figsize=(max(8.0, 4.6 * count), height), layout="constrained")
    return figure, figure.subplots(1, count, squeeze=False, sharey=sharey)[0]


def _log_log(axis: Axes, xs: Iterable[float]) -> None:
    axis.set_xscale("log")
    axis.set_yscale("log")
    ticks = sorted(set(xs))
    axis.set_xticks(ticks, [_short(x) for x in ticks])
    axis.minorticks_off()
    marks = _marks(*axis.get_ylim())
    axis.set_yticks(marks, [f"{mark:g}" for mark in marks])


def _marks(low: float, high: float) -> list[float]:
    marks = [digit * 10.0**power for power in range(-6, 6) for digit in (1, 2, 5)]
    return [mark for mark in marks if low <= mark <= high]


def _short(x: float) -> str:
    return f"{x / 1e6:.1f} M" if x >= 1e6 else f"{x / 1e3:.0f} k" if x >= 1e4 else f"{x:g}"


def _x(row: dict[str, Any]) -> int:
    return int(row["size"].partition("=")[2])
