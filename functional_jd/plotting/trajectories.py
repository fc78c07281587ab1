"""Trajectories of rules over the contours of two losses."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from matplotlib.lines import Line2D

from functional_jd.aggregation.aggregate import Aggregator
from functional_jd.plotting.problems import Path, Problem, descend
from functional_jd.plotting.style import Array, Ax, axes, ink, look, numbers, quiet
from functional_jd.plotting.style import legend as beside

GRID, LEVELS = 160, 9


def trajectories(
    problem: Problem,
    rules: Mapping[str, Aggregator | Path],
    ax: Ax | None = None,
    *,
    contours: bool = True,
    legend: bool = True,
) -> Ax:
    """Draw where rules go on the plane, over the contours of both losses, and where they should arrive.

    Args:
        problem: two losses on the plane.
        rules: name and rule, which is followed from the problem's starts with its optimizer; or a `Path` from
            `descend(problem, rule, ...)`, to choose them.
        ax: the axes to draw on; `None` makes a figure.
        contours: whether to draw those of the losses. Without them, small multiples are lean.
        legend: whether to put one beside the axes.

    Returns:
        The axes: contours full for the first loss and dashed for the second, the Pareto set a broad band, dots where
        paths start, a rule's marker where they end.

    Raises:
        ValueError: a path of other than points on the plane.

    Example:
        >>> trajectories(quadratics(), {"mean": mean(), "upgrad": upgrad()})
    """
    paths = {name: rule if isinstance(rule, Path) else descend(problem, rule) for name, rule in rules.items()}
    for name, path in paths.items():
        if path.points.ndim != 3 or path.points.shape[2] != 2:
            raise ValueError(
                f"trajectories: expected points [steps + 1, s, 2], found shape {list(path.points.shape)} in {name!r}. "
                "Make paths with descend(problem, rule)."
            )
    ax = axes(ax, (6.6, 4.6))
    quiet(ax, xlabel="entry 0", ylabel="entry 1")
    ax.grid(visible=False)
    if contours:
        _contours(ax, problem)
    band: dict[str, Any] = {"linewidth": 7, "alpha": 0.3, "solid_capstyle": "round", "zorder": 2}
    ax.plot(*numbers(problem.pareto).T, color=ink(ax), label="Pareto set", **band)
    begins = np.concatenate([numbers(path.points[0]) for path in paths.values()] or [np.empty((0, 2))])
    ax.plot(*begins.T, "o", color=ink(ax), markersize=5, label="start", zorder=3)
    for index, (name, path) in enumerate(paths.items()):
        _draw(ax, numbers(path.points), name, index)
    (left, bottom), (right, top) = numbers(problem.window)
    ax.set(xlim=(left, right), ylim=(bottom, top), aspect="equal")
    if legend:
        beside(ax, handles=_handles(ax, contours))
    return ax


def _draw(ax: Ax, points: Array, name: str, index: int) -> None:
    style, width = look(index), max(1.2, 2.6 - 0.35 * index)
    ends = {
        "markevery": [len(points) - 1],
        "markersize": max(5, 10 - index),
        "markeredgecolor": ink(ax),
        "markeredgewidth": 0.8,
    }
    for number, path in enumerate(points.swapaxes(0, 1)):
        label = name if not number else "_"
        ax.plot(*path.T, label=label, linewidth=width, zorder=4 + 0.01 * index, **ends, **style)


def _contours(ax: Ax, problem: Problem) -> None:
    """Lines at quantiles of each loss over the window, so that bowls, valleys and plains all get some."""
    (left, bottom), (right, top) = problem.window.tolist()
    xs, ys = torch.linspace(left, right, GRID).double(), torch.linspace(bottom, top, GRID).double()
    mesh = torch.stack(torch.meshgrid(xs, ys, indexing="xy"), -1).reshape(-1, 2)
    values = numbers(torch.vmap(problem.losses)(mesh)).T.reshape(2, GRID, GRID)
    for loss, style in zip(values, ("solid", "dashed"), strict=True):
        levels = np.unique(np.quantile(loss, np.linspace(0, 1, LEVELS + 2)[1:-1]))
        lines: dict[str, Any] = {"linewidths": 0.8, "alpha": 0.45, "linestyles": style, "colors": [ink(ax)]}
        ax.contour(numbers(xs), numbers(ys), loss, levels=levels, zorder=1, **lines)


def _handles(ax: Ax, contours: bool) -> list[Any]:
    lines = [
        Line2D([], [], color=ink(ax), alpha=0.6, linewidth=0.8, linestyle=style, label=f"loss {index}")
        for index, style in enumerate(("solid", "dashed"))
    ]
    return [*ax.get_legend_handles_labels()[0], *(lines if contours else [])]
