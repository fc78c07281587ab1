"""The cone picture: the rows, the directions that conflict with none of them, and what the rules make of them."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from matplotlib.ticker import MaxNLocator
from matplotlib.transforms import offset_copy
from mpl_toolkits.mplot3d.proj3d import proj_transform
from torch import Tensor

from functional_jd.aggregation.aggregate import Aggregator, aggregate
from functional_jd.aggregators.upgrad import upgrad
from functional_jd.core.multitask import rows_of
from functional_jd.core.names import names_or_indices, objective_names
from functional_jd.core.tree import row_count, tree_leaves
from functional_jd.core.types import Direction, Jacobian, Losses
from functional_jd.plotting.style import PALETTE, Array, Ax, axes, ink, legend, look, numbers, quiet

SHADE = PALETTE[2]


def cone(
    jacobian: Jacobian,
    rules: Mapping[str, Aggregator] | None = None,
    ax: Ax | None = None,
    *,
    names: Sequence[str] | None = None,
    losses: Losses = None,
    unit: bool = False,
) -> Ax:
    """Draw the rows, their dual cone, the rows' projections on it, and the direction of every rule.

    The dual cone is `{d : <g_i, d> >= 0 for all i}`: a direction outside it, followed downhill, makes a loss worse.

    Args:
        jacobian: pytree with leaves `[m, *p]` of two or three entries a row; or any with at most three rows, which are
            drawn, as long and with the angles that they have, in coordinates of their span: the first along the first
            axis. Of a `MultitaskJacobian`, `shared`.
        rules: name and rule; those that compare batches see the same Jacobian twice.
        ax: the axes to draw on, of a 3d projection for three dimensions; `None` makes a figure.
        names: one per row; `None` takes the keys of `losses`, if they are a dict.
        losses: the m values, for the rules that look at them.
        unit: draw everything with length 1: where it points, not how far.

    Returns:
        The axes.

    Raises:
        ValueError: more than three dimensions, numbers that are not finite, axes or names that do not fit.

    Example:
        >>> cone(torch.tensor([[3.0, 1.0], [-1.0, 1.0]]), {"mean": mean(), "upgrad": upgrad()})
    """
    jacobian = rows_of(jacobian)
    row_count(jacobian, "cone")
    flat = _flat(jacobian, 1)
    basis, space = _coordinates(flat)
    rows = flat @ basis
    directions = {
        name: _flat(aggregate(rule, jacobian, None, jacobian, losses=losses).direction, 0) @ basis
        for name, rule in (rules or {}).items()
    }
    for name, vectors in {"the Jacobian": rows, **directions}.items():
        if not vectors.isfinite().all():
            raise ValueError(f"cone: expected finite numbers, found others in {name}. Look at the losses first.")
    if unit:
        rows, directions = _unit(rows), {name: _unit(direction) for name, direction in directions.items()}
    if names is None and isinstance(losses, Mapping):
        names = objective_names(losses)
    if names is None:
        names = [f"$g_{{{i}}}$" for i in range(len(rows))]
    names = names_or_indices(names, len(rows), "cone")
    ax = _canvas(ax, numbers(rows))
    tips = {name: numbers(direction) for name, direction in directions.items()}
    _draw(ax, numbers(rows), numbers(_projections(rows)), tips, names)
    ax.set(**{f"{axis}label": f"{space} {k}" for k, axis in enumerate("xyz"[: rows.shape[1]])})
    return ax


def _flat(tree: Jacobian | Direction, rows: int) -> Tensor:
    """All leaves side by side, `[m, n]` for one dimension of rows, else `[n]`."""
    return torch.cat([leaf.detach().double().flatten(rows) for leaf in map(_raised, tree_leaves(tree))], dim=rows)


def _raised(leaf: Tensor) -> Tensor:
    return leaf.unsqueeze(-1) if leaf.ndim < 2 else leaf


def _coordinates(flat: Tensor) -> tuple[Tensor, str]:
    """A matrix `[n, 2 or 3]` that takes rows into the picture, and what its axes are called."""
    m, n = flat.shape
    if n in (2, 3):
        return torch.eye(n, dtype=flat.dtype, device=flat.device), "entry"
    if m > 3 and n > 3:
        raise ValueError(
            f"cone: expected rows of two or three entries, or at most three rows, found {m} rows of {n} entries. "
            "Pick some of the rows, or draw their cosines: heatmap(cosines)."
        )
    Q, R = torch.linalg.qr(flat.mT)
    signs = torch.where(R.diagonal() < 0, -1.0, 1.0)
    return torch.nn.functional.pad(Q * signs, (0, max(0, 2 - Q.shape[1]))), "span, axis"


def _unit(vectors: Tensor) -> Tensor:
    norms = vectors.norm(dim=-1, keepdim=True)
    return torch.where(norms > 0, vectors / norms, 0)


def _projections(rows: Tensor) -> Tensor:
    """Every row's nearest point in the dual cone: what upgrad makes of a preference for that row alone."""
    chosen = torch.eye(len(rows), dtype=rows.dtype, device=rows.device)
    return torch.stack([aggregate(upgrad(preference), rows).direction for preference in chosen])


def _canvas(ax: Ax | None, rows: Array) -> Ax:
    dimensions = rows.shape[1]
    if ax is None:
        ax = axes(None, (6.4, 4.6), None) if dimensions == 2 else axes(None, (6.8, 4.8), "3d")
    if (ax.name == "3d") != (dimensions == 3):
        needed = 'plt.subplots(subplot_kw={"projection": "3d"})' if dimensions == 3 else "plt.subplots()"
        raise ValueError(
            f"cone: {dimensions} dimensions need axes of as many, found axes of the projection {ax.name!r}. "
            f"Make them with {needed}, or hand over none."
        )
    view: Any = ax
    if dimensions == 3 and (view.elev, view.azim) == (30, -60):  # untouched
        _look_into_the_cone(view, rows)
    return ax


def _look_into_the_cone(ax: Any, rows: Array) -> None:
    """From where the rows stand apart, a little above the middle between them."""
    middle = (rows / np.maximum(np.linalg.norm(rows, axis=1, keepdims=True), np.finfo(float).tiny)).sum(0)
    azimuth = np.degrees(np.arctan2(middle[1], middle[0]))
    height = np.degrees(np.arctan2(middle[2], np.hypot(middle[0], middle[1])))
    ax.view_init(elev=height + (35 if height < 30 else -35), azim=azimuth + 15)


def _draw(ax: Any, rows: Array, projections: Array, tips: dict[str, Array], names: list[str]) -> None:
    points = np.concatenate([rows, projections, *(tip[None] for tip in tips.values())])
    _window(ax, points)
    reach = np.linalg.norm(points, axis=1).max() or 1.0
    if rows.shape[1] == 2:
        _shade_plane(ax, rows, 3 * reach)
    else:
        _shade_space(ax, rows, 0.9 * reach)
    _draw_rows(ax, rows, names)
    _draw_projections(ax, rows, projections, reach)
    for index, (name, tip) in enumerate(tips.items()):
        # Ever thinner, so that directions that coincide all show.
        size = max(1.2, 4.2 - 0.8 * index)
        ends = np.stack([np.zeros_like(tip), tip])
        style: dict[str, Any] = {"markevery": [1], "markersize": 5 + 1.6 * size, "markerfacecolor": "none"}
        ax.plot(*ends.T, label=name, linewidth=size, markeredgewidth=1.8, zorder=4, **style, **look(index))
    legend(ax)


def _draw_rows(ax: Any, rows: Array, names: list[str]) -> None:
    for row, name in zip(rows, names, strict=True):
        if len(row) == 3:
            ax.quiver(0, 0, 0, *row, color=ink(ax), arrow_length_ratio=0.1, linewidth=1.6, zorder=3)
            place, (right, up) = _beside(_seen(ax, row))
            moved = offset_copy(ax.transData, ax.figure, right, up, units="points")
            ax.text(*row, name, color=ink(ax), transform=moved, zorder=6, **place)
            continue
        arrow = {"arrowstyle": "-|>", "color": ink(ax), "linewidth": 1.6, "shrinkA": 0, "shrinkB": 0}
        ax.annotate("", xy=row, xytext=(0, 0), arrowprops=arrow, zorder=3)
        place, beside = _beside(row)
        ax.annotate(name, xy=row, xytext=beside, textcoords="offset points", color=ink(ax), **place)


def _beside(arrow: Array) -> tuple[dict[str, Any], tuple[float, float]]:
    """How to set a name at the tip of an arrow, and how many points away: names grow away from the arrow."""
    length = np.linalg.norm(arrow)
    x, y = arrow / length if length else (-1, -1)
    side = "left" if x > 0.4 else "right" if x < -0.4 else "center"
    place = {"ha": side, "va": "bottom" if y > 0.4 else "top" if y < -0.4 else "center", "fontsize": "large"}
    return place, (7 * x, 7 * y)


def _seen(ax: Any, row: Array) -> Array:
    """Where an arrow from the origin points on the sheet, from where it is looked at now."""
    xs, ys, zs = np.stack([row, np.zeros(3)], axis=1)
    (x, x0), (y, y0), _ = proj_transform(xs, ys, zs, ax.get_proj())
    return np.array([x - x0, y - y0])


def _draw_projections(ax: Any, rows: Array, projections: Array, reach: float) -> None:
    """From the tip of every row that conflicts to its projection."""
    moved = np.linalg.norm(projections - rows, axis=1) > 1e-9 * reach
    for index, (row, projection) in enumerate(zip(rows[moved], projections[moved], strict=True)):
        label = {"label": "projections"} if not index else {}
        pair = np.stack([row, projection])
        ax.plot(*pair.T, color=ink(ax), linestyle=":", linewidth=1.3, marker=".", markevery=[1], zorder=5, **label)


def _window(ax: Any, points: Array) -> None:
    points = np.concatenate([points, np.zeros((1, points.shape[1]))])
    middle = (points.max(0) + points.min(0)) / 2
    half = (0.7 if points.shape[1] == 2 else 0.6) * (points.max(0) - points.min(0)).max() or 1.0
    for axis, center in zip("xyz", middle, strict=False):
        ax.set(**{f"{axis}lim": (center - half, center + half)})
    if points.shape[1] == 2:
        quiet(ax)
        ax.set_aspect("equal")
        ax.axhline(0, color=ink(ax), alpha=0.35, linewidth=0.8)
        ax.axvline(0, color=ink(ax), alpha=0.35, linewidth=0.8)
        return
    ax.set_box_aspect((1, 1, 1), zoom=0.92)
    ax.computed_zorder = False  # arrows show through the faces of the cone
    for axis in (ax.xaxis, ax.yaxis, ax.zaxis):
        axis.set_pane_color((0, 0, 0, 0))
        axis.set_major_locator(MaxNLocator(5, steps=[1, 2, 5, 10]))
        axis.labelpad = 8
        axis._axinfo["grid"].update(color=(0.5, 0.5, 0.5, 0.3), linewidth=0.6)  # there is no public way


def _shade_plane(ax: Ax, rows: Array, radius: float) -> None:
    corners = _sector(rows, radius)
    ax.fill(*corners.T, facecolor=SHADE, alpha=0.28, edgecolor=SHADE, zorder=1, label="dual cone")


def _shade_space(ax: Any, rows: Array, radius: float) -> None:
    from mpl_toolkits.mplot3d.art3d import Poly3DCollection

    shade: dict[str, Any] = {"facecolor": SHADE, "alpha": 0.25, "edgecolor": SHADE, "linewidth": 0.8, "zorder": 1}
    ax.add_collection3d(Poly3DCollection(_faces(rows, radius), label="dual cone", **shade))


def _faces(rows: Array, radius: float) -> list[Array]:
    """The faces of the dual cone, each `[k, 3]`, cut off at a distance: one for every row that bounds it."""
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
    """The corners `[k, 2]` of a disc, less what lies on the wrong side of the lines through its middle."""
    angles = np.linspace(0, 2 * np.pi, 180, endpoint=False)
    corners = radius * np.stack([np.cos(angles), np.sin(angles)], axis=1)
    for normal in normals:
        heights = corners @ normal
        heights[np.abs(heights) <= 1e-12 * np.abs(normal).max() * radius] = 0
        kept: list[Array] = []
        for k in range(len(corners)):
            here, before = heights[k], heights[k - 1]
            if here * before < 0:
                kept.append(corners[k - 1] + (corners[k] - corners[k - 1]) * before / (before - here))
            if here >= 0:
                kept.append(corners[k])
        corners = np.array(kept).reshape(-1, 2)
    return corners
