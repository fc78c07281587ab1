"""Two losses on the plane with a known Pareto set, the paths of rules on them, and a plot of these."""

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from matplotlib.lines import Line2D
from torch import Tensor

from functional_jd.aggregation.aggregate import Aggregator, aggregate, check_rule, start
from functional_jd.core.arguments import (
    Domain,
    check_flag,
    check_integer,
    check_mapping,
    check_number,
    check_type,
    refuse,
)
from functional_jd.core.types import Tree
from functional_jd.engines.differentiate import jacobian_fn
from functional_jd.optimizers.base import Optimizer
from functional_jd.optimizers.sgd import sgd
from functional_jd.plotting.style import Array, Ax, as_array, axes_or_new, check_points, look, quiet, text_color
from functional_jd.plotting.style import legend as add_legend


class Problem(NamedTuple):
    """Two losses of a point on the plane.

    Attributes:
        losses: `losses(point [2]) -> [2]`. Its Jacobian is a square matrix: call
            `diagnostics.diagnose(jacobian, gramian=False)`.
        pareto: `[k, 2]`, points of the Pareto set, in order along it.
        window: `[2, 2]`, the lower left and the upper right corner of the region to plot.
        starts: `[s, 2]`, the initial points.
        optimizer: an optimizer that converges.
        steps: the number of steps that it needs.
    """

    losses: Callable[[Tensor], Tensor]
    pareto: Tensor
    window: Tensor
    starts: Tensor
    optimizer: Optimizer
    steps: int


class Path(NamedTuple):
    """The paths of a rule from all starts.

    Attributes:
        points: `[steps + 1, s, 2]`, beginning with the starts.
        losses: `[steps + 1, s, 2]`.
    """

    points: Tensor
    losses: Tensor


def descend(
    problem: Problem,
    rule: Aggregator,
    *,
    optimizer: Optimizer | None = None,
    steps: int | None = None,
    starts: Tensor | None = None,
) -> Path:
    """Run a rule from all starts, in one batch.

    Args:
        problem: two losses on the plane.
        rule: the rule; one that compares batches gets the same Jacobian twice, as the losses are deterministic.
        optimizer: must compose with vmap; `None`: that of the problem.
        steps: `None`: that of the problem.
        starts: `[s, 2]`; `None`: those of the problem.

    Returns:
        `Path(points, losses)`, float64.

    Guarantees:
        Pure; the paths are independent of each other. A random rule uses the same random numbers for all starts: for
        others, vmap over keys. Only the rule is called: without `dwa_end_epoch`, `dwa` stays in its first epoch, where
        it equals `total`; without `famo_after_step`, `famo` uses the losses of the next call, which here are the same.
    """
    check_type("problem", problem, Problem, "Call its builder: quadratics().")
    check_rule(rule)
    if optimizer is not None:
        check_type("optimizer", optimizer, Optimizer, "Call its builder: sgd(0.1).")
    if steps is not None:
        check_integer("steps", steps, 0, "None is the number of the problem.")
    if starts is not None:
        cure = "For a single start, pass torch.tensor([[x, y]])."
        check_points("starts", starts, "[s, 2], points on the plane", lambda _, n: n == 2, cure)
    optimizer = problem.optimizer if optimizer is None else optimizer
    points = (problem.starts if starts is None else starts).double()
    differentiate = jacobian_fn(problem.losses)

    def init(point: Tensor) -> tuple[Tree, Tree]:
        jacobian, losses = differentiate(point)
        return optimizer.init(point), start(rule, jacobian, jacobian, losses=losses)

    def step(point: Tensor, optimizer_state: Tree, rule_state: Tree) -> tuple[Any, ...]:
        jacobian, losses = differentiate(point)
        direction, _, rule_state = aggregate(rule, jacobian, rule_state, jacobian, losses=losses)
        return *optimizer.update(direction, optimizer_state, point), rule_state, losses

    optimizer_state, rule_state = torch.vmap(init)(points)
    path, values = [points], []
    for _ in range(problem.steps if steps is None else steps):
        points, optimizer_state, rule_state, losses = torch.vmap(step)(points, optimizer_state, rule_state)
        path.append(points)
        values.append(losses)
    return Path(torch.stack(path), torch.stack([*values, torch.vmap(problem.losses)(points)]))


def quadratics(condition: float = 10.0) -> Problem:
    """Two convex quadratics, steep in different directions; the Pareto set is a curve between their minima.

    `losses_i = (x - c_i)' A_i (x - c_i) / 2` with `A_0 = diag(1, condition)`, `A_1 = diag(condition, 1)`; at the Pareto
    points `((1 - t) A_0 + t A_1) x = (1 - t) A_0 c_0 + t A_1 c_1` for t in [0, 1].

    Args:
        condition: the condition number of `A_0` and `A_1`; at least 1.

    Returns:
        `Problem`, with five starts.
    """
    domain = Domain(lambda x: 1 <= x < math.inf, "a finite number >= 1")
    check_number("condition", condition, domain, "With 1, the contours are circles.")
    curvatures = torch.tensor([[1.0, condition], [condition, 1.0]], dtype=torch.float64)
    minima = torch.tensor([[-1.0, -0.6], [1.0, 0.6]], dtype=torch.float64)

    def losses(point: Tensor) -> Tensor:
        return (curvatures.to(point) * (point - minima.to(point)).square()).sum(-1) / 2

    # More points at both ends, where the curve bends.
    t = torch.linspace(0, 1, 201, dtype=torch.float64).mul(math.pi).cos().mul(-0.5).add(0.5).unsqueeze(-1)
    weighted = torch.stack([1 - t, t]) * curvatures.unsqueeze(1)
    pareto = (weighted * minima.unsqueeze(1)).sum(0) / weighted.sum(0)
    starts = torch.tensor([[-1.6, 1.5], [1.7, 1.4], [1.7, -1.5], [-1.8, -1.4], [-0.4, 1.7]], dtype=torch.float64)
    window = torch.tensor([[-2.2, -2.0], [2.2, 2.0]], dtype=torch.float64)
    return Problem(losses, pareto, window, starts, sgd(0.3 / condition), 300)


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
        the starts, and the marker of the rule at the end of each path.

    Example:
        >>> from functional_jd.plotting import quadratics
        >>> ax = trajectories(quadratics(), {"mean": mean(), "upgrad": upgrad()})
    """
    check_type("problem", problem, Problem, "Call its builder: quadratics().")
    check_mapping("rules", rules, 'Pass for instance {"mean": mean()}.')
    for name, value in (("contours", contours), ("legend", legend)):
        check_flag(name, value)
    for rule in rules.values():
        if not isinstance(rule, Path):
            check_rule(rule)
    paths = {name: rule if isinstance(rule, Path) else descend(problem, rule) for name, rule in rules.items()}
    for name, path in paths.items():
        if path.points.ndim != 3 or path.points.shape[2] != 2:
            expected, cure = f"points [steps + 1, s, 2] in {name!r}", "Create paths with descend(problem, rule)."
            refuse("rules", expected, path.points, cure, ValueError)
    ax = axes_or_new(ax, (6.6, 4.6))
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
        _draw_path(ax, as_array(path.points), name, index)
    if legend:
        gray: dict[str, Any] = {"color": color, "alpha": 0.6, "linewidth": 0.8}
        kinds = [Line2D([], [], linestyle=line, label=f"loss {k}", **gray) for k, line in enumerate(LINES)]
        add_legend(ax, handles=[*ax.get_legend_handles_labels()[0], *(kinds if contours else [])])
    return ax


def _draw_path(ax: Ax, points: Array, name: str, index: int) -> None:
    style, width = look(index), max(1.2, 2.6 - 0.35 * index)
    style |= {"markevery": [-1], "markeredgecolor": text_color(ax), "markeredgewidth": 0.8}
    for number, path in enumerate(points.swapaxes(0, 1)):
        label = "_" if number else name
        ax.plot(*path.T, label=label, linewidth=width, markersize=max(5, 9 - index), zorder=4 + 0.01 * index, **style)


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
