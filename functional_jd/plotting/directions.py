"""A plot of the rows of a Jacobian: their dual cone, with the directions of rules."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from matplotlib.transforms import offset_copy
from mpl_toolkits.mplot3d.art3d import Poly3DCollection
from mpl_toolkits.mplot3d.proj3d import proj_transform
from torch import Tensor
from torch.nn.functional import pad

from functional_jd.aggregation.aggregate import Aggregator, aggregate, check_rule
from functional_jd.aggregation.views import loss_count
from functional_jd.aggregators.upgrad import upgrad
from functional_jd.core.arguments import check_mapping
from functional_jd.core.heads import rows_of
from functional_jd.core.names import names_or_indices, objective_names
from functional_jd.core.rows import row_count
from functional_jd.core.tree import tree_leaves
from functional_jd.core.types import Direction, Jacobian, Losses
from functional_jd.plotting.style import PALETTE, Array, Ax, as_array, axes_or_new, legend, look, quiet, text_color


def cone(
    jacobian: Jacobian,
    rules: Mapping[str, Aggregator] | None = None,
    ax: Ax | None = None,
    *,
    names: Sequence[str] | None = None,
    losses: Losses = None,
) -> Ax:
    """Plot the rows, their dual cone, their projections on it, and the direction of every rule.

    The dual cone is `{d : <g_i, d> >= 0 for all i}`. A descent step along a direction outside of it increases a loss.

    Args:
        jacobian: pytree with leaves `[m, *p]`, with two or three entries per row; or any with at most three rows, which
            are drawn, with their lengths and angles, in an orthonormal basis of their span that begins with the first
            row. With a `MultitaskJacobian`, `shared`.
        rules: a mapping from names to rules; rules that compare batches get the same Jacobian twice.
        ax: the axes to draw on, with a 3d projection for three dimensions; `None` creates a figure.
        names: one per row; `None` uses the keys of `losses`, if they are a dict.
        losses: the m values, for rules that look at them.

    Returns:
        The axes.

    Example:
        >>> ax = cone(torch.tensor([[3.0, 1.0], [-1.0, 1.0]]), {"mean": mean(), "upgrad": upgrad()})
    """
    jacobian, rules = rows_of(jacobian), {} if rules is None else rules
    m = row_count(jacobian)
    check_mapping("rules", rules, 'Pass for instance {"mean": mean()}.')
    if losses is not None and (found := loss_count(losses)) != m:
        raise ValueError(f"cone: losses must be {m}, one per row, found {found}. Pass those of the Jacobian.")
    flat = _flat(jacobian, 1)
    basis, space = _coordinates(flat)
    vectors: dict[str | None, Tensor] = {None: flat}
    for name, rule in rules.items():
        check_rule(rule)
        vectors[name] = _flat(aggregate(rule, jacobian, None, jacobian, losses=losses).direction, 0)
    for name, vector in vectors.items():
        if not vector.isfinite().all():
            raise ValueError(
                f"cone: expected finite values, found nan or inf in {name or 'the Jacobian'}. Check the losses first."
            )
        vectors[name] = vector @ basis
    rows = vectors.pop(None)
    if names is None:
        names = objective_names(losses) if isinstance(losses, Mapping) else [f"$g_{{{i}}}$" for i in range(m)]
    names = names_or_indices(names, m)
    # The projection of a row is the direction of upgrad with all preference on that row.
    preferences = torch.eye(m, dtype=rows.dtype, device=rows.device)
    projections = as_array(torch.stack([aggregate(upgrad(one), rows).direction for one in preferences]))
    ax = _cone_axes(ax, as_array(rows))
    _draw(ax, as_array(rows), projections, {str(name): as_array(tip) for name, tip in vectors.items()}, names)
    ax.set(**{f"{axis}label": f"{space} {k}" for k, axis in enumerate("xyz"[: rows.shape[1]])})
    return ax


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
            "Select some of the rows, or print all cosines: describe(diagnose(jacobian))."
        )
    Q, R = torch.linalg.qr(flat.mT)
    return pad(Q * torch.where(R.diagonal() < 0, -1.0, 1.0), (0, max(0, 2 - Q.shape[1]))), "span, axis"


def _cone_axes(ax: Ax | None, rows: Array) -> Ax:
    """Return the given or new axes, after checking their number of dimensions."""
    dimensions = rows.shape[1]
    ax = axes_or_new(ax, *(((6.4, 4.6), None) if dimensions == 2 else ((6.8, 4.8), "3d")))
    if (ax.name == "3d") != (dimensions == 3):
        call = 'plt.subplots(subplot_kw={"projection": "3d"})' if dimensions == 3 else "plt.subplots()"
        raise ValueError(
            f"cone: {dimensions} dimensions need axes of the same number, found axes of the projection {ax.name!r}. "
            f"Create them with {call}, or pass ax=None."
        )
    axes_3d: Any = ax
    if dimensions == 3 and (axes_3d.elev, axes_3d.azim) == (30, -60):  # matplotlib's default: the user set no view
        # The rows are well separated from 35 degrees off the middle between them.
        x, y, z = (rows / np.maximum(np.linalg.norm(rows, axis=1, keepdims=True), np.finfo(float).tiny)).sum(0)
        elevation = np.degrees(np.arctan2(z, np.hypot(x, y)))
        azimuth = np.degrees(np.arctan2(y, x))
        axes_3d.view_init(elev=elevation + (35 if elevation < 30 else -35), azim=azimuth + 15)
    return ax


def _draw(ax: Any, rows: Array, projections: Array, tips: dict[str, Array], names: list[str]) -> None:
    points = np.concatenate([rows, projections, *(tip[None] for tip in tips.values())])
    _set_limits(ax, points)
    max_length = np.linalg.norm(points, axis=1).max() or 1.0
    shade: dict[str, Any] = {"facecolor": PALETTE[2], "edgecolor": PALETTE[2], "label": "dual cone", "zorder": 1}
    if rows.shape[1] == 2:
        ax.fill(*_sector(rows, 3 * max_length).T, alpha=0.28, **shade)
    else:
        faces = _faces(rows, 0.9 * max_length)
        ax.add_collection3d(Poly3DCollection(faces, alpha=0.25, linewidth=0.8, **shade))
    for row, name in zip(rows, names, strict=True):
        _draw_row(ax, row, name)
    dotted: dict[str, Any] = {"linestyle": ":", "linewidth": 1.3, "marker": ".", "markevery": [1], "zorder": 5}
    outside = np.linalg.norm(projections - rows, axis=1) > 1e-9 * max_length
    for index, pair in enumerate(np.stack([rows, projections], 1)[outside]):
        ax.plot(*pair.T, color=text_color(ax), **dotted, label="_" if index else "projections")
    for index, (name, tip) in enumerate(tips.items()):
        # Each line is thinner than the one below, so that all of several equal directions are visible.
        size = max(1.2, 4.2 - 0.8 * index)
        style: dict[str, Any] = {"markevery": [1], "markersize": 5 + 1.6 * size, "markerfacecolor": "none"}
        segment = np.stack([np.zeros_like(tip), tip]).T
        ax.plot(*segment, label=name, linewidth=size, markeredgewidth=1.8, zorder=4, **style, **look(index))
    legend(ax)


def _draw_row(ax: Any, row: Array, name: str) -> None:
    """Draw an arrow, and its name at the tip, away from the arrow."""
    color, tip = text_color(ax), row
    if len(row) == 3:
        ax.quiver(0, 0, 0, *row, color=color, arrow_length_ratio=0.1, linewidth=1.6, zorder=3)
        xs, ys, zs = np.stack([row, np.zeros(3)], axis=1)
        xs, ys, _ = proj_transform(xs, ys, zs, ax.get_proj())
        tip = np.array([xs[0] - xs[1], ys[0] - ys[1]])  # in the figure, in the current view
    else:
        arrow = {"arrowstyle": "-|>", "color": color, "linewidth": 1.6, "shrinkA": 0, "shrinkB": 0}
        ax.annotate("", xy=row, xytext=(0, 0), arrowprops=arrow, zorder=3)
    length = np.linalg.norm(tip)
    x, y = tip / length if length else (-1, -1)
    style = {
        "ha": "left" if x > 0.4 else "right" if x < -0.4 else "center",
        "va": "bottom" if y > 0.4 else "top" if y < -0.4 else "center",
        "transform": offset_copy(ax.transData, ax.figure, 7 * x, 7 * y, units="points"),
    }
    ax.text(*row, name, color=color, fontsize="large", zorder=6, **style)


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
    """Return the corners `[k, 2]` of the part of a disc that lies in all half-planes with these normals."""
    bounds = np.arctan2(*normals.T[::-1]) + np.array([[np.pi / 2], [-np.pi / 2]])
    angles = np.sort(np.concatenate([np.linspace(0, 2 * np.pi, 180, endpoint=False), bounds.ravel() % (2 * np.pi)]))
    rays = radius * np.stack([np.cos(angles), np.sin(angles)], axis=1)
    inside = (rays @ normals.T >= -1e-12 * radius * np.abs(normals).max(1)).all(1)
    if inside.all():
        return rays
    first = np.flatnonzero(~inside)[0]  # what is inside follows one after the other
    return np.concatenate([np.zeros((1, 2)), np.roll(rays, -first, axis=0)[np.roll(inside, -first)]])
