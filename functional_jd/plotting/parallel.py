"""Many losses of many solutions: parallel coordinates."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from functional_jd.core.names import names_or_indices
from functional_jd.fronts import Front, knee, non_dominated
from functional_jd.plotting.style import PALETTE, Ax, as_array, axes_or_new, check_points, legend, quiet, text_color


def parallel(points: Tensor | Front, names: Sequence[str] | None = None, ax: Ax | None = None) -> Ax:
    """Plot solutions of any number of losses: a line for each, through its losses side by side.

    Each loss is drawn between the least and the largest that it has on the front, 0 and 1. Where lines cross between
    two losses, these are in conflict.

    Args:
        points: `[k, m]`, losses; or a `fronts.Front`.
        names: the names of the losses.
        ax: the axes to draw on; `None` creates a figure. The legend stands beside them: make a figure of several axes
            with `layout="constrained"`.

    Returns:
        The axes: full lines for solutions on the front, the knee among them thick, faint and dashed ones for the
        others. A line has a gap where a loss is not finite.

    Raises:
        ValueError: points whose shape is not `[k, m]`, with two losses or more; no points; the wrong number of names.
    """
    points = points.losses if isinstance(points, Front) else points
    check_points("parallel", "points", points)
    if points.ndim != 2 or points.shape[1] < 2 or not len(points):
        raise ValueError(
            f"parallel: expected points [k, m], two losses or more each, found shape {list(points.shape)}. Stack the "
            "losses of k points."
        )
    m = points.shape[1]
    labels = names_or_indices([f"loss {i}" for i in range(m)] if names is None else names, m, "parallel")
    points = points.detach().double().cpu()
    on_front, chosen = non_dominated(points), int(knee(points))
    low = torch.where(on_front.unsqueeze(1), points, torch.inf).amin(0)
    width = torch.where(on_front.unsqueeze(1), points, -torch.inf).amax(0) - low
    heights = as_array((points - low) / torch.where(width > 0, width, 1))
    ax = axes_or_new("parallel", ax, (6.0, 4.2))
    quiet(ax, ylabel="from the least to the largest on the front")
    ax.set_xticks(range(m), labels)
    named: set[str] = set()
    # What matters most is drawn last.
    for k in sorted(range(len(points)), key=lambda k: (bool(on_front[k]), k == chosen)):
        label, style = _line(ax, on_front=bool(on_front[k]), is_knee=k == chosen)
        ax.plot(range(m), heights[k], **style, label="_" if label in named else label)
        named.add(label)
    legend(ax)
    return ax


def _line(ax: Ax, *, on_front: bool, is_knee: bool) -> tuple[str, dict[str, Any]]:
    """The name and the look of a solution's line."""
    if not on_front:
        return "dominated", {"color": text_color(ax), "alpha": 0.35, "linestyle": "--", "linewidth": 1.0}
    if is_knee:
        return "knee", {"color": PALETTE[3], "linewidth": 3.0, "marker": "o", "markersize": 6}
    return "on the front", {"color": PALETTE[0], "alpha": 0.7, "linewidth": 1.3, "marker": "o", "markersize": 4}
