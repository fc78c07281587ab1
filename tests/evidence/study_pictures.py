"""The pictures of the study, readable on white and on black: all methods in one chart, and fronts."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

import matplotlib as mpl
from matplotlib.figure import Figure
from study_front_tables import SPELLED
from study_fronts import FAMILIES, ON, on_the_front, points_of
from study_fronts import PREFIX as FRONT

INK, FAINT = "#777777", "#77777755"
LEAST = -20.0  # what is worse than this many points is drawn here
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


@contextmanager
def figure_at(path: Path, size: tuple[float, float], **settings: Any) -> Iterator[Figure]:
    """A figure that is stored in the end."""
    with mpl.rc_context(SETTINGS | settings):
        figure = Figure(figsize=size, layout="constrained")
        yield figure
        figure.savefig(path, transparent=True, metadata={"Date": None})


def draw_fronts(cells: dict[str, dict[str, Any]], folder: Path) -> None:
    """Draw the fronts of the first draw: a panel a problem, a color a method."""
    with figure_at(folder / "evidence_fronts.svg", (11, 3.2)) as figure:
        for axis, name in zip(figure.subplots(1, len(ON)), ON, strict=True):
            for family, color in zip(FAMILIES, COLORS, strict=True):
                validation, test = (split[0] for split in points_of(cells[name][FRONT + family]))
                points = test[on_the_front(validation)]
                points = points[points[:, 0].argsort()]
                axis.plot(*points.T, "o-", color=color, linewidth=1, markersize=3, label=SPELLED[family].strip("`"))
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
            axis.plot([max(LEAST, x) for x in differences[name]], [y] * len(differences[name]), "o", color="#0072B288")
            axis.plot([median(differences[name])] * 2, [y - 0.35, y + 0.35], color="#D55E00", linewidth=3)
        axis.set_yticks(range(len(ordered)), [labels.get(name, name.strip("`")) for name in ordered])
        axis.set(xlabel="hundredths of the score over standardised sums", ylim=(-0.6, len(ordered) - 0.4))
        plain(axis)
