"""The common style of all plots: colours, markers, axes that follow the matplotlib theme, and legends."""

from typing import Any, TypeAlias

import numpy as np
import torch
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.layout_engine import ConstrainedLayoutEngine
from torch import Tensor

from functional_jd.core.arguments import check_type, refuse

Ax: TypeAlias = Axes
Array: TypeAlias = np.ndarray[Any, np.dtype[Any]]
"""A NumPy array of float64, as matplotlib takes it."""

# The palette of Okabe and Ito without black and yellow, which have low contrast in one theme each, and darker orange.
PALETTE = ("#0072B2", "#DE8F05", "#009E73", "#D55E00", "#CC79A7", "#56B4E9", "#949494")
"""Seven colours that are safe for colour blindness, with sufficient contrast on white and on black."""

MARKERS = ("o", "s", "^", "D", "v", "P", "X", "p", "*")

LINESTYLES = ("-", "--", "-.", ":")

CONFLICT = PALETTE[3]


def look(index: int) -> dict[str, Any]:
    """Return the colour, marker and line style of a series by its index; the first 28 are all different."""
    return {
        "color": PALETTE[index % len(PALETTE)],
        "marker": MARKERS[index % len(MARKERS)],
        "linestyle": LINESTYLES[index // len(PALETTE) % len(LINESTYLES)],
    }


def axes_or_new(ax: Ax | None, size: tuple[float, float], projection: str | None = None) -> Ax:
    """Return the given axes, or those of a new figure of this size in inches."""
    if ax is None:
        return stacked_axes(size, projection=projection)[0]
    check_type("ax", ax, Axes, "Create them with plt.figure().subplots().")
    return ax


def stacked_axes(size: tuple[float, float], count: int = 1, projection: str | None = None) -> list[Ax]:
    """Return the axes of a new figure of this size in inches, in one column."""
    layout = ConstrainedLayoutEngine(w_pad=0.1, h_pad=0.08)
    options: Any = {"projection": projection}
    _, grid = plt.subplots(count, 1, sharex=count > 1, squeeze=False, figsize=size, layout=layout, subplot_kw=options)
    return list(grid[:, 0])


def check_points(name: str, points: Any, shape: str, fits: Any, cure: str) -> None:
    """Raise unless a value is a dense tensor of real numbers `[k, m]`, and `fits(k, m)` is true."""
    is_real = isinstance(points, Tensor) and not points.is_complex() and points.layout == torch.strided
    if not (is_real and points.ndim == 2 and fits(*points.shape)):
        refuse(name, f"real numbers {shape}", points, cure, ValueError)


def text_color(ax: Ax) -> Any:
    """Return the colour of text on these axes, which is that of the theme in which they were created."""
    return ax.xaxis.label.get_color()


def quiet(ax: Ax, **labels: str) -> None:
    """Draw a faint grid below the data, remove the top and right spines, and set labels."""
    ax.grid(visible=True, which="major", color=text_color(ax), alpha=0.18, linewidth=0.7, linestyle="-")
    ax.set_axisbelow(True)
    ax.spines[["top", "right"]].set_visible(False)
    ax.set(**labels)


def legend(ax: Ax, **settings: Any) -> None:
    """Place a legend to the right of the axes, outside of the data; it replaces an existing one.

    All plots use this function. Call it again after you draw more on the returned axes.

    Args:
        ax: the axes.
        settings: keyword arguments of `ax.legend`.
    """
    check_type("ax", ax, Axes, "Create them with plt.figure().subplots().")
    position = {"loc": "upper left", "bbox_to_anchor": (1.01, 1.0), "borderaxespad": 0.0}
    ax.legend(**{**position, "frameon": False, "labelcolor": text_color(ax), **settings})


def as_array(tensor: Tensor) -> Array:
    """Convert a tensor to a NumPy array of float64."""
    return tensor.detach().double().cpu().numpy()
