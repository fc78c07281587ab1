"""The records of a training run: losses, weights, norms, loss scales, conflicts, and skipped steps."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from matplotlib.ticker import MaxNLocator
from torch import Tensor

from functional_jd.core.arguments import check_type, here, refuse
from functional_jd.core.names import objective_names
from functional_jd.core.safe import cosines
from functional_jd.core.tree import tree_leaves
from functional_jd.diagnostics.diagnose import share_in_conflict
from functional_jd.plotting.style import CONFLICT, PALETTE, Array, Ax, as_array, legend, look, quiet, stacked_axes
from functional_jd.precision.scale_state import ScaleState
from functional_jd.training.state import StepInfo

MAX_LINES = 10
"""The maximum number of lines with a style of their own; more are drawn in one style, with their median."""


def history(
    infos: Sequence[StepInfo], states: Sequence[ScaleState] | None = None, ax: Sequence[Ax] | None = None
) -> list[Ax]:
    """Plot the records of a training, one plot above the other: losses, weights, norms, scales, conflicts.

    Skipped steps are marked with crosses; values that are not finite leave gaps.

    Args:
        infos: one `StepInfo` per step. Entrywise weights are not plotted. Norms of the gradients, and the share of
            pairs of rows that conflict, are plotted if the infos have Gramians: those that the rule received.
        states: one `ScaleState` per step, the `state.scale` before it; `None` leaves out the scales.
        ax: one `Axes` per plot; `None` creates a figure.

    Returns:
        The axes, from top to bottom; logarithmic if all values are positive and span more than a factor of 5. More than
        10 objectives are drawn in one style, with their median.
    """
    _check_records(infos, StepInfo)
    rows = {"loss": [torch.cat([leaf.reshape(-1) for leaf in tree_leaves(info.losses)]) for info in infos]}
    if _have("weights", 1, infos):
        rows["weight"] = [info.weights for info in infos]
    gramians: list[Tensor] = []
    if _have("gramian", 2, infos):
        tensors = (map(torch.as_tensor, (x.moved, x.gramian)) for x in infos)
        gramians = [torch.where(moved, G.detach(), torch.nan) for moved, G in tensors]  # NaN: skipped
        rows["gradient norm"] = [gramian.diagonal().sqrt() for gramian in gramians]
    if states is not None:
        _check_records(states, ScaleState)
        rows["loss scale"] = [state.scale.reshape(-1) for state in states]
    if gramians:
        rows["pairs in conflict (%)"] = [100 * _share(gramian).reshape(1) for gramian in gramians]
    tables = {label: _table(values) for label, values in rows.items()}
    axes = stacked_axes((7.0, 2.2 * len(tables)), len(tables)) if ax is None else ax
    several = isinstance(axes, Sequence | np.ndarray)
    if not several or len(axes) != len(tables):
        expected = f"one Axes per plot, {len(tables)} in all"
        cure = f"Create them with plt.subplots({len(tables)}, 1, sharex=True)."
        refuse("ax", expected, len(axes) if several else axes, cure, ValueError)
    skipped = [step for step, info in enumerate(infos) if not bool(info.finite.all())]
    for plot, (label, table) in zip(axes, tables.items(), strict=True):
        _over_steps(plot, table, label, _names(infos, table.shape[1]), skipped)
        plot.set_xlabel("step" if plot is axes[-1] else "")
    return list(axes)


def _check_records(records: Any, kind: type) -> None:
    # A record is a tuple, so that a single one would be accepted as a list of its fields.
    if not isinstance(records, list | tuple) or hasattr(records, "_fields"):
        cure = "Call records.append(record) after every step."
        raise TypeError(f"{here()}: expected a list of records, one per step, found {type(records).__name__}. {cure}")
    if not records:
        raise ValueError(f"{here()}: expected at least one step, found an empty list. Collect records while training.")
    for record in records:
        check_type("each record", record, kind, "Collect what step returns: state, info = step(...).")


def _have(field: str, ndim: int, infos: Sequence[StepInfo]) -> bool:
    """Whether a field of all infos is a tensor of so many dimensions."""
    return all(isinstance(x := getattr(info, field), Tensor) and x.ndim == ndim for info in infos)


def _share(gramian: Tensor) -> Tensor:
    """The share of pairs in conflict alone: the rest of a diagnosis searches, which takes long with many rows."""
    share = share_in_conflict(cosines(gramian.double())[0], torch.finfo(gramian.dtype).eps)
    return torch.where(gramian.isfinite().all(), share, torch.nan)


def _table(rows: list[Tensor]) -> Array:
    """Return the rows as an array `[steps, m]`, with NaN for values that are not finite."""
    if len({row.shape for row in rows}) > 1:
        raise ValueError(
            f"{here()}: expected the same objectives at every step, found {sorted({len(row) for row in rows})}. "
            "Plot every training run separately."
        )
    return as_array(torch.stack([row.detach().double().cpu() for row in rows]).nan_to_num(*[torch.nan] * 3))


def _names(infos: Sequence[StepInfo], count: int) -> list[str]:
    """The names of the losses; of rows whose losses were replaced, for instance by means, their numbers."""
    losses = infos[0].losses
    names = objective_names(losses)
    if count == 1 < len(names):
        return ["all objectives"]
    if isinstance(losses, Tensor) and losses.ndim:
        names = [f"objective {name}" for name in names]
    return names if len(names) == count else [f"row {index}" for index in range(count)]


def _over_steps(ax: Any, table: Array, label: str, names: list[str], skipped: list[int]) -> None:
    """Draw a line for each column of a table, one row per step."""
    m = len(names)
    if m > MAX_LINES:
        ax.plot(table, color=PALETTE[5], linewidth=0.7, alpha=0.4, label=["one objective"] + ["_"] * (m - 1))
        ax.plot(np.median(table, axis=1), color=PALETTE[0], linewidth=1.8, label=f"median of {m}")
    else:
        every = max(1, len(table) // 8)
        for index, name in enumerate(names):
            # The markers of different lines are at different steps.
            markers = {"markevery": (index * every // m, every), "markersize": 5}
            ax.plot(table[:, index], label=name, linewidth=1.6, **markers, **look(index))
    known = table[np.isfinite(table)]
    if known.size and known.min() > 0 and known.max() > 5 * known.min():
        ax.set_yscale("log", base=2 if label == "loss scale" else 10)
    quiet(ax, ylabel=label)
    if skipped:
        cross: dict[str, Any] = {"marker": "x", "markersize": 6, "markeredgewidth": 1.6, "color": CONFLICT}
        cross |= {"linestyle": "none", "transform": ax.get_xaxis_transform(), "clip_on": False, "zorder": 5}
        ax.plot(skipped, np.zeros(len(skipped)), label="skipped", **cross)
    ax.xaxis.set_major_locator(MaxNLocator(integer=True, steps=[1, 2, 5, 10]))
    legend(ax)
