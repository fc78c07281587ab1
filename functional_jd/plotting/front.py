"""The Pareto front of losses."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from functional_jd.core.arguments import refuse
from functional_jd.core.names import names_or_indices
from functional_jd.fronts import Front, knee, non_dominated
from functional_jd.plotting.style import Array, Ax, as_array, axes_or_new, check_points, legend, look, quiet, text_color


def front(
    points: Tensor | Mapping[str, Tensor] | Front,
    names: Sequence[str] | None = None,
    ax: Ax | None = None,
    *,
    known: Tensor | None = None,
    reference: Tensor | None = None,
) -> Ax:
    """Plot points of two losses, and the front of the nondominated ones.

    Args:
        points: `[k, 2]`, losses; or a mapping from names to such sets, for instance one per rule, with a common front;
            or a `fronts.Front`, whose knee and ideal point, the least of each loss, are marked.
        names: the names of the two losses.
        ax: the axes to draw on; `None` creates a figure. The legend stands beside them: make a figure of several axes
            with `layout="constrained"`.
        known: `[j, 2]`, the true front in order, if it is known: `problem.losses` at the points of
            `problem.pareto`.
        reference: `[2]`, that of `fronts.hypervolume`, whose area is shaded.

    Returns:
        The axes: filled markers on the front, which is drawn as steps, hollow markers elsewhere.

    Raises:
        ValueError: points whose shape is not `[k, 2]`, no points, a reference that is not `[2]`, or the wrong number of
            names. Three losses and more: `parallel`.
    """
    chosen = points.losses[knee(points.losses)] if isinstance(points, Front) else None
    points = points.losses if isinstance(points, Front) else points
    groups = dict(points) if isinstance(points, Mapping) else {"": points}
    for name, group in {**groups, **({} if known is None else {"known": known})}.items():
        check_points("front", "points", group)
        if group.ndim != 2 or group.shape[1] != 2:
            raise ValueError(
                f"front: expected points [k, 2], two losses each, found shape {list(group.shape)}"
                f"{f' in {name!r}' if name else ''}. Select two losses, points[:, [0, 2]], or draw all with parallel."
            )
    labels = names_or_indices(["loss 0", "loss 1"] if names is None else names, 2, "front")
    together = torch.cat([group.detach().double().cpu() for group in groups.values()] or [torch.empty(0, 2)])
    if not len(together):
        raise ValueError("front: expected at least one point, found none. Pass losses [k, 2].")
    if reference is not None and not _is_point(reference):
        advice = "Pass that of hypervolume."
        refuse("front", "reference", "a tensor [2], the worst losses that count", reference, advice, ValueError)
    on_front = non_dominated(together)
    ax = axes_or_new("front", ax, (6.0, 4.2))
    quiet(ax, xlabel=labels[0], ylabel=labels[1])
    color = text_color(ax)
    if known is not None:
        ax.plot(*as_array(known).T, color=color, linewidth=6, alpha=0.2, solid_capstyle="round", label="true front")
    steps = as_array(together[on_front])
    steps = steps[np.lexsort((-steps[:, 1], steps[:, 0]))]
    ax.plot(*steps.T, color=color, alpha=0.6, linewidth=1.0, drawstyle="steps-post", label="front of the points")
    if reference is not None:
        _dominated_area(ax, steps, as_array(reference), color)
    masks = on_front.split([len(group) for group in groups.values()])
    for index, ((name, group), mask) in enumerate(zip(groups.items(), masks, strict=True)):
        style: dict[str, Any] = {**look(index), "linestyle": "none", "markersize": 7}
        values, selected = as_array(group), mask.numpy()
        ax.plot(*values[~selected].T, **style, markerfacecolor="none", alpha=0.7)
        ax.plot(*values[selected].T, **style, label=name or "on the front")
    if chosen is not None:
        mark: dict[str, Any] = {"linestyle": "none", "color": color}
        ring: dict[str, Any] = {**mark, "marker": "o", "markersize": 14, "markerfacecolor": "none"}
        ax.plot(*as_array(chosen.reshape(1, 2)).T, **ring, label="knee")
        ax.plot(*as_array(together[on_front].amin(0, keepdim=True)).T, **mark, marker="*", markersize=11, label="ideal")
    legend(ax)
    return ax


def _is_point(given: Any) -> bool:
    shaped = isinstance(given, Tensor) and given.shape == (2,)
    return shaped and not given.is_complex() and not bool(given.isnan().any())


def _dominated_area(ax: Ax, steps: Array, reference: Array, color: Any) -> None:
    """Mark the reference, and shade what the front, in the order of its first losses, dominates up to it."""
    inside = steps[(steps < reference).all(1)]
    if len(inside):
        across = np.append(inside[:, 0], reference[0])
        below = np.append(inside[:, 1], inside[-1, 1])
        ax.fill_between(across, below, reference[1], step="post", color=color, alpha=0.08, linewidth=0)
    ax.plot(*reference.reshape(2, 1), color=color, linestyle="none", marker="x", markersize=9, label="reference")
