"""Plots of a training run: losses, weights, loss scales, conflicts, and skipped steps."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from matplotlib.ticker import LogLocator, MaxNLocator, NullLocator
from torch import Tensor

from functional_jd.core.arguments import check_flag, check_type, here, refuse
from functional_jd.core.names import names_or_indices, objective_names
from functional_jd.core.safe import cosines
from functional_jd.core.tree import tree_leaves
from functional_jd.diagnostics.diagnose import share_in_conflict
from functional_jd.plotting.style import (
    CONFLICT,
    PALETTE,
    Array,
    Ax,
    as_array,
    axes_or_new,
    legend,
    look,
    quiet,
    stacked_axes,
    text_color,
)
from functional_jd.precision.scale_state import ScaleState
from functional_jd.training.state import StepInfo

SIZE = (7.0, 2.8)
MAX_LINES = 10
"""The maximum number of lines with a style of their own; more are drawn in one style, with their median."""


def losses(infos: Sequence[StepInfo], ax: Ax | None = None, *, log: bool | None = None) -> Ax:
    """Plot every loss against the step, with its name; skipped steps are marked with crosses.

    Args:
        infos: one `StepInfo` per step.
        ax: the axes to draw on; `None` creates a figure.
        log: whether the axis is logarithmic; `None`: if all losses are positive and span more than a factor of 5.

    Returns:
        The axes. More than 10 losses are drawn in one style, with their median; non-finite values leave gaps.
    """
    _check_records(infos, StepInfo)
    if log is not None:
        check_flag("log", log)
    rows = [torch.cat([leaf.reshape(-1) for leaf in tree_leaves(info.losses)]) for info in infos]
    return _over_steps(ax, rows, "loss", infos, log=log)


def weights(infos: Sequence[StepInfo], ax: Ax | None = None) -> Ax:
    """Plot the weight of every row against the step; skipped steps are marked with crosses.

    Args:
        infos: one `StepInfo` per step.
        ax: the axes to draw on; `None` creates a figure.

    Returns:
        The axes, logarithmic if all weights are positive and span more than a factor of 5.
    """
    _check_records(infos, StepInfo)
    if not _have("weights", 1, infos):
        raise ValueError(
            "weights: infos must have weights [m], found entrywise weights. Such a rule has no weight per row: "
            "plot its losses, or average the weights of some entries."
        )
    return _over_steps(ax, [info.weights for info in infos], "weight", infos)


def norms(infos: Sequence[StepInfo], ax: Ax | None = None) -> Ax:
    """Plot the norm of every objective's gradient against the step; skipped steps are marked with crosses.

    `|g_i| = sqrt(G_ii)`, from the Gramian that the rule received.

    Args:
        infos: one `StepInfo` per step, of a rule whose view is `gramian`.
        ax: the axes to draw on; `None` creates a figure.

    Returns:
        The axes, logarithmic. Steps that were skipped leave gaps.
    """
    rows = [gramian.diagonal().sqrt() for gramian in _gramians(infos)]
    return _over_steps(ax, rows, "gradient norm", infos, log=True)


def scales(
    states: Sequence[ScaleState],
    infos: Sequence[StepInfo] | None = None,
    ax: Ax | None = None,
    *,
    names: Sequence[str] | None = None,
) -> Ax:
    """Plot the loss scale against the step, one line per scale; skipped steps are marked with crosses.

    Args:
        states: one `ScaleState` per step: the `state.scale` before the step.
        infos: one `StepInfo` per step, for the names and the skipped steps.
        ax: the axes to draw on; `None` creates a figure.
        names: one per scale; `None` uses those of the losses in `infos`.

    Returns:
        The axes, logarithmic in powers of two.
    """
    _check_records(states, ScaleState)
    if _is_given(infos):
        _check_records(infos, StepInfo)
    rows = [state.scale.reshape(-1) for state in states]
    if names is None:
        names = ["all objectives"] if states[0].scale.ndim == 0 else _names(infos) if infos else None
    names = names_or_indices(names, len(rows[0]))
    ax = _over_steps(ax, rows, "loss scale", infos or [], names, log=False, drawstyle="steps-post")
    ax.set_yscale("log", base=2)
    return ax


def conflicts(infos: Sequence[StepInfo], ax: Ax | None = None) -> Ax:
    """Plot the share of pairs of rows that conflict against the step.

    Args:
        infos: one `StepInfo` per step, of a rule whose view is `gramian`.
        ax: the axes to draw on; `None` creates a figure.

    Returns:
        The axes, from 0 to 100 percent. Steps that were skipped leave gaps.
    """
    shares: list[Tensor] = []
    for gramian in _gramians(infos):  # the rest of a diagnosis searches, which takes long with many rows
        share = share_in_conflict(cosines(gramian.double())[0], torch.finfo(gramian.dtype).eps)
        shares.append(torch.where(gramian.isfinite().all(), share, torch.nan).reshape(1))
    percent = 100 * _table(shares)[:, 0]
    ax = axes_or_new(ax, SIZE)
    ax.fill_between(range(len(percent)), percent, color=CONFLICT, alpha=0.25, linewidth=0)
    ax.plot(percent, color=CONFLICT, linewidth=1.6)
    ax.set_ylim(-3, 103)
    return _finish(ax, "pairs in conflict (%)", [])


def history(
    infos: Sequence[StepInfo], states: Sequence[ScaleState] | None = None, ax: Sequence[Ax] | None = None
) -> list[Ax]:
    """Plot the available records, one plot above the other: losses, weights, norms, scales, conflicts.

    Args:
        infos: one `StepInfo` per step. Entrywise weights are not plotted; norms and conflicts are, if the infos have
            Gramians.
        states: one `ScaleState` per step, as for `scales`.
        ax: one `Axes` per plot; `None` creates a figure.

    Returns:
        The axes, from top to bottom.
    """
    _check_records(infos, StepInfo)
    if _is_given(states):
        _check_records(states, ScaleState)
    has_gramians = _have("gramian", 2, infos)
    plots: list[Any] = [partial(losses, infos)]
    if _have("weights", 1, infos):
        plots.append(partial(weights, infos))
    if has_gramians:
        plots.append(partial(norms, infos))
    if states:
        plots.append(partial(scales, states, infos))
    if has_gramians:
        plots.append(partial(conflicts, infos))
    ax = stacked_axes((SIZE[0], 2.2 * len(plots)), len(plots)) if ax is None else ax
    several = isinstance(ax, Sequence | np.ndarray)
    if not several or len(ax) != len(plots):
        expected = f"one Axes per plot, {len(plots)} in all"
        cure = f"Create them with plt.subplots({len(plots)}, 1, sharex=True)."
        refuse("ax", expected, len(ax) if several else ax, cure, ValueError)
    plotted = [plot(ax=plot_ax) for plot, plot_ax in zip(plots, ax, strict=True)]
    for upper in plotted[:-1]:
        upper.set_xlabel("")
    return plotted


def _check_records(records: Any, kind: type) -> None:
    # A record is a tuple, so that a single one would be accepted as a list of its fields.
    if not isinstance(records, list | tuple) or hasattr(records, "_fields"):
        cure = "Call records.append(record) after every step."
        raise TypeError(f"{here()}: expected a list of records, one per step, found {type(records).__name__}. {cure}")
    if not records:
        raise ValueError(f"{here()}: expected at least one step, found an empty list. Collect records while training.")
    for record in records:
        check_type("each record", record, kind, "Collect what step returns: state, info = step(...).")


def _is_given(records: Any) -> bool:
    return not (records is None or (isinstance(records, list | tuple) and not records))


def _table(rows: list[Tensor]) -> Array:
    """Return the rows as an array `[steps, m]`, with NaN for values that are not finite."""
    if len({row.shape for row in rows}) > 1:
        raise ValueError(
            f"{here()}: expected the same objectives at every step, found {sorted({len(row) for row in rows})}. "
            "Plot every training run separately."
        )
    return as_array(torch.stack([row.detach().double().cpu() for row in rows]).nan_to_num(*[torch.nan] * 3))


def _names(infos: Sequence[StepInfo], rows: int | None = None) -> list[str]:
    """The names of the losses; of rows whose losses were replaced, for instance by means, their numbers."""
    losses = infos[0].losses
    names = objective_names(losses)
    if isinstance(losses, Tensor) and losses.ndim:
        names = [f"objective {name}" for name in names]
    return names if rows in (None, len(names)) else [f"row {index}" for index in range(rows)]


def _have(field: str, ndim: int, infos: Sequence[StepInfo]) -> bool:
    """Whether a field of all infos is a tensor of so many dimensions."""
    return all(isinstance(x := getattr(info, field), Tensor) and x.ndim == ndim for info in infos)


def _gramians(infos: Sequence[StepInfo]) -> list[Tensor]:
    """The Gramians of steps that were taken; of others, in which rows may be missing, NaN."""
    _check_records(infos, StepInfo)
    if not _have("gramian", 2, infos):
        raise ValueError(
            f"{here()}: infos must have Gramians, found none. Rules whose view is gramian leave it in the info; with "
            "others, plot fields of diagnostics.diagnose(jacobian)."
        )
    return [torch.where(torch.as_tensor(x.moved), torch.as_tensor(x.gramian).detach(), torch.nan) for x in infos]


def _over_steps(
    ax: Ax | None,
    rows: list[Tensor],
    label: str,
    infos: Sequence[StepInfo],
    names: list[str] | None = None,
    log: bool | None = None,
    **settings: Any,
) -> Ax:
    """Draw a line for each entry of the rows, one row per step; log=None: logarithmic if that tells more."""
    table = _table(rows)
    names = _names(infos, table.shape[1]) if names is None else names
    ax = axes_or_new(ax, SIZE)
    steps, m = np.arange(len(table)), len(names)
    if m > MAX_LINES:
        ax.plot(steps, table, color=PALETTE[5], linewidth=0.7, alpha=0.4, label=["one objective"] + ["_"] * (m - 1))
        median = np.nanmedian(np.where(np.isnan(table).all(1, keepdims=True), np.inf, table), axis=1)
        median = np.where(np.isfinite(median), median, np.nan)
        ax.plot(steps, median, color=text_color(ax), linewidth=1.8, label=f"median of {m}", **settings)
    else:
        every = max(1, len(table) // 8)
        for index, name in enumerate(names):
            # The markers of different lines are at different steps.
            markers = {"markevery": (index * every // m, every), "markersize": 5}
            ax.plot(steps, table[:, index], label=name, linewidth=1.6, **markers, **look(index), **settings)
    known = table[np.isfinite(table)]
    if log is None:  # all values are positive, and span more than a factor of 5
        log = known.size > 0 and known.min() > 0 and known.max() > 5 * known.min()
    if log:
        _set_log(ax, known[known > 0])
    return _finish(ax, label, [step for step, info in enumerate(infos) if not bool(info.finite.all())])


def _set_log(ax: Ax, values: Array) -> None:
    """Make the axis logarithmic; over few decades, with ticks at 2 and 5 of each too."""
    ax.set_yscale("log")
    if values.size and values.max() < 100 * values.min():
        ax.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
        ax.yaxis.set_minor_locator(NullLocator())
    if values.size and values.min() > 1e-4 and values.max() < 1e5:
        ax.yaxis.set_major_formatter("{x:g}")


def _finish(ax: Ax, label: str, skipped: list[int]) -> Ax:
    quiet(ax, xlabel="step", ylabel=label)
    if skipped:
        cross: dict[str, Any] = {"marker": "x", "markersize": 6, "markeredgewidth": 1.6, "color": CONFLICT}
        cross |= {"linestyle": "none", "transform": ax.get_xaxis_transform(), "clip_on": False, "zorder": 5}
        ax.plot(skipped, np.zeros(len(skipped)), label="skipped", **cross)
    ax.xaxis.set_major_locator(MaxNLocator(integer=True, steps=[1, 2, 5, 10]))
    if ax.get_legend_handles_labels()[1]:
        legend(ax)
    return ax
