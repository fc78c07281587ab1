"""The Pareto front of losses."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from functional_jd.core.names import names_or_indices
from functional_jd.plotting.style import Ax, axes, ink, legend, look, numbers, quiet


def nondominated(points: Tensor) -> Tensor:
    """Which points no other one beats.

    `p` beats `q` if `p_i <= q_i` for all i, and `p_i < q_i` for some.

    Args:
        points: `[k, m]`, losses: less is better.

    Returns:
        bool `[k]`. Equal points do not beat each other; a point that is not finite is beaten.

    Laws:
        Follows a permutation of the points, and of the losses; blind to increasing functions of each loss. Time and
        memory grow as `k^2 m`.
    """
    left, right = points.unsqueeze(-2), points.unsqueeze(-3)
    beaten = ((right <= left).all(-1) & (right < left).any(-1)).any(-1)
    return ~beaten & points.isfinite().all(-1)


def front(
    points: Tensor | Mapping[str, Tensor],
    names: Sequence[str] | None = None,
    ax: Ax | None = None,
    *,
    known: Tensor | None = None,
) -> Ax:
    """Draw points of two losses, and the front of those that no other one beats.

    Args:
        points: `[k, 2]`, losses; or several such sets by name, a rule's each, which share one front.
        names: of the two losses.
        ax: the axes to draw on; `None` makes a figure.
        known: `[j, 2]`, the true front in order, where it is known: `problem.losses` at the points of
            `problem.pareto`.

    Returns:
        The axes: full markers on the front, which is drawn as stairs, hollow ones elsewhere.

    Raises:
        ValueError: points of other than two losses, none at all, or names that do not fit.
    """
    groups = dict(points) if isinstance(points, Mapping) else {"": points}
    for name, group in groups.items():
        if group.ndim != 2 or group.shape[1] != 2:
            raise ValueError(
                f"front: expected points [k, 2], two losses each, found shape {list(group.shape)}"
                f"{f' in {name!r}' if name else ''}. Pick two: points[:, [0, 2]]."
            )
    labels = names_or_indices(names or ["loss 0", "loss 1"], 2, "front")
    together = torch.cat([group.detach().double().cpu() for group in groups.values()] or [torch.empty(0, 2)])
    if not len(together):
        raise ValueError("front: expected at least one point, found none. Hand over losses [k, 2].")
    best = nondominated(together)
    ax = axes(ax, (6.0, 4.2))
    quiet(ax, xlabel=labels[0], ylabel=labels[1])
    if known is not None:
        ax.plot(*numbers(known).T, color=ink(ax), linewidth=6, alpha=0.2, solid_capstyle="round", label="true front")
    stairs = numbers(together[best])
    stairs = stairs[np.lexsort((-stairs[:, 1], stairs[:, 0]))]
    ax.plot(*stairs.T, color=ink(ax), alpha=0.6, linewidth=1.0, drawstyle="steps-post", label="front of the points")
    flags = best.split([len(group) for group in groups.values()])
    for index, ((name, group), kept) in enumerate(zip(groups.items(), flags, strict=True)):
        style: dict[str, Any] = {**look(index), "linestyle": "none", "markersize": 7}
        values, on = numbers(group), kept.numpy()
        ax.plot(*values[~on].T, **style, markerfacecolor="none", alpha=0.7)
        ax.plot(*values[on].T, **style, label=name or "on the front")
    legend(ax)
    return ax
