"""Plots of a training run: losses, weights, loss scales, conflicts, and skipped steps."""

from collections.abc import Sequence
from numbers import Real
from typing import Any

import numpy as np
import torch
from matplotlib.ticker import LogLocator, MaxNLocator, NullLocator
from torch import Tensor

from functional_jd.core.arguments import check_flag, check_integer, described, refuse
from functional_jd.core.names import names_or_indices, objective_names
from functional_jd.core.tree import tree_leaves
from functional_jd.core.types import Losses
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
from functional_jd.solvers.dual_cone import cosines
from functional_jd.training.state import StepInfo

SIZE = (7.0, 2.8)
MAX_LINES = 10
"""The maximum number of lines with a style of their own; more are drawn in one style, with their median."""


def losses(infos: Sequence[StepInfo], ax: Ax | None = None, *, log: bool | None = None) -> Ax:
    """Plot every loss against the step, with its name; skipped steps are marked with crosses.

    Args:
        infos: one `StepInfo` per step.
        ax: the axes to draw on; `None` creates a figure. The legend stands beside them: make a figure of several axes
            with `layout="constrained"`.
        log: whether the axis is logarithmic; `None`: if all losses are positive and span more than a factor of 5.

    Returns:
        The axes. More than 10 losses are drawn in one style, with their median; non-finite values leave gaps.

    Raises:
        TypeError, ValueError: not a list of records, an empty list, or records with different numbers of losses.
    """
    _check_records("losses", infos, StepInfo)
    if log is not None:
        check_flag("losses", "log", log)
    table = _table("losses", [torch.cat([leaf.reshape(-1) for leaf in tree_leaves(i.losses)]) for i in infos])
    ax = axes_or_new("losses", ax, SIZE)
    _plot_lines(ax, table, _names(infos[0].losses))
    if _is_wide(table) if log is None else log:
        _set_log(ax, table)
    return _finish(ax, "loss", _skipped_steps(infos))


def weights(infos: Sequence[StepInfo], ax: Ax | None = None) -> Ax:
    """Plot the weight of every row against the step; skipped steps are marked with crosses.

    Args:
        infos: one `StepInfo` per step.
        ax: the axes to draw on; `None` creates a figure. The legend stands beside them: make a figure of several axes
            with `layout="constrained"`.

    Returns:
        The axes, logarithmic if all weights are positive and span more than a factor of 5.

    Raises:
        TypeError, ValueError: not a list of records, an empty list, or a rule with entrywise weights.
    """
    _check_records("weights", infos, StepInfo)
    if not _have_weight_per_row(infos):
        raise ValueError(
            "weights: expected weights [m], found entrywise weights. Such a rule has no weight per row: "
            "plot its losses, or average the weights of some entries."
        )
    ax = axes_or_new("weights", ax, SIZE)
    table = _table("weights", [info.weights for info in infos])
    _plot_lines(ax, table, _row_names(infos[0], table))
    if _is_wide(table):
        _set_log(ax, table)
    return _finish(ax, "weight", _skipped_steps(infos))


def norms(infos: Sequence[StepInfo], ax: Ax | None = None) -> Ax:
    """Plot the norm of every objective's gradient against the step; skipped steps are marked with crosses.

    `|g_i| = sqrt(G_ii)`, from the Gramian that the rule received.

    Args:
        infos: one `StepInfo` per step, of a rule whose view is `gramian`.
        ax: the axes to draw on; `None` creates a figure. The legend stands beside them: make a figure of several axes
            with `layout="constrained"`.

    Returns:
        The axes, logarithmic. Steps that were skipped leave gaps.

    Raises:
        TypeError, ValueError: not a list of records, an empty list, or infos without Gramians.
    """
    _check_records("norms", infos, StepInfo)
    if not _have_gramians(infos):
        raise ValueError(
            "norms: expected infos with a Gramian, found none. Rules whose view is gramian leave it in the info; with "
            "others, call diagnostics.diagnose(jacobian).norms."
        )
    table = _table("norms", [_gramian(info).diagonal().sqrt() for info in infos])
    ax = axes_or_new("norms", ax, SIZE)
    _plot_lines(ax, table, _row_names(infos[0], table))
    _set_log(ax, table)
    return _finish(ax, "gradient norm", _skipped_steps(infos))


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
        ax: the axes to draw on; `None` creates a figure. The legend stands beside them: make a figure of several axes
            with `layout="constrained"`.
        names: one per scale; `None` uses those of the losses in `infos`.

    Returns:
        The axes, logarithmic in powers of two.

    Raises:
        TypeError, ValueError: not a list of records, an empty list, or the wrong number of names.
    """
    _check_records("scales", states, ScaleState)
    if not _is_nothing(infos):
        _check_records("scales", infos, StepInfo)
    table = _table("scales", [state.scale.reshape(-1) for state in states])
    if states[0].scale.ndim == 0 and names is None:
        names = ["all objectives"]
    elif names is None and infos:
        names = _names(infos[0].losses)
    names = names_or_indices(names, table.shape[1], "scales")
    ax = axes_or_new("scales", ax, SIZE)
    _plot_lines(ax, table, names, drawstyle="steps-post")
    ax.set_yscale("log", base=2)
    return _finish(ax, "loss scale", _skipped_steps(infos or []))


def conflicts(diagnoses: Sequence[Any], ax: Ax | None = None, *, every: int = 1) -> Ax:
    """Plot the share of pairs of rows that conflict against the step.

    Args:
        diagnoses: records with a field `conflict`, as `diagnose` returns them; or the shares, numbers or tensors `[]`
            in [0, 1].
        ax: the axes to draw on; `None` creates a figure. The legend stands beside them: make a figure of several axes
            with `layout="constrained"`.
        every: the number of steps between two records; the first record is of step 0.

    Returns:
        The axes, from 0 to 100 percent.

    Raises:
        TypeError, ValueError: not a list, an empty list, or `every` below 1.
    """
    _check_records("conflicts", diagnoses, object)
    check_integer("conflicts", "every", every, 1, "Pass the steps between records.")
    shares = [_share(record) for record in diagnoses]
    table = 100 * _table("conflicts", [share.reshape(1) for share in shares])
    ax = axes_or_new("conflicts", ax, SIZE)
    steps = every * np.arange(len(table))
    ax.fill_between(steps, table[:, 0], color=CONFLICT, alpha=0.25, linewidth=0)
    ax.plot(steps, table[:, 0], color=CONFLICT, linewidth=1.6)
    ax.set_ylim(-3, 103)
    return _finish(ax, "pairs in conflict (%)", [])


def history(
    infos: Sequence[StepInfo],
    states: Sequence[ScaleState] | None = None,
    diagnoses: Sequence[Any] | None = None,
    ax: Sequence[Ax] | None = None,
    *,
    every: int = 1,
) -> list[Ax]:
    """Plot the available records, one plot above the other: losses, weights, norms, scales, conflicts.

    Args:
        infos: one `StepInfo` per step. Entrywise weights are not plotted; norms and conflicts are, where the infos have
            Gramians.
        states: one `ScaleState` per step, as for `scales`.
        diagnoses: as for `conflicts`, at steps 0, every, 2 every, ...; `None` takes the Gramians of the infos.
        ax: one `Axes` per plot; `None` creates a figure.
        every: the number of steps between two diagnoses. Infos and states are one per step, regardless of it.

    Returns:
        The axes, from top to bottom.

    Raises:
        TypeError, ValueError: as the single plots, or the wrong number of axes.
    """
    _check_records("history", infos, StepInfo)
    for records, kind in ((states, ScaleState), (diagnoses, object)):
        if not _is_nothing(records):
            _check_records("history", records, kind)
    check_integer("history", "every", every, 1, "Pass the steps between diagnoses.")
    plots: list[Any] = [lambda ax: losses(infos, ax)]
    if _have_weight_per_row(infos):
        plots.append(lambda ax: weights(infos, ax))
    if _have_gramians(infos):
        plots.append(lambda ax: norms(infos, ax))
    if states:
        plots.append(lambda ax: scales(states, infos, ax))
    if diagnoses:
        plots.append(lambda ax: conflicts(diagnoses, ax, every=every))
    elif _have_gramians(infos):
        plots.append(lambda ax: conflicts([_conflict(info) for info in infos], ax))
    ax = stacked_axes((SIZE[0], 2.2 * len(plots)), len(plots)) if ax is None else ax
    if not isinstance(ax, Sequence | np.ndarray) or len(ax) != len(plots):
        found = len(ax) if isinstance(ax, Sequence | np.ndarray) else described(ax)
        raise ValueError(
            f"history: expected one Axes per plot, {len(plots)} in all, found {found}. "
            f"Create them with plt.subplots({len(plots)}, 1, sharex=True)."
        )
    plotted = [plot(plot_ax) for plot, plot_ax in zip(plots, ax, strict=True)]
    for upper in plotted[:-1]:
        upper.set_xlabel("")
    return plotted


def _check_records(where: str, records: Any, kind: type) -> None:
    # A record is a tuple, so that a single one would be accepted as a list of its fields.
    if not isinstance(records, list | tuple) or hasattr(records, "_fields"):
        raise TypeError(
            f"{where}: expected a list of records, one per step, found {type(records).__name__}. "
            "Call records.append(record) after every step."
        )
    if not records:
        raise ValueError(f"{where}: expected at least one step, found an empty list. Collect records while training.")
    for record in records:
        if not isinstance(record, kind):
            raise TypeError(
                f"{where}: expected records of type {kind.__name__}, found {type(record).__name__}. "
                "Collect what step returns: state, info = step(...)."
            )


def _is_nothing(records: Any) -> bool:
    return records is None or (isinstance(records, list | tuple) and not records)


def _share(record: Any) -> Tensor:
    """The share of conflicts in a record, float64 `[]`."""
    share: Any = getattr(record, "conflict", record)
    if not isinstance(share, Tensor | Real) or (isinstance(share, Tensor) and share.ndim):
        cure = "Pass the diagnoses, or their shares as numbers."
        refuse("conflicts", "diagnoses", "a list of records with a field conflict", share, cure)
    return torch.as_tensor(share).detach().double().cpu()


def _table(where: str, rows: list[Tensor]) -> Array:
    """Return the rows as an array `[steps, m]`, with NaN for values that are not finite."""
    if len({row.shape for row in rows}) > 1:
        raise ValueError(
            f"{where}: expected the same objectives at every step, found {sorted({len(row) for row in rows})} of them. "
            "Plot every training run separately."
        )
    table = as_array(torch.stack([row.detach().double().cpu() for row in rows]))
    return np.where(np.isfinite(table), table, np.nan)


def _names(losses: Losses) -> list[str]:
    names = objective_names(losses)
    return [f"objective {name}" for name in names] if isinstance(losses, Tensor) and losses.ndim else names


def _row_names(info: StepInfo, table: Array) -> list[str]:
    """The names of the losses; of rows whose losses were replaced, for instance by means, their numbers."""
    names, rows = _names(info.losses), table.shape[1]
    return names if len(names) == rows else [f"row {index}" for index in range(rows)]


def _have_weight_per_row(infos: Sequence[StepInfo]) -> bool:
    return all(isinstance(info.weights, Tensor) and info.weights.ndim == 1 for info in infos)


def _have_gramians(infos: Sequence[StepInfo]) -> bool:
    return all(isinstance(info.gramian, Tensor) and info.gramian.ndim == 2 for info in infos)


def _gramian(info: StepInfo) -> Tensor:
    """The Gramian of a step that was taken; of others, in which rows may be missing, NaN."""
    return torch.where(torch.as_tensor(info.moved), torch.as_tensor(info.gramian), torch.nan)


def _conflict(info: StepInfo) -> Tensor:
    """The share of pairs of rows that conflict in a step, `[]`; NaN in one that was not taken.

    That alone of a diagnosis: the rest searches, which takes long with many rows.
    """
    gramian = _gramian(info).detach()
    share = share_in_conflict(cosines(gramian.double())[0], torch.finfo(gramian.dtype).eps)
    return torch.where(gramian.isfinite().all(), share, torch.nan)


def _skipped_steps(infos: Sequence[StepInfo]) -> list[int]:
    return [step for step, info in enumerate(infos) if not bool(info.finite.all())]


def _plot_lines(ax: Ax, table: Array, names: list[str], **settings: Any) -> None:
    steps = np.arange(len(table))
    if len(names) > MAX_LINES:
        ax.plot(
            steps, table, color=PALETTE[5], linewidth=0.7, alpha=0.4, label=["one objective"] + ["_"] * (len(names) - 1)
        )
        median = np.nanmedian(np.where(np.isnan(table).all(1, keepdims=True), np.inf, table), axis=1)
        median = np.where(np.isfinite(median), median, np.nan)
        ax.plot(steps, median, color=text_color(ax), linewidth=1.8, label=f"median of {len(names)}", **settings)
        return
    every = max(1, len(table) // 8)
    for index, name in enumerate(names):
        # The markers of different lines are at different steps.
        markers = {"markevery": (index * every // max(1, len(names)), every), "markersize": 5}
        ax.plot(steps, table[:, index], label=name, linewidth=1.6, **markers, **look(index), **settings)


def _is_wide(table: Array) -> bool:
    """Whether a logarithmic axis tells more: all values are positive, and span more than a factor of 5."""
    values = table[np.isfinite(table)]
    return values.size > 0 and values.min() > 0 and values.max() > 5 * values.min()


def _set_log(ax: Ax, table: Array) -> None:
    """Make the axis logarithmic; over few decades, with ticks at 2 and 5 of each too."""
    ax.set_yscale("log")
    values = table[np.isfinite(table) & (table > 0)]
    if values.size and values.max() < 100 * values.min():
        ax.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
        ax.yaxis.set_minor_locator(NullLocator())
    if values.size and values.min() > 1e-4 and values.max() < 1e5:
        ax.yaxis.set_major_formatter("{x:g}")


def _finish(ax: Ax, label: str, skipped: list[int]) -> Ax:
    quiet(ax, xlabel="step", ylabel=label)
    if len(skipped):
        on_axis = {"transform": ax.get_xaxis_transform(), "clip_on": False, "zorder": 5}
        cross: dict[str, Any] = {
            "marker": "x",
            "markersize": 6,
            "markeredgewidth": 1.6,
            "linestyle": "none",
            "color": CONFLICT,
        }
        ax.plot(skipped, np.full(len(skipped), 0.0), label="skipped", **on_axis, **cross)
    ax.xaxis.set_major_locator(MaxNLocator(integer=True, steps=[1, 2, 5, 10]))
    if ax.get_legend_handles_labels()[1]:
        legend(ax)
    return ax
