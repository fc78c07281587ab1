"""The state and the report of a step, and checks of the arguments of a step."""

import warnings
from itertools import accumulate, chain
from math import isfinite
from typing import Any, NamedTuple

from torch import Tensor

from functional_jd.aggregation.views import loss_vector
from functional_jd.core.names import objective_names
from functional_jd.core.record_display import MAX_ROWS, Table, displayed_as, outline, ranged, shortened
from functional_jd.core.tree import tree_leaves, tree_names
from functional_jd.core.types import Gramian, Losses, Params, Tree, Weights
from functional_jd.precision.scale_state import ScaleState
from functional_jd.torch_compat.callers import user_level
from functional_jd.torch_compat.torch_internals import has_values


def step_table(info: Any) -> Table:
    """Losses by name, with their weights, and which of them were finite; of a batch of steps, the outline."""
    losses, weights, finite, moved, *_ = info
    taken = moved if isinstance(moved, Tensor) else finite
    columns: dict[str, list[Any]] = {"loss": tree_leaves(losses)}
    columns |= {"weight": [weights]} if isinstance(weights, Tensor) else {}
    columns |= {"finite": [finite]} if getattr(finite, "ndim", 0) else {}
    if not all(map(has_values, (finite, taken, *chain(*columns.values())))):
        return outline(info)
    values = [[y for x in own for y in x.detach().reshape(-1).tolist()] for own in columns.values()]
    if getattr(weights, "ndim", 1) > 1 or getattr(moved, "ndim", 0) or len({*map(len, values)}) > 1:
        return outline(info)
    text = "step taken" if isinstance(weights, Tensor) else "step taken, weights entry by entry"
    if not taken.all():
        causes = (name for name, own in zip(("losses", "weights"), values, strict=False) if not all(map(isfinite, own)))
        text = text.replace("taken", f"skipped, {(cause := next(causes, 'derivatives'))} were not finite")
        if not finite.ndim and cause == "derivatives":
            text += "; diagnose(jacobian) shows in which row"
    names, sizes = objective_names(losses), [1] * len(values[0])
    if len(names) > MAX_ROWS and len(columns["loss"]) > 1:  # residuals at many points: a row for each term
        names, sizes = tree_names(losses), [leaf.numel() for leaf in columns["loss"]]
    ends = list(accumulate(sizes))
    rows = [[name, *(_cell(x[j - n : j]) for x in values)] for name, n, j in zip(names, sizes, ends, strict=True)]
    return f"{type(info).__name__}: {text}", ["objective", *columns], shortened(rows)


def named_values(losses: Losses) -> list[tuple[str, float]]:
    """The losses as numbers, each with its name."""
    return list(zip(objective_names(losses), loss_vector(losses).tolist(), strict=True))


def _cell(values: list[Any]) -> str:
    """The losses, weights or flags of one term."""
    if not values or not isinstance(values[0], bool):
        return ranged(list(map(float, values)))
    count = sum(values)
    return "yes" if count == len(values) else "no" if not count else f"{count} of {len(values)}"


@displayed_as(outline)
class TrainState(NamedTuple):
    """All that training carries from step to step: a pytree of tensors.

    Attributes:
        params: the parameters; averages of a `DTensor` are sharded like it.
        buffers: what the losses carry from step to step, such as the statistics of BatchNorm or a key; `()` for none.
        optimizer: what the optimizer remembers.
        aggregator: what the rule remembers.
        scale: the loss scale, one for all or one per objective.
    """

    params: Params
    buffers: Tree
    optimizer: Tree
    aggregator: Tree
    scale: ScaleState


@displayed_as(step_table)
class StepInfo(NamedTuple):
    """The report of a step.

    Attributes:
        losses: the values before the step, unscaled, in the structure that the losses gave them.
        weights: how much each row counted, `[m]`: float64 of the rules of the package, else of the dtype that the rule
            returns. Or a pytree like the Jacobian, or a dict of those of groups.
        finite: bool with the scale's shape: which losses and rows were finite; none, if the direction is not. A loss
            that is not finite is flagged alone. If all losses are finite, rows that were differentiated together share
            their flags: `diagnostics.blame` tells them apart.
        moved: bool `[]`: whether the step was taken. It was skipped unless all are finite.
        gramian: float64 `[m, m]`, the Gramian that the rule received: zero for rows that overflowed; or `()`.
        aux: what the losses returned as aux, with `has_aux=True`; else `()`.
    """

    losses: Losses
    weights: Weights
    finite: Tensor
    moved: Tensor | tuple[()] = ()
    gramian: Gramian | tuple[()] = ()
    aux: Tree = ()


START = "Start with state = train_state(params, *batch, losses=..., aggregator=..., optimizer=...)."


def warn(text: str) -> None:
    """Warn of training that is probably wrong, where the user called."""
    warnings.warn(text, UserWarning, stacklevel=user_level())


def few(names: list[str]) -> str:
    return ", ".join(map(repr, names[:5])) + f" and {len(names) - 5} others" * (len(names) > 5)
