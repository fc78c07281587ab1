"""The history of a training: losses, weights, scales, conflicts, and the steps that were skipped."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from matplotlib.ticker import MaxNLocator
from torch import Tensor

from functional_jd.core.names import names_or_indices, objective_names
from functional_jd.core.tree import tree_leaves
from functional_jd.core.types import Losses
from functional_jd.plotting.style import CONFLICT, PALETTE, Array, Ax, axes, canvas, ink, legend, look, numbers, quiet
from functional_jd.precision.loss_scale import ScaleState
from functional_jd.training.state import StepInfo

SIZE = (7.0, 2.8)
MANY = 10
"""The most lines that a picture shows one by one."""


def losses(infos: Sequence[StepInfo], ax: Ax | None = None, *, log: bool | None = None) -> Ax:
    """Draw every loss by step, under the name that the losses give it; skipped steps are crossed.

    Args:
        infos: one `StepInfo` per step.
        ax: the axes to draw on; `None` makes a figure.
        log: a logarithmic axis; `None` means where all losses are positive and span more than a factor of 20.

    Returns:
        The axes. More than 10 losses are drawn alike, with their median; what is not finite leaves a gap.

    Raises:
        TypeError, ValueError: no list of records, an empty one, or records that differ in their number of losses.
    """
    _check("losses", infos, StepInfo)
    table = _table("losses", [torch.cat([leaf.reshape(-1) for leaf in tree_leaves(i.losses)]) for i in infos])
    ax = axes(ax, SIZE)
    _lines(ax, table, _names(infos[0].losses))
    seen = table[np.isfinite(table)]
    wide = seen.size > 0 and seen.min() > 0 and seen.max() > 20 * seen.min()
    if wide if log is None else log:
        ax.set_yscale("log")
    return _finish(ax, "loss", _skipped(infos))


def weights(infos: Sequence[StepInfo], ax: Ax | None = None) -> Ax:
    """Draw how much every row counted, by step; skipped steps are crossed.

    Args:
        infos: one `StepInfo` per step.
        ax: the axes to draw on; `None` makes a figure.

    Returns:
        The axes.

    Raises:
        TypeError, ValueError: no list of records, an empty one, or a rule that counts entry by entry.
    """
    _check("weights", infos, StepInfo)
    if not _by_row(infos):
        raise ValueError(
            "weights: expected weights [m], found entries that count one by one. Such a rule has no weight per row: "
            "draw its losses, or average the entries that concern you."
        )
    ax = axes(ax, SIZE)
    _lines(ax, _table("weights", [info.weights for info in infos]), _names(infos[0].losses))
    return _finish(ax, "weight", _skipped(infos))


def scales(
    states: Sequence[ScaleState],
    infos: Sequence[StepInfo] | None = None,
    ax: Ax | None = None,
    *,
    names: Sequence[str] | None = None,
) -> Ax:
    """Draw the loss scale by step, one line if it is shared, else one per objective; skipped steps are crossed.

    Args:
        states: one `ScaleState` per step: the `state.scale` that the step ran at.
        infos: one `StepInfo` per step, for the names and for the steps that were skipped.
        ax: the axes to draw on; `None` makes a figure.
        names: one per scale; `None` takes those of the losses in `infos`.

    Returns:
        The axes, logarithmic in powers of two.

    Raises:
        TypeError, ValueError: no list of records, an empty one, or names that do not fit.
    """
    _check("scales", states, ScaleState)
    table = _table("scales", [state.scale.reshape(-1) for state in states])
    if states[0].scale.ndim == 0 and names is None:
        names = ["all objectives"]
    elif names is None and infos:
        names = _names(infos[0].losses)
    names = names_or_indices(names, table.shape[1], "scales")
    ax = axes(ax, SIZE)
    _lines(ax, table, names, drawstyle="steps-post")
    ax.set_yscale("log", base=2)
    return _finish(ax, "loss scale", _skipped(infos or []))


def conflicts(diagnoses: Sequence[Any], ax: Ax | None = None, *, every: int = 1) -> Ax:
    """Draw the share of pairs of rows that conflict, by step.

    Args:
        diagnoses: records with a field `conflict`, as `diagnose` gives it; or the shares themselves, numbers or
            tensors `[]` in [0, 1].
        ax: the axes to draw on; `None` makes a figure.
        every: the steps from one record to the next; the first one is of step 0.

    Returns:
        The axes, from 0 to 100 percent.

    Raises:
        TypeError, ValueError: no list, an empty one, or `every` below 1.
    """
    _check("conflicts", diagnoses, object)
    if every < 1:
        raise ValueError(f"conflicts: every must be at least 1, found {every}. It is the steps between two records.")
    shares = [torch.as_tensor(getattr(record, "conflict", record)).detach().double().cpu() for record in diagnoses]
    table = 100 * _table("conflicts", [share.reshape(1) for share in shares])
    ax = axes(ax, SIZE)
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
    """Draw all that is at hand, one picture above the other: losses, weights, scales, conflicts.

    Args:
        infos: one `StepInfo` per step. Weights are left out where the rule counts entry by entry.
        states: one `ScaleState` per step, as for `scales`.
        diagnoses: as for `conflicts`, at steps 0, every, 2 every, ...
        ax: as many axes as pictures; `None` makes a figure.
        every: the steps from one diagnosis to the next. Infos and states are one per step, whatever it is.

    Returns:
        The axes, from top to bottom.

    Raises:
        TypeError, ValueError: what the single pictures raise, or another number of axes.
    """
    _check("history", infos, StepInfo)
    pictures: list[Any] = [lambda one: losses(infos, one)]
    if _by_row(infos):
        pictures.append(lambda one: weights(infos, one))
    if states:
        pictures.append(lambda one: scales(states, infos, one))
    if diagnoses:
        pictures.append(lambda one: conflicts(diagnoses, one, every=every))
    ax = canvas((SIZE[0], 2.2 * len(pictures)), len(pictures)) if ax is None else ax
    if len(ax) != len(pictures):
        raise ValueError(
            f"history: expected one of the axes per picture, {len(pictures)} in all, found {len(ax)}. "
            f"Make them with plt.subplots({len(pictures)}, 1, sharex=True)."
        )
    drawn = [picture(one) for picture, one in zip(pictures, ax, strict=True)]
    for above in drawn[:-1]:
        above.set_xlabel("")
    return drawn


def _check(where: str, records: Sequence[Any], kind: type) -> None:
    # A record is itself a tuple: one alone would pass for a list of its fields.
    if not isinstance(records, list | tuple) or hasattr(records, "_fields"):
        raise TypeError(
            f"{where}: expected a list of records, one per step, found {type(records).__name__}. "
            "Collect them: records.append(record) after every step."
        )
    if not records:
        raise ValueError(f"{where}: expected at least one step, found an empty list. Collect records while training.")
    for record in records:
        if not isinstance(record, kind):
            raise TypeError(
                f"{where}: expected records of type {kind.__name__}, found {type(record).__name__}. "
                "Collect what step returns: state, info = step(...)."
            )


def _table(where: str, rows: list[Tensor]) -> Array:
    """`[steps, m]`, with gaps where numbers are not finite."""
    if len({row.shape for row in rows}) > 1:
        raise ValueError(
            f"{where}: expected the same objectives at every step, found {sorted({len(row) for row in rows})} of them. "
            "Draw each training by itself."
        )
    table = numbers(torch.stack([row.detach().double().cpu() for row in rows]))
    return np.where(np.isfinite(table), table, np.nan)


def _names(losses: Losses) -> list[str]:
    names = objective_names(losses)
    return [f"objective {name}" for name in names] if isinstance(losses, Tensor) and losses.ndim else names


def _by_row(infos: Sequence[StepInfo]) -> bool:
    return all(isinstance(info.weights, Tensor) and info.weights.ndim == 1 for info in infos)


def _skipped(infos: Sequence[StepInfo]) -> list[int]:
    return [step for step, info in enumerate(infos) if not bool(info.finite.all())]


def _lines(ax: Ax, table: Array, names: list[str], **settings: Any) -> None:
    steps = np.arange(len(table))
    if len(names) > MANY:
        ax.plot(
            steps, table, color=PALETTE[5], linewidth=0.7, alpha=0.4, label=["one objective"] + ["_"] * (len(names) - 1)
        )
        median = np.nanmedian(np.where(np.isnan(table).all(1, keepdims=True), np.inf, table), axis=1)
        median = np.where(np.isfinite(median), median, np.nan)
        ax.plot(steps, median, color=ink(ax), linewidth=1.8, label=f"median of {len(names)}", **settings)
        return
    every = max(1, len(table) // 8)
    for index, name in enumerate(names):
        # Markers of different lines stand at different steps.
        marks = {"markevery": (index * every // max(1, len(names)), every), "markersize": 5}
        ax.plot(steps, table[:, index], label=name, linewidth=1.6, **marks, **look(index), **settings)


def _finish(ax: Ax, label: str, skipped: list[int]) -> Ax:
    quiet(ax, xlabel="step", ylabel=label)
    if len(skipped):
        place = {"transform": ax.get_xaxis_transform(), "clip_on": False, "zorder": 5}
        cross: dict[str, Any] = {
            "marker": "x",
            "markersize": 6,
            "markeredgewidth": 1.6,
            "linestyle": "none",
            "color": CONFLICT,
        }
        ax.plot(skipped, np.full(len(skipped), 0.0), label="skipped", **place, **cross)
    ax.xaxis.set_major_locator(MaxNLocator(integer=True, steps=[1, 2, 5, 10]))
    if ax.get_legend_handles_labels()[1]:
        legend(ax)
    return ax
