"""The heat map of a Gramian or of cosines: who conflicts with whom."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from matplotlib import colors
from torch import Tensor

from functional_jd.core.names import names_or_indices
from functional_jd.plotting.style import AGREEMENT, CONFLICT, Array, Ax, axes, ink, numbers, paper

WRITTEN, NAMED = 12, 40
"""The largest m whose cells hold their values, and whose rows all have their names beside them."""


def heatmap(
    matrix: Tensor,
    names: Sequence[str] | None = None,
    ax: Ax | None = None,
    *,
    kind: str = "cosines",
) -> Ax:
    """Draw a matrix of pairs of rows: blue where they agree, vermilion where they conflict, blank where neither.

    Args:
        matrix: `[m, m]`, cosines or a Gramian.
        names: one per row, `["left", "right"]`; `None` numbers them.
        ax: the axes to draw on; `None` makes a figure.
        kind: `"cosines"`: colours from -1 to 1; `"gramian"`: colours by order of magnitude on either side of zero,
            down to 1e-12 of the largest entry, so that rows of very different norms show side by side.

    Returns:
        The axes. Up to 12 rows every cell holds its value; what is not finite is grey.

    Raises:
        ValueError: a matrix that is not square, an unknown kind, or names that do not fit.
    """
    if matrix.ndim != 2 or matrix.shape[0] != matrix.shape[1] or not len(matrix):
        raise ValueError(
            f"heatmap: expected a matrix of pairs [m, m], found shape {list(matrix.shape)}. "
            "Hand over gramian(jacobian), or the cosines of a diagnosis."
        )
    if kind not in ("cosines", "gramian"):
        raise ValueError(f"heatmap: kind must be 'cosines' or 'gramian', found {kind!r}. Choose one of the two.")
    m = len(matrix)
    names = names_or_indices(names, m, "heatmap")
    side = min(8.0, max(3.2, 1.6 + 0.6 * m))
    ax = axes(ax, (side + 1.2, side))
    values = numbers(matrix)
    shades = _shades(ax)
    image = ax.imshow(np.ma.masked_invalid(values), cmap=shades, norm=_norm(values, kind), interpolation="nearest")
    _name(ax, names)
    bar = ax.figure.colorbar(image, ax=ax, label="cosine" if kind == "cosines" else "inner product", shrink=0.8)
    bar.outline.set_visible(False)
    if isinstance(image.norm, colors.SymLogNorm):
        bar.set_ticks(_decades(image.norm))
    if m <= WRITTEN:
        _write(ax, values, image, "{:.2f}".format if kind == "cosines" else _short)
    return ax


def _shades(ax: Ax) -> colors.Colormap:
    """From conflict through the theme's own background to agreement."""
    # An odd number of shades: one of them is zero's.
    shades = colors.LinearSegmentedColormap.from_list("agreement", [CONFLICT, paper(ax), AGREEMENT], N=257)
    return shades.with_extremes(bad=(0.5, 0.5, 0.5, 0.5))


def _norm(values: Array, kind: str) -> colors.Normalize:
    if kind == "cosines":
        return colors.Normalize(-1, 1)
    sizes = np.abs(values[np.isfinite(values) & (values != 0)])
    if not sizes.size:
        return colors.Normalize(-1, 1)
    largest = float(sizes.max())
    return colors.SymLogNorm(max(float(sizes.min()), 1e-12 * largest), linscale=0.5, vmin=-largest, vmax=largest)


def _name(ax: Ax, names: list[str]) -> None:
    ax.grid(visible=False)
    ax.spines[:].set_visible(False)
    ax.tick_params(length=0)
    if len(names) > NAMED:
        return
    places = range(len(names))
    long = max(map(len, names)) > 5
    turned: dict[str, Any] = {"rotation": 40, "ha": "right", "rotation_mode": "anchor"} if long else {}
    ax.set_yticks(places, names)
    ax.set_xticks(places, names, **turned)


def _decades(norm: colors.SymLogNorm) -> list[float]:
    """Up to four powers of ten on either side of zero, none where they would crowd."""
    lowest, highest = np.ceil(np.log10(norm.linthresh)) + 1, np.floor(np.log10(norm.vmax or 1))
    powers = 10.0 ** np.arange(highest, lowest - 1, -max(1, np.ceil((highest - lowest + 1) / 4)))
    return sorted([*-powers, 0.0, *powers])


def _short(value: float) -> str:
    return f"{value:.0f}" if 100 <= abs(value) < 1e5 else f"{value:.2g}".replace("e+0", "e").replace("e-0", "e-")


def _write(ax: Ax, values: Array, image: Any, form: Callable[[float], str]) -> None:
    """The value in every cell, in the one of black and white that stands out."""
    for row, column in np.ndindex(*values.shape):
        value = float(values[row, column])
        rgba = image.cmap(image.norm(value)) if np.isfinite(value) else None
        color = ink(ax) if rgba is None else "black" if np.dot(rgba[:3], (0.3, 0.59, 0.11)) > 0.45 else "white"
        text = form(value)
        text = text.removeprefix("-") if float(text) == 0 else text
        ax.text(
            column, row, text, ha="center", va="center", color=color, fontsize="medium" if len(values) < 8 else "small"
        )
