"""The picture of the study, readable on white and on black: differences to standardised sums, with their intervals."""

from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.figure import Figure
from study_statistics import REFERENCE, difference, scores

INK, FAINT, BETTER, WORSE = "#777777", "#77777755", "#0072B2", "#D55E00"
SHOWN = ("upgrad", "config", "nash_mtl", "unit_sum", "start", "random_search", "mean")
FARTHEST = -30.0  # what is worse than this many points is drawn here


def draw(cells: dict[str, dict[str, Any]], shared: dict[str, bool], folder: Path) -> Path:
    """Draw the picture: a panel a problem, a line a method."""
    settings = {
        "text.color": INK, "axes.labelcolor": INK, "xtick.color": INK, "ytick.color": INK, "axes.edgecolor": INK,
        "font.size": 8, "svg.hashsalt": "evidence", "svg.fonttype": "none",
    }  # fmt: skip
    ready = [name for name, found in cells.items() if REFERENCE in found]
    path = folder / "evidence_differences.svg"
    with mpl.rc_context(settings):
        columns = 5
        lines = max(1, -(-len(ready) // columns))
        figure = Figure(figsize=(11, 0.5 + 1.9 * lines), layout="constrained")
        axes = figure.subplots(lines, columns, squeeze=False, sharey=True)
        for axis in axes.flat[len(ready) :]:
            axis.set_visible(False)
        for axis, name in zip(axes.flat, ready, strict=False):
            panel(axis, name, cells[name], shared[name])
        figure.supxlabel("hundredths of the score over standardised sums, with 95 % intervals", fontsize=8, color=INK)
        figure.savefig(path, transparent=True, metadata={"Date": None})
    return path


def panel(axis: Any, name: str, found: dict[str, Any], shared: bool) -> None:
    """One problem."""
    axis.axvline(0, color=INK, linewidth=0.8)
    for y, method in enumerate(SHOWN):
        if method not in found:
            continue
        d = difference(scores(found[method]), scores(found[REFERENCE]), shared)
        low, mean, high = (max(100 * x, FARTHEST) for x in (d.low, d.mean, d.high))
        color = {"better": BETTER, "worse": WORSE}.get(d.word, INK)
        axis.plot([low, high], [y, y], "-", color=color, linewidth=1.5)
        axis.plot(mean, y, "<" if 100 * d.mean < FARTHEST else "o", color=color, markersize=3.5)
    axis.set_title(name, fontsize=8, color=INK)
    axis.set_yticks(range(len(SHOWN)), SHOWN, fontsize=7)
    axis.grid(color=FAINT, linewidth=0.5)
    axis.spines[["top", "right"]].set_visible(False)
    axis.patch.set_alpha(0)
