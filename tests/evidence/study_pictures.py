"""The pictures of the study, readable on white and on black: differences to standardised sums, and fronts."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

import matplotlib as mpl
from matplotlib.figure import Figure
from problems import PROBLEMS
from study_front_tables import SPELLED
from study_fronts import FAMILIES, ON, on_the_front, points_of
from study_fronts import PREFIX as FRONT
from study_statistics import REFERENCE, difference, scores

INK, FAINT, BETTER, WORSE = "#777777", "#77777755", "#0072B2", "#D55E00"
SHOWN = ("upgrad", "config", "nash_mtl", "unit_sum", "start", "random_search", "mean")
LEAST = -20.0  # the same in the chart of all methods
FARTHEST = -30.0  # what is worse than this many points is drawn here
COLORS = (INK, "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00")
PARTS = {
    "fairness": ("accuracy", "1 - gap"),
    "loans": ("2 AUC - 1", "1 - gap"),
    "bandit": ("first reward", "second reward"),
    "beta_vae": ("R² of the image", "1 - nats / 20"),
}


SETTINGS = {
    "text.color": INK, "axes.labelcolor": INK, "xtick.color": INK, "ytick.color": INK, "axes.edgecolor": INK,
    "font.size": 8, "svg.hashsalt": "evidence", "svg.fonttype": "none",
}  # fmt: skip


def plain(axis: Any) -> None:
    """A grid without a frame, on whatever is below."""
    axis.grid(color=FAINT, linewidth=0.5)
    axis.spines[["top", "right"]].set_visible(False)
    axis.patch.set_alpha(0)


def dots(axis: Any, y: int, values: list[float], middle: Callable[[list[float]], float]) -> None:
    """A dot a value, at `LEAST` or above, and a bar in the middle."""
    axis.plot([max(LEAST, x) for x in values], [y] * len(values), "o", color="#0072B288")
    if values:
        axis.plot([middle(values)] * 2, [y - 0.35, y + 0.35], color=WORSE, linewidth=3)


@contextmanager
def figure_at(path: Path, size: tuple[float, float], **settings: Any) -> Iterator[Figure]:
    """A figure that is stored in the end."""
    with mpl.rc_context(SETTINGS | settings):
        figure = Figure(figsize=size, layout="constrained")
        yield figure
        figure.savefig(path, transparent=True, metadata={"Date": None})


def draw(cells: dict[str, dict[str, Any]], folder: Path) -> None:
    """Draw the differences: a panel a problem, a line a method."""
    ready, columns = [name for name, found in cells.items() if REFERENCE in found], 5
    lines = max(1, -(-len(ready) // columns))
    with figure_at(folder / "evidence_differences.svg", (11, 0.5 + 1.9 * lines)) as figure:
        axes = figure.subplots(lines, columns, squeeze=False, sharey=True)
        for axis in axes.flat[len(ready) :]:
            axis.set_visible(False)
        for axis, name in zip(axes.flat, ready, strict=False):
            panel(axis, name, cells[name], PROBLEMS[name].shared)
        figure.supxlabel("hundredths of the score over standardised sums, with 95 % intervals", fontsize=8, color=INK)


def draw_fronts(cells: dict[str, dict[str, Any]], folder: Path) -> None:
    """Draw the fronts of the first draw: a panel a problem, a color a method."""
    ready = [name for name in ON if FRONT + "sums" in cells.get(name, {})]
    if not ready:
        return
    with figure_at(folder / "evidence_fronts.svg", (11, 3.2)) as figure:
        for axis, name in zip(figure.subplots(1, len(ready), squeeze=False)[0], ready, strict=True):
            for family, color in zip(FAMILIES, COLORS, strict=True):
                if FRONT + family in cells[name]:
                    validation, test = (split[0] for split in points_of(cells[name][FRONT + family]))
                    points = test[on_the_front(validation)]
                    points = points[points[:, 0].argsort()]
                    label = SPELLED[family].strip("`")
                    axis.plot(*points.T, "o-", color=color, linewidth=1, markersize=3, label=label)
            first, second = PARTS[name]
            axis.set(title=name, xlabel=first, ylabel=second)
            plain(axis)
        figure.legend(*axis.get_legend_handles_labels(), loc="outside lower center", ncols=6, frameon=False)


def draw_summary(differences: dict[str, list[float]], path: Path) -> None:
    """Draw all methods in one chart: a dot a problem, a bar at the median, the best median at the top."""
    labels = {"*unit_sum*": "sum of unit gradients", "*random_search*": "random search", "*start*": "1 / first loss"}
    ordered = sorted(differences, key=lambda name: median(differences[name]))
    with figure_at(path, (8, 5.4), **{"font.size": 12}) as figure:
        axis = figure.subplots()
        axis.axvline(0, color=INK, linewidth=0.8)
        for y, name in enumerate(ordered):
            dots(axis, y, differences[name], median)
        axis.set_yticks(range(len(ordered)), [labels.get(name, name.strip("`")) for name in ordered])
        axis.set(xlabel="hundredths of the score over standardised sums", ylim=(-0.6, len(ordered) - 0.4))
        plain(axis)


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
    plain(axis)
