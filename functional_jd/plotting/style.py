"""What all pictures share: colours, markers, axes that fit the theme, legends beside the data."""

from typing import Any, TypeAlias

import numpy as np
from matplotlib import colors
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.layout_engine import ConstrainedLayoutEngine
from torch import Tensor

Ax: TypeAlias = Axes
"""The axes that a picture is drawn on, of a 3d projection where it has three dimensions."""


Array: TypeAlias = np.ndarray[Any, np.dtype[Any]]
"""What matplotlib draws: float64 numbers on the CPU."""


# Okabe and Ito's colours but for black and yellow, of which either drowns in one of the themes; orange a shade darker.
PALETTE = ("#0072B2", "#DE8F05", "#009E73", "#D55E00", "#CC79A7", "#56B4E9", "#949494")
"""Seven colours that the colour-blind tell apart, and that stand out on white and on black."""


MARKERS = ("o", "s", "^", "D", "v", "P", "X", "p", "*")


DASHES = ("-", "--", "-.", ":")


AGREEMENT, CONFLICT = PALETTE[0], PALETTE[3]


def look(index: int) -> dict[str, Any]:
    """Colour, marker and line style of the series with this number: no two of the first 28 look alike.

    Args:
        index: 0, 1, 2, ...

    Returns:
        Keywords of `ax.plot`: `color`, `marker`, `linestyle`.

    Example:
        >>> for index, curve in enumerate(curves):
        ...     ax.plot(curve, markevery=10, **look(index))
    """
    return {
        "color": PALETTE[index % len(PALETTE)],
        "marker": MARKERS[index % len(MARKERS)],
        "linestyle": DASHES[index // len(PALETTE) % len(DASHES)],
    }


def axes(ax: Ax | None, size: tuple[float, float], projection: str | None = None) -> Ax:
    """These axes, or those of a new figure of this size in inches."""
    if ax is None:
        return canvas(size, projection=projection)[0]
    return ax


def canvas(size: tuple[float, float], count: int = 1, projection: str | None = None) -> list[Ax]:
    """The axes of a new figure of this size in inches, one above the other."""
    layout = ConstrainedLayoutEngine(w_pad=0.1, h_pad=0.08)
    kind: Any = {"projection": projection}
    _, made = plt.subplots(count, 1, sharex=count > 1, squeeze=False, figsize=size, layout=layout, subplot_kw=kind)
    return list(made[:, 0])


def ink(ax: Ax) -> Any:
    """The colour of text on these axes, whatever the theme is by now."""
    return ax.xaxis.label.get_color()


def paper(ax: Ax) -> Any:
    """The colour behind the data."""
    color = colors.to_rgba(ax.get_facecolor())
    return color if color[3] else colors.to_rgba(ax.figure.get_facecolor())


def quiet(ax: Ax, **labels: str) -> None:
    """Give axes a faint grid under the data, no frame above and at the right, and labels.

    Args:
        ax: the axes.
        labels: what `ax.set` takes: `xlabel="step"`, `ylabel="loss"`, `title=...`.
    """
    ax.grid(visible=True, which="major", color=ink(ax), alpha=0.18, linewidth=0.7, linestyle="-")
    ax.set_axisbelow(True)
    ax.spines[["top", "right"]].set_visible(False)
    ax.set(**labels)


def legend(ax: Ax, **settings: Any) -> None:
    """Put a legend at the right of the axes, where no data are, in place of the one that is there.

    Every picture has its legend from here: call it again after drawing more on the axes that a picture returned.

    Args:
        ax: the axes.
        settings: what `ax.legend` takes.

    Example:
        >>> ax = scales(states)
        >>> ax.plot(peer, label="peer", **look(1))
        >>> legend(ax)
    """
    place = {"loc": "upper left", "bbox_to_anchor": (1.01, 1.0), "borderaxespad": 0.0}
    ax.legend(**{**place, "frameon": False, "labelcolor": ink(ax), **settings})


def numbers(tensor: Tensor) -> Array:
    """A tensor as matplotlib takes it."""
    return tensor.detach().double().cpu().numpy()
