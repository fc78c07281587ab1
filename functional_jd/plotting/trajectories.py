"""Plots of the trajectories of rules on the plane."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from matplotlib.lines import Line2D

from functional_jd.aggregation.aggregate import Aggregator, check_rule
from functional_jd.core.arguments import check_flag, check_mapping, check_type, refuse
from functional_jd.plotting.problems import Path, Problem, descend
from functional_jd.plotting.style import Array, Ax, as_array, axes_or_new, background_color, look, quiet, text_color
from functional_jd.plotting.style import legend as add_legend

GRID, LEVELS = 160, 9
LINES: Any = "solid", "dashed"  # of the contours of both losses


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
        ax: the axes to draw on; `None` creates a figure.
        contours: whether to draw the contours of the losses.
        legend: whether to add a legend.

    Returns:
        The axes: contours solid for the first loss and dashed for the second, the Pareto set as a wide band, dots at
        the starts. The marker of the rule is at the end of each path, above all paths and of a size that fits the
        axes; where a path leaves the window, it is hollow, at the edge.

    Example:
        >>> from functional_jd.plotting import quadratics
        >>> ax = trajectories(quadratics(), {"mean": mean(), "upgrad": upgrad()})
    """
    check_type("trajectories", "problem", problem, Problem, "Call its builder: quadratics().")
    check_mapping("trajectories", "rules", rules, 'Pass for instance {"mean": mean()}.')
    check_flag("trajectories", "contours", contours)
    check_flag("trajectories", "legend", legend)
    for rule in rules.values():
        if not isinstance(rule, Path):
            check_rule(rule, "trajectories")
    paths = {name: rule if isinstance(rule, Path) else descend(problem, rule) for name, rule in rules.items()}
    for name, path in paths.items():
        if path.points.ndim != 3 or path.points.shape[2] != 2:
            expected, cure = f"points [steps + 1, s, 2] in {name!r}", "Create paths with descend(problem, rule)."
            refuse("trajectories", "rules", expected, path.points, cure, ValueError)
    ax = axes_or_new("trajectories", ax, (6.6, 4.6))
    quiet(ax, xlabel="entry 0", ylabel="entry 1")
    ax.grid(visible=False)
    color = text_color(ax)
    if contours:
        _draw_contours(ax, problem)
    band: dict[str, Any] = {"linewidth": 7, "alpha": 0.3, "solid_capstyle": "round", "zorder": 2}
    ax.plot(*as_array(problem.pareto).T, color=color, label="Pareto set", **band)
    starts = np.concatenate([np.empty((0, 2)), *(as_array(path.points[0]) for path in paths.values())])
    ax.plot(*starts.T, "o", color=color, markersize=5, label="start", zorder=3)
    window = as_array(problem.window)
    ax.set(xlim=window[:, 0], ylim=window[:, 1], aspect="equal")
    for index, (name, path) in enumerate(paths.items()):
        _draw_path(ax, as_array(path.points), name, index, window)
    if legend:
        gray: dict[str, Any] = {"color": color, "alpha": 0.6, "linewidth": 0.8}
        kinds = [Line2D([], [], linestyle=line, label=f"loss {k}", **gray) for k, line in enumerate(LINES)]
        add_legend(ax, handles=[*ax.get_legend_handles_labels()[0], *(kinds if contours else [])])
    return ax


def _draw_path(ax: Ax, points: Array, name: str, index: int, window: Array) -> None:
    style, width = look(index), max(1.2, 2.6 - 0.35 * index)
    box = ax.get_window_extent()
    side = 72 * min(box.width, box.height) / ax.figure.dpi  # in points
    marker: dict[str, Any] = {"markersize": max(5.0, min(10.0, side / 12) - index)}
    marker |= {"markeredgecolor": text_color(ax), "markeredgewidth": 0.8}
    for start, path in enumerate(points.swapaxes(0, 1)):
        label = "_" if start else name
        ax.plot(*path.T, label=label, linewidth=width, zorder=4 + 0.01 * index, markevery=[], **marker, **style)
    # The ends are apart from the lines: above those of all rules, and at the edge where a path has left the window.
    ends = points[-1].clip(*window)
    marker |= {"linestyle": "none", "marker": style["marker"], "clip_on": False, "in_layout": False, "zorder": 5}
    for inside, face in ((True, style["color"]), (False, background_color(ax))):
        shown = ends[(ends == points[-1]).all(1) == inside]
        ax.plot(*shown.T, label="_", markerfacecolor=face, **marker)


def _draw_contours(ax: Ax, problem: Problem) -> None:
    """Draw contours at quantiles of each loss over the window, so that steep and flat regions both have some."""
    (left, bottom), (right, top) = problem.window.tolist()
    xs, ys = torch.linspace(left, right, GRID).double(), torch.linspace(bottom, top, GRID).double()
    grid = torch.stack(torch.meshgrid(xs, ys, indexing="xy"), -1).reshape(-1, 2)
    values = as_array(torch.vmap(problem.losses)(grid)).T.reshape(2, GRID, GRID)
    for loss, line in zip(values, LINES, strict=True):
        levels = np.unique(np.quantile(loss, np.linspace(0, 1, LEVELS + 2)[1:-1]))
        style: dict[str, Any] = {"linewidths": 0.8, "alpha": 0.45, "linestyles": line, "colors": [text_color(ax)]}
        ax.contour(as_array(xs), as_array(ys), loss, levels=levels, zorder=1, **style)
