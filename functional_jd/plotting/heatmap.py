"""Heat maps of Gramians and cosine similarities."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from matplotlib import colors
from torch import Tensor

from functional_jd.core.arguments import check_option
from functional_jd.core.names import names_or_indices
from functional_jd.plotting.style import (
    AGREEMENT,
    CONFLICT,
    Array,
    Ax,
    as_array,
    axes_or_new,
    background_color,
    check_points,
    text_color,
)

MAX_WITH_VALUES, MAX_WITH_NAMES = 12, 40
"""The largest m for which the values are written in the cells, and for which the rows are labelled."""


def heatmap(
    matrix: Tensor,
    names: Sequence[str] | None = None,
    ax: Ax | None = None,
    *,
    kind: str = "cosines",
) -> Ax:
    """Plot the pairwise products of the rows: blue if positive, vermilion if negative (conflict), no colour at zero.

    Args:
        matrix: `[m, m]`, cosines or a Gramian.
        names: one per row, `["left", "right"]`; `None` uses the row indices.
        ax: the axes to draw on; `None` creates a figure.
        kind: `"cosines"`: colours from -1 to 1; `"gramian"`: a symmetric logarithmic colour scale, down to 1e-12 of the
            largest entry, for rows of very different norms.

    Returns:
        The axes. Up to 12 rows, the values are written in the cells; non-finite cells are grey.
    """
    cure = "Pass views.gramian(jacobian), or the cosines of a diagnosis."
    check_points("heatmap", "matrix", matrix, "a matrix of pairs [m, m]", lambda k, m: k == m > 0, cure)
    check_option("heatmap", "kind", kind, ("cosines", "gramian"), "Gramians have a logarithmic scale.")
    m = len(matrix)
    names = names_or_indices(names, m, "heatmap")
    side = min(8.0, max(3.2, 1.6 + 0.6 * m))
    ax = axes_or_new("heatmap", ax, (side + 1.2, side))
    values = as_array(matrix)
    # From conflict to agreement; an odd number of colours, of which the middle one, the background, is that of zero.
    cmap = colors.LinearSegmentedColormap.from_list("agreement", [CONFLICT, background_color(ax), AGREEMENT], N=257)
    cmap = cmap.with_extremes(bad=(0.5, 0.5, 0.5, 0.5))
    image = ax.imshow(np.ma.masked_invalid(values), cmap=cmap, norm=_norm(values, kind), interpolation="nearest")
    _label_rows_and_columns(ax, names)
    colorbar = ax.figure.colorbar(image, ax=ax, label="cosine" if kind == "cosines" else "inner product", shrink=0.8)
    colorbar.outline.set_visible(False)
    if isinstance(image.norm, colors.SymLogNorm):
        colorbar.set_ticks(_ticks(image.norm))
    if m <= MAX_WITH_VALUES:
        _write_values(ax, values, image, "{:.2f}".format if kind == "cosines" else _compact_number)
    return ax


def _norm(values: Array, kind: str) -> colors.Normalize:
    magnitudes = np.abs(values[np.isfinite(values) & (values != 0)])
    if kind == "cosines" or not magnitudes.size:
        return colors.Normalize(-1, 1)
    largest = float(magnitudes.max())
    return colors.SymLogNorm(max(float(magnitudes.min()), 1e-12 * largest), linscale=0.5, vmin=-largest, vmax=largest)


def _label_rows_and_columns(ax: Ax, names: list[str]) -> None:
    ax.grid(visible=False)
    ax.spines[:].set_visible(False)
    ax.tick_params(length=0)
    if len(names) > MAX_WITH_NAMES:
        return
    ticks = range(len(names))
    long = max(map(len, names)) > 5
    rotated: dict[str, Any] = {"rotation": 40, "ha": "right", "rotation_mode": "anchor"} if long else {}
    ax.set_yticks(ticks, names)
    ax.set_xticks(ticks, names, **rotated)


def _ticks(norm: colors.SymLogNorm) -> list[float]:
    """Return zero and up to four powers of ten on either side: the labels of SymmetricalLogLocator overlap at zero."""
    lowest, highest = np.ceil(np.log10(norm.linthresh)) + 1, np.floor(np.log10(norm.vmax or 1))
    powers = 10.0 ** np.arange(highest, lowest - 1, -max(1, np.ceil((highest - lowest + 1) / 4)))
    return sorted([*-powers, 0.0, *powers])


def _compact_number(value: float) -> str:
    return f"{value:.0f}" if 100 <= abs(value) < 1e5 else f"{value:.2g}".replace("e+0", "e").replace("e-0", "e-")


def _write_values(ax: Ax, values: Array, image: Any, formatted: Callable[[float], str]) -> None:
    """Write the value in every cell, in black or white, whichever has more contrast."""
    for row, column in np.ndindex(*values.shape):
        value = float(values[row, column])
        rgba = image.cmap(image.norm(value)) if np.isfinite(value) else None
        color = text_color(ax) if rgba is None else "black" if np.dot(rgba[:3], (0.3, 0.59, 0.11)) > 0.45 else "white"
        text = formatted(value)
        text = text.removeprefix("-") if float(text) == 0 else text
        ax.text(
            column, row, text, ha="center", va="center", color=color, fontsize="medium" if len(values) < 8 else "small"
        )
