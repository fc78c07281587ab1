"""Plots of the trajectories of rules on the plane."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from matplotlib.lines import Line2D

from functional_jd.aggregation.aggregate import Aggregator, check_rule
from functional_jd.core.arguments import check_flag, check_mapping
from functional_jd.plotting.problems import Path, Problem, check_problem, descend
from functional_jd.plotting.style import Array, Ax, as_array, axes_or_new, background_color, look, quiet, text_color
from functional_jd.plotting.style import legend as add_legend

GRID, LEVELS = 160, 9


def trajectories(
    problem: Problem,
    rules: Mapping[str, Aggregator | Path],
    ax: Ax | None = None,
    *,
    contours: bool = True,
    legend: bool = True,
) -> Ax:
    """Plot the trajectories of rules on the plane, the contours of both losses, and the Pareto set.

    Args:
        problem: two losses on the plane.
        rules: a mapping from names to rules, run from the starts of the problem with its optimizer; or to paths from
            `descend(problem, rule, ...)`, with other settings.
        ax: the axes to draw on; `None` creates a figure. The legend stands beside them: make a figure of several axes
            with `layout="constrained"`.
        contours: whether to draw the contours of the losses.
        legend: whether to add a legend.

    Returns:
        The axes: contours solid for the first loss and dashed for the second, the Pareto set as a wide band, dots at
        the starts. The marker of the rule is at the end of each path, above all paths and of a size that fits the
        axes; where a path leaves the window, it is hollow, at the edge.

    Raises:
        TypeError: what is no problem, no rule and no path.
        ValueError: a path whose points are not `[steps + 1, s, 2]`.

    Example:
        >>> from functional_jd.plotting import quadratics
        >>> ax = trajectories(quadratics(), {"mean": mean(), "upgrad": upgrad()})
    """
    check_problem("trajectories", problem)
    check_mapping("trajectories", "rules", rules, 'Pass for instance {"mean": mean()}.')
    check_flag("trajectories", "contours", contours)
    check_flag("trajectories", "legend", legend)
    for rule in rules.values():
        if not isinstance(rule, Path):
            check_rule(rule, "trajectories")
    paths = {name: rule if isinstance(rule, Path) else descend(problem, rule) for name, rule in rules.items()}
    for name, path in paths.items():
        if path.points.ndim != 3 or path.points.shape[2] != 2:
            raise ValueError(
                f"trajectories: expected points [steps + 1, s, 2], found shape {list(path.points.shape)} in {name!r}. "
                "Create paths with descend(problem, rule)."
            )
    ax = axes_or_new("trajectories", ax, (6.6, 4.6))
    quiet(ax, xlabel="entry 0", ylabel="entry 1")
    ax.grid(visible=False)
    if contours:
        _draw_contours(ax, problem)
    band: dict[str, Any] = {"linewidth": 7, "alpha": 0.3, "solid_capstyle": "round", "zorder": 2}
    ax.plot(*as_array(problem.pareto).T, color=text_color(ax), label="Pareto set", **band)
    starts = np.concatenate([as_array(path.points[0]) for path in paths.values()] or [np.empty((0, 2))])
    ax.plot(*starts.T, "o", color=text_color(ax), markersize=5, label="start", zorder=3)
    window = as_array(problem.window)
    ax.set(xlim=window[:, 0], ylim=window[:, 1], aspect="equal")
    for index, (name, path) in enumerate(paths.items()):
        _draw_path(ax, as_array(path.points), name, index, window)
    if legend:
        add_legend(ax, handles=_legend_handles(ax, contours))
    return ax


def _draw_path(ax: Ax, points: Array, name: str, index: int, window: Array) -> None:
    style, color, width = look(index), text_color(ax), max(1.2, 2.6 - 0.35 * index)
    box = ax.get_window_extent()
    side = 72 * min(box.width, box.height) / ax.figure.dpi  # in points
    marker: dict[str, Any] = {"markersize": max(5.0, min(10.0, side / 12) - index)}
    marker |= {"markeredgecolor": color, "markeredgewidth": 0.8}
    for start, path in enumerate(points.swapaxes(0, 1)):
        label = name if not start else "_"
        ax.plot(*path.T, label=label, linewidth=width, zorder=4 + 0.01 * index, markevery=[], **marker, **style)
    # The ends are apart from the lines: above those of all rules, and at the edge where a path has left the window.
    ends = points[-1].clip(*window)
    marker |= {
        "linestyle": "none",
        "color": color,
        "marker": style["marker"],
        "clip_on": False,
        "in_layout": False,
        "zorder": 5,
    }
    for inside, face in ((True, style["color"]), (False, background_color(ax))):
        shown = ends[(ends == points[-1]).all(1) == inside]
        ax.plot(*shown.T, label="_", markerfacecolor=face, **marker)


def _draw_contours(ax: Ax, problem: Problem) -> None:
    """Draw contours at quantiles of each loss over the window, so that steep and flat regions both have some."""
    (left, bottom), (right, top) = problem.window.tolist()
    xs, ys = torch.linspace(left, right, GRID).double(), torch.linspace(bottom, top, GRID).double()
    grid = torch.stack(torch.meshgrid(xs, ys, indexing="xy"), -1).reshape(-1, 2)
    values = as_array(torch.vmap(problem.losses)(grid)).T.reshape(2, GRID, GRID)
    for loss, linestyle in zip(values, ("solid", "dashed"), strict=True):
        levels = np.unique(np.quantile(loss, np.linspace(0, 1, LEVELS + 2)[1:-1]))
        style: dict[str, Any] = {"linewidths": 0.8, "alpha": 0.45, "linestyles": linestyle, "colors": [text_color(ax)]}
        ax.contour(as_array(xs), as_array(ys), loss, levels=levels, zorder=1, **style)


def _legend_handles(ax: Ax, contours: bool) -> list[Any]:
    lines = [
        Line2D([], [], color=text_color(ax), alpha=0.6, linewidth=0.8, linestyle=style, label=f"loss {index}")
        for index, style in enumerate(("solid", "dashed"))
    ]
    return [*ax.get_legend_handles_labels()[0], *(lines if contours else [])]
