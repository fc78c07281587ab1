"""What training carries from step to step, what a step reports, and checks of what a step is given."""

from collections.abc import Sequence
from inspect import Signature, signature
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor

from functional_jd.core.names import objective_names
from functional_jd.core.record_display import MAX_ROWS, Table, displayed_as, outline, ranged, shortened
from functional_jd.core.tree import tree_difference, tree_leaves, tree_names
from functional_jd.core.types import Gramian, Losses, Params, Tree, Weights
from functional_jd.objectives import Multitask
from functional_jd.optimizers.base import Optimizer
from functional_jd.precision.scale_state import ScaleState
from functional_jd.torch_compat.callers import here
from functional_jd.torch_compat.slow_path import is_out_of_memory
from functional_jd.torch_compat.torch_internals import has_values


def step_table(info: Any) -> Table:
    """Losses by name, with their weights, and which of them were finite; of a batch of steps, the outline."""
    losses, weights, finite, moved, *_ = info
    known = has_values(finite) and not (isinstance(moved, Tensor) and (not has_values(moved) or moved.ndim))
    found = by_objective(losses, weights, finite) if known else None
    if found is None:
        return outline(info)
    text = "step taken"
    if not bool(moved if isinstance(moved, Tensor) else finite.all()):
        text = "step skipped, not everything was finite"
        shown = [*tree_leaves(losses), *tree_leaves(weights)]
        if not finite.ndim and all(bool(x.isfinite().all()) for x in shown if has_values(x)):
            text += "; diagnose(jacobian) shows in which row"
    entrywise = "" if isinstance(weights, Tensor) else ", weights entry by entry"
    return f"{type(info).__name__}: {text}{entrywise}", *found


def by_objective(
    losses: Losses, weights: Weights, finite: Tensor | None = None
) -> tuple[list[str], list[list[str]]] | None:
    """Headers and rows of a table of the objectives, in the order of the rows; None without the values of one step."""
    leaves = tree_leaves(losses)
    m = sum(leaf.numel() for leaf in leaves if has_values(leaf))
    columns: dict[str, Any] = {"loss": leaves}
    if isinstance(weights, Tensor):
        columns["weight"] = [weights]
    if finite is not None and finite.ndim:
        columns["finite"] = [finite]
    if not all(has_values(x) for found in columns.values() for x in found):
        return None
    if any(sum(x.numel() for x in found) != m for found in columns.values()) or getattr(weights, "ndim", 1) > 1:
        return None
    values = [[y for x in found for y in x.detach().reshape(-1).tolist()] for found in columns.values()]
    names, sizes = objective_names(losses), [1] * m
    if m > MAX_ROWS and len(leaves) > 1:  # residuals at many points: a row for each term
        names, sizes = tree_names(losses), [leaf.numel() for leaf in leaves]
    ends = list(accumulate(sizes))
    cells = [[_together(c[end - n : end]) for n, end in zip(sizes, ends, strict=True)] for c in values]
    return ["objective", *columns], shortened([list(row) for row in zip(names, *cells, strict=True)])


def _together(values: list[Any]) -> str:
    """A cell for the losses, weights or flags of one term."""
    if not values or not isinstance(values[0], bool):
        return ranged(list(map(float, values)))
    count = sum(values)
    return "yes" if count == len(values) else "no" if not count else f"{count} of {len(values)}"


@displayed_as(outline)
class TrainState(NamedTuple):
    """All that training carries from step to step: a pytree of tensors.

    Attributes:
        params: the parameters; what belongs to a `DTensor` is sharded as it is.
        buffers: what the losses carry from step to step, such as the statistics of BatchNorm or a key; `()` for losses
            without buffers.
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
    """What people look at after a step.

    Attributes:
        losses: the values before the step, unscaled, in the structure that the losses gave them.
        weights: how much each row counted, `[m]`: float64 of the rules of the package, else of the dtype that the rule
            returns. Or a pytree like the Jacobian, or a dict of those of groups.
        finite: bool with the scale's shape: which losses and rows were finite; none, if the direction is not. A loss
            that is not finite is flagged alone. If all losses are finite, flags may be shared: rows that are
            differentiated together can spoil one another, and one backward pass has one flag for all.
            `diagnostics.blame` tells them apart.
        moved: bool `[]`: whether the step was taken. It was skipped unless all are finite.
        gramian: float64 `[m, m]`, the Gramian that the rule received, alone or with the losses: zero for rows
            that overflowed, and `diagnose(info.gramian)` costs no derivative. `()` of a rule that receives none.
        aux: what the losses returned as aux, with `has_aux=True`; else `()`.
    """

    losses: Losses
    weights: Weights
    finite: Tensor
    moved: Tensor | tuple[()] = ()
    gramian: Gramian | tuple[()] = ()
    aux: Tree = ()


START = "Start with state = train_state(params, *batch, losses=..., aggregator=..., optimizer=...)."


def note_losses(losses: Any, with_buffers: bool, batch: Sequence[Any], error: TypeError) -> None:
    """Add a note to an error of losses that do not take what they received."""
    called = losses.features if isinstance(losses, Multitask) else getattr(losses, "loss", losses)
    text = f"received params{', buffers' * with_buffers} and {len(batch)} arguments of the batch. Spread tuples: *batch"
    if not with_buffers:
        text += "; if the losses take buffers, pass buffers=dict(module.named_buffers())"
    note_call(error, called, 1 + with_buffers + len(batch), f"{here()}: losses", text)


def note_call(error: TypeError, f: Any, count: int, name: str, text: str) -> None:
    """Add a note with the signature of a function to an error, if it does not take so many arguments."""
    if torch.compiler.is_compiling():
        return
    if (other := other_signature(f, count)) is not None:
        error.add_note(f"{name}({', '.join(other.parameters)}) {text}.")


def other_signature(f: Any, count: int) -> Signature | None:
    """The signature of a function that does not take so many arguments; None if it does, or has no signature."""
    found = None
    try:
        found = signature(f)
        found.bind(*range(count))
    except (TypeError, ValueError):  # no function, one written in C, or other arguments
        return found
    return None


def note_other_optimizer(state: TrainState, optimizer: Optimizer, error: Exception) -> None:
    """Add a note to an error, if the state is one of another optimizer or for other parameters."""
    if torch.compiler.is_compiling() or is_out_of_memory(error):
        return
    difference = tree_difference(optimizer.init(state.params), state.optimizer)
    if difference:
        error.add_note(
            f"{here()}: the state must be one of this optimizer for these parameters: {difference} in state.optimizer. "
            "Start again with train_state, or with state._replace(optimizer=optimizer.init(params))."
        )
