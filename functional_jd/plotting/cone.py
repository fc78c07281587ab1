"""Plots of the dual cone: the rows, the directions without conflict, and the directions of rules."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from matplotlib.ticker import MaxNLocator
from matplotlib.transforms import offset_copy
from mpl_toolkits.mplot3d.proj3d import proj_transform
from torch import Tensor

from functional_jd.aggregation.aggregate import Aggregator, aggregate, check_rule
from functional_jd.aggregation.views import loss_count
from functional_jd.aggregators.upgrad import upgrad
from functional_jd.core.arguments import check_flag, check_mapping
from functional_jd.core.heads import rows_of
from functional_jd.core.names import names_or_indices, objective_names
from functional_jd.core.rows import row_count
from functional_jd.core.tree import tree_leaves
from functional_jd.core.types import Direction, Jacobian, Losses
from functional_jd.plotting.style import (
    PALETTE,
    Array,
    Ax,
    as_array,
    axes_or_new,
    check_axes,
    legend,
    look,
    quiet,
    text_color,
)

CONE_COLOR = PALETTE[2]


def cone(
    jacobian: Jacobian,
    rules: Mapping[str, Aggregator] | None = None,
    ax: Ax | None = None,
    *,
    names: Sequence[str] | None = None,
    losses: Losses = None,
    unit: bool = False,
) -> Ax:
    """Plot the rows, their dual cone, their projections on it, and the direction of every rule.

    The dual cone is `{d : <g_i, d> >= 0 for all i}`. A descent step along a direction outside of it increases a loss.

    Args:
        jacobian: pytree with leaves `[m, *p]`, with two or three entries per row; or any with at most three rows, which
            are drawn, with their lengths and angles, in an orthonormal basis of their span that begins with the first
            row. Of a `MultitaskJacobian`, `shared`.
        rules: a mapping from names to rules; rules that compare batches get the same Jacobian twice.
        ax: the axes to draw on, with a 3d projection for three dimensions; `None` creates a figure. The legend stands
            beside them: make a figure of several axes with `layout="constrained"`.
        names: one per row; `None` uses the keys of `losses`, if they are a dict.
        losses: the m values, for rules that look at them.
        unit: whether to draw all vectors with length 1.

    Returns:
        The axes.

    Raises:
        ValueError: more than three dimensions, values that are not finite, or axes or names that do not match.

    Example:
        >>> ax = cone(torch.tensor([[3.0, 1.0], [-1.0, 1.0]]), {"mean": mean(), "upgrad": upgrad()})
    """
    jacobian = rows_of(jacobian)
    m = row_count(jacobian, "cone")
    _check_rules(rules, losses, m)
    check_flag("cone", "unit", unit)
    flat = _flat(jacobian, 1)
    basis, space = _coordinates(flat)
    rows = flat @ basis
    directions = {
        name: _flat(aggregate(rule, jacobian, None, jacobian, losses=losses).direction, 0) @ basis
        for name, rule in (rules or {}).items()
    }
    for name, vectors in {"the Jacobian": rows, **directions}.items():
        if not vectors.isfinite().all():
            raise ValueError(f"cone: expected finite values, found nan or inf in {name}. Check the losses first.")
    if unit:
        rows, directions = _normalized(rows), {name: _normalized(direction) for name, direction in directions.items()}
    if names is None and isinstance(losses, Mapping):
        names = objective_names(losses)
    if names is None:
        names = [f"$g_{{{i}}}$" for i in range(len(rows))]
    names = names_or_indices(names, len(rows), "cone")
    ax = _cone_axes(ax, as_array(rows))
    tips = {name: as_array(direction) for name, direction in directions.items()}
    _draw(ax, as_array(rows), as_array(_projections(rows)), tips, names)
    ax.set(**{f"{axis}label": f"{space} {k}" for k, axis in enumerate("xyz"[: rows.shape[1]])})
    return ax


def _check_rules(rules: Any, losses: Any, m: int) -> None:
    if rules is not None:
        check_mapping("cone", "rules", rules, 'Pass for instance {"mean": mean()}.')
        for rule in rules.values():
            check_rule(rule, "cone")
    if losses is not None and (found := loss_count(losses, "cone")) != m:
        raise ValueError(f"cone: expected one loss per row, {m} in all, found {found}. Pass those of the Jacobian.")


def _flat(tree: Jacobian | Direction, rows: int) -> Tensor:
    """Concatenate all leaves: `[m, n]` if `rows` is 1, the number of dimensions of the rows, and `[n]` if it is 0."""
    leaves = [leaf.unsqueeze(-1) if leaf.ndim < 2 else leaf for leaf in tree_leaves(tree)]
    return torch.cat([leaf.detach().double().flatten(rows) for leaf in leaves], dim=rows)


def _coordinates(flat: Tensor) -> tuple[Tensor, str]:
    """Return a matrix `[n, 2 or 3]` that maps rows to the coordinates of the plot, and the name of its axes."""
    m, n = flat.shape
    if n in (2, 3):
        return torch.eye(n, dtype=flat.dtype, device=flat.device), "entry"
    if m > 3 and n > 3:
        raise ValueError(
            f"cone: expected rows of two or three entries, or at most three rows, found {m} rows of {n} entries. "
            "Select some of the rows, or plot their cosines: heatmap(cosines)."
        )
    Q, R = torch.linalg.qr(flat.mT)
    signs = torch.where(R.diagonal() < 0, -1.0, 1.0)
    return torch.nn.functional.pad(Q * signs, (0, max(0, 2 - Q.shape[1]))), "span, axis"


def _normalized(vectors: Tensor) -> Tensor:
    norms = vectors.norm(dim=-1, keepdim=True)
    return torch.where(norms > 0, vectors / norms, 0)


def _projections(rows: Tensor) -> Tensor:
    """Return the projection of every row on the dual cone: the direction of upgrad with all preference on that row."""
    preferences = torch.eye(len(rows), dtype=rows.dtype, device=rows.device)
    return torch.stack([aggregate(upgrad(preference), rows).direction for preference in preferences])


def _cone_axes(ax: Ax | None, rows: Array) -> Ax:
    """Return the given or new axes, after checking their number of dimensions."""
    dimensions = rows.shape[1]
    if ax is None:
        ax = axes_or_new("cone", None, *(((6.4, 4.6), None) if dimensions == 2 else ((6.8, 4.8), "3d")))
    check_axes("cone", ax)
    if (ax.name == "3d") != (dimensions == 3):
        call = 'plt.subplots(subplot_kw={"projection": "3d"})' if dimensions == 3 else "plt.subplots()"
        raise ValueError(
            f"cone: {dimensions} dimensions need axes of as many, found axes of the projection {ax.name!r}. "
            f"Create them with {call}, or pass ax=None."
        )
    axes_3d: Any = ax
    if dimensions == 3 and (axes_3d.elev, axes_3d.azim) == (30, -60):  # matplotlib's default: the user set no view
        _set_view(axes_3d, rows)
    return ax


def _set_view(ax: Any, rows: Array) -> None:
    """Set a view in which the rows are well separated, 35 degrees off the middle between them."""
    middle = (rows / np.maximum(np.linalg.norm(rows, axis=1, keepdims=True), np.finfo(float).tiny)).sum(0)
    azimuth = np.degrees(np.arctan2(middle[1], middle[0]))
    elevation = np.degrees(np.arctan2(middle[2], np.hypot(middle[0], middle[1])))
    ax.view_init(elev=elevation + (35 if elevation < 30 else -35), azim=azimuth + 15)


def _draw(ax: Any, rows: Array, projections: Array, tips: dict[str, Array], names: list[str]) -> None:
    points = np.concatenate([rows, projections, *(tip[None] for tip in tips.values())])
    _set_limits(ax, points)
    max_length = np.linalg.norm(points, axis=1).max() or 1.0
    if rows.shape[1] == 2:
        _draw_cone_2d(ax, rows, 3 * max_length)
    else:
        _draw_cone_3d(ax, rows, 0.9 * max_length)
    _draw_rows(ax, rows, names)
    _draw_projections(ax, rows, projections, max_length)
    for index, (name, tip) in enumerate(tips.items()):
        # Each line is thinner than the one below, so that all of several equal directions are visible.
        size = max(1.2, 4.2 - 0.8 * index)
        segment = np.stack([np.zeros_like(tip), tip])
        style: dict[str, Any] = {"markevery": [1], "markersize": 5 + 1.6 * size, "markerfacecolor": "none"}
        ax.plot(*segment.T, label=name, linewidth=size, markeredgewidth=1.8, zorder=4, **style, **look(index))
    legend(ax)


def _draw_rows(ax: Any, rows: Array, names: list[str]) -> None:
    color = text_color(ax)
    for row, name in zip(rows, names, strict=True):
        if len(row) == 3:
            ax.quiver(0, 0, 0, *row, color=color, arrow_length_ratio=0.1, linewidth=1.6, zorder=3)
            style, offset = _label_style_and_offset(_projected_to_figure(ax, row))
            transform = offset_copy(ax.transData, ax.figure, *offset, units="points")
            ax.text(*row, name, color=color, transform=transform, zorder=6, **style)
            continue
        arrow = {"arrowstyle": "-|>", "color": color, "linewidth": 1.6, "shrinkA": 0, "shrinkB": 0}
        ax.annotate("", xy=row, xytext=(0, 0), arrowprops=arrow, zorder=3)
        style, offset = _label_style_and_offset(row)
        ax.annotate(name, xy=row, xytext=offset, textcoords="offset points", color=color, **style)


def _label_style_and_offset(arrow: Array) -> tuple[dict[str, Any], tuple[float, float]]:
    """Return the alignment of the label at the tip of an arrow, away from the arrow, and its offset in points."""
    length = np.linalg.norm(arrow)
    x, y = arrow / length if length else (-1, -1)
    horizontal = "left" if x > 0.4 else "right" if x < -0.4 else "center"
    vertical = "bottom" if y > 0.4 else "top" if y < -0.4 else "center"
    return {"ha": horizontal, "va": vertical, "fontsize": "large"}, (7 * x, 7 * y)


def _projected_to_figure(ax: Any, row: Array) -> Array:
    """Return the direction in the figure of an arrow from the origin, in the current view."""
    xs, ys, zs = np.stack([row, np.zeros(3)], axis=1)
    (x, x0), (y, y0), _ = proj_transform(xs, ys, zs, ax.get_proj())
    return np.array([x - x0, y - y0])


def _draw_projections(ax: Any, rows: Array, projections: Array, max_length: float) -> None:
    """Draw a line from the tip of every row outside of the dual cone to its projection."""
    outside = np.linalg.norm(projections - rows, axis=1) > 1e-9 * max_length
    style: dict[str, Any] = {"linestyle": ":", "linewidth": 1.3, "marker": ".", "markevery": [1], "zorder": 5}
    for index, (row, projection) in enumerate(zip(rows[outside], projections[outside], strict=True)):
        label = {"label": "projections"} if not index else {}
        ax.plot(*np.stack([row, projection]).T, color=text_color(ax), **style, **label)


def _set_limits(ax: Any, points: Array) -> None:
    points = np.concatenate([points, np.zeros((1, points.shape[1]))])
    middle = (points.max(0) + points.min(0)) / 2
    half = (0.7 if points.shape[1] == 2 else 0.6) * (points.max(0) - points.min(0)).max() or 1.0
    for axis, center in zip("xyz", middle, strict=False):
        ax.set(**{f"{axis}lim": (center - half, center + half)})
    if points.shape[1] == 2:
        quiet(ax)
        ax.set_aspect("equal")
        ax.axhline(0, color=text_color(ax), alpha=0.35, linewidth=0.8)
        ax.axvline(0, color=text_color(ax), alpha=0.35, linewidth=0.8)
        return
    ax.set_box_aspect((1, 1, 1), zoom=0.92)
    ax.computed_zorder = False  # draws the arrows above the faces of the cone
    for axis in (ax.xaxis, ax.yaxis, ax.zaxis):
        axis.set_pane_color((0, 0, 0, 0))
        axis.set_major_locator(MaxNLocator(5, steps=[1, 2, 5, 10]))
        axis.labelpad = 8
        axis._axinfo["grid"].update(color=(0.5, 0.5, 0.5, 0.3), linewidth=0.6)  # there is no public API for the grid


def _draw_cone_2d(ax: Ax, rows: Array, radius: float) -> None:
    corners = _sector(rows, radius)
    ax.fill(*corners.T, facecolor=CONE_COLOR, alpha=0.28, edgecolor=CONE_COLOR, zorder=1, label="dual cone")


def _draw_cone_3d(ax: Any, rows: Array, radius: float) -> None:
    from mpl_toolkits.mplot3d.art3d import Poly3DCollection

    style: dict[str, Any] = {"facecolor": CONE_COLOR, "alpha": 0.25, "edgecolor": CONE_COLOR, "linewidth": 0.8}
    ax.add_collection3d(Poly3DCollection(_faces(rows, radius), label="dual cone", zorder=1, **style))


def _faces(rows: Array, radius: float) -> list[Array]:
    """Return the faces of the dual cone, each `[k, 3]`, truncated at a radius: one for every row that bounds it."""
    faces: list[Array] = []
    for index, row in enumerate(rows):
        if not row.any():
            continue
        plane = np.linalg.svd(row[None])[2][1:]
        corners = _sector(np.delete(rows, index, axis=0) @ plane.T, radius)
        if len(corners) > 2:
            faces.append(corners @ plane)
    return faces


def _sector(normals: Array, radius: float) -> Array:
    """Return the corners `[k, 2]` of a disc clipped to the half-planes with these normals (Sutherland-Hodgman)."""
    angles = np.linspace(0, 2 * np.pi, 180, endpoint=False)
    corners = radius * np.stack([np.cos(angles), np.sin(angles)], axis=1)
    for normal in normals:
        distances = corners @ normal
        distances[np.abs(distances) <= 1e-12 * np.abs(normal).max() * radius] = 0
        clipped: list[Array] = []
        for k in range(len(corners)):
            current, previous = distances[k], distances[k - 1]
            if current * previous < 0:
                clipped.append(corners[k - 1] + (corners[k] - corners[k - 1]) * previous / (previous - current))
            if current >= 0:
                clipped.append(corners[k])
        corners = np.array(clipped).reshape(-1, 2)
    return corners
