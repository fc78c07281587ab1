"""The Pareto front of two losses."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from functional_jd.core.arguments import refuse
from functional_jd.core.names import names_or_indices
from functional_jd.fronts.points import knee, non_dominated
from functional_jd.fronts.train import Front
from functional_jd.plotting.style import Array, Ax, as_array, axes_or_new, check_points, legend, look, quiet, text_color


def front(
    points: Tensor | Mapping[str, Tensor] | Front,
    names: Sequence[str] | None = None,
    ax: Ax | None = None,
    *,
    reference: Tensor | None = None,
) -> Ax:
    """Plot points of two losses, and the front of the nondominated ones.

    Args:
        points: `[k, 2]`, losses; or a mapping from names to such sets, for instance one per rule, with a common front;
            or a `fronts.Front`, whose knee and ideal point, the least of each loss, are marked.
        names: the names of the two losses.
        ax: the axes to draw on; `None` creates a figure.
        reference: `[2]`, that of `fronts.hypervolume`, whose area is shaded.

    Returns:
        The axes: filled markers on the front, which is drawn as steps, hollow markers elsewhere.
    """
    groups = _checked_groups(points, reference)
    labels = names_or_indices(["loss 0", "loss 1"] if names is None else names, 2)
    together = torch.cat([group.detach().double().cpu() for group in groups.values()])
    on_front = non_dominated(together)
    ax = axes_or_new(ax, (6.0, 4.2))
    quiet(ax, xlabel=labels[0], ylabel=labels[1])
    color = text_color(ax)
    steps = as_array(together[on_front])
    steps = steps[np.lexsort((-steps[:, 1], steps[:, 0]))]
    ax.plot(*steps.T, color=color, alpha=0.6, linewidth=1.0, drawstyle="steps-post", label="front of the points")
    if reference is not None:
        _dominated_area(ax, steps, as_array(reference), color)
    masks = on_front.numpy()
    for index, (name, group) in enumerate(groups.items()):
        style: dict[str, Any] = {**look(index), "linestyle": "none", "markersize": 7}
        values, selected, masks = as_array(group), masks[: len(group)], masks[len(group) :]
        ax.plot(*values[~selected].T, **style, markerfacecolor="none", alpha=0.7)
        ax.plot(*values[selected].T, **style, label=name or "on the front")
    if isinstance(points, Front):
        mark: dict[str, Any] = {"linestyle": "none", "color": color}
        x, y = together[knee(together)].tolist()
        ax.plot(x, y, "o", **mark, markersize=14, markerfacecolor="none", label="knee")
        ax.plot(*steps.min(0), "*", **mark, markersize=11, label="ideal")
    legend(ax)
    return ax


def _checked_groups(points: Any, reference: Any) -> dict[str, Tensor]:
    losses = points.losses if isinstance(points, Front) else points
    groups: dict[str, Tensor] = dict(losses) if isinstance(losses, Mapping) else {"": losses}
    for name, group in groups.items():
        argument, shape = f"points {name!r}" if name else "points", "[k, 2], two losses each"
        cure = "Select two losses, points[:, [0, 2]]."
        check_points(argument, group, shape, lambda _, m: m == 2, cure)
    if not sum(map(len, groups.values())):
        raise ValueError("front: points must be at least one, found none. Pass losses [k, 2].")
    shaped = isinstance(reference, Tensor) and reference.shape == (2,)
    if reference is not None and (not shaped or reference.is_complex() or reference.isnan().any()):
        advice = "Pass that of hypervolume."
        refuse("reference", "a tensor [2], the worst losses that count", reference, advice, ValueError)
    return groups


def _dominated_area(ax: Ax, steps: Array, reference: Array, color: Any) -> None:
    """Mark the reference, and shade what the front, in the order of its first losses, dominates up to it."""
    inside = steps[(steps < reference).all(1)]
    if len(inside):
        across = np.append(inside[:, 0], reference[0])
        below = np.append(inside[:, 1], inside[-1, 1])
        ax.fill_between(across, below, reference[1], step="post", color=color, alpha=0.08, linewidth=0)
    ax.plot(*reference.reshape(2, 1), color=color, linestyle="none", marker="x", markersize=9, label="reference")
