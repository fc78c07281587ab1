"""One training per preference, all of them as one."""

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor

from functional_jd.aggregation.aggregate import Aggregator
from functional_jd.core.arguments import check_function, check_integer, refuse
from functional_jd.core.record_display import displayed_as, outline
from functional_jd.core.tree import detach_tree, floating_leaves, tree_leaves, tree_map
from functional_jd.core.types import LossFunction, Params, Tree
from functional_jd.engines.plan import Engine
from functional_jd.fronts.points import check_matrix
from functional_jd.fronts.population import Population, member
from functional_jd.optimizers.base import Optimizer
from functional_jd.precision.scale_state import ScaleState
from functional_jd.training.compiled import compiled
from functional_jd.training.loop import arguments_of, check_batches, fit
from functional_jd.training.start import train_state
from functional_jd.training.state import StepInfo, TrainState
from functional_jd.training.step import step


@displayed_as(outline)
class Front(NamedTuple):
    """K trained solutions, one for each preference.

    `front[k]` is the state of solution k, like any other: `step`, `fit` and `to_checkpoint` take it.

    Attributes:
        states: a `TrainState` whose leaves have K as their first dimension.
        losses: float64 `[K, m]`, of these states on the last batch, in leaf order.
        preferences: `[K, m]`; `[K, 0]` for a population, which needs none.
    """

    states: TrainState
    losses: Tensor
    preferences: Tensor

    def __getitem__(self, k: int) -> TrainState:  # pyright: ignore[reportIncompatibleMethodOverride]
        return tree_map(lambda x: x[k], self.states)


def train(
    start: Params | Front,
    batches: Iterable[Any],
    *,
    losses: LossFunction,
    rule: Callable[[Tensor], Aggregator] | Population,
    optimizer: Optimizer,
    preferences: Tensor | None = None,
    scale: ScaleState | None = None,
    buffers: Tree = (),
    engine: str | Engine = "auto",
    has_aux: bool = False,
    chunk_size: int | None = None,
    compile: bool | str = False,
    on_step: Callable[[StepInfo, TrainState], Any] | None = None,
    progress: bool = False,
    patience: int | None = 200,
) -> Front:
    """Train one solution per preference, all of them in every step: `vmap` of `step` over the preferences.

    Args:
        start: the parameters of every solution; for a population, of all solutions, which differ, stacked: leaves
            `[K, ...]`, as from `torch.func.stack_module_state`. Or the `Front` of an earlier call, to go on with.
        batches: as for `fit`. Every solution sees every batch.
        losses: as for `step`.
        rule: the rule of a preference `[m]`: `tchebycheff`, `lambda u: stch(0.1, u)`, `lambda u: pbi(5.0, u)`,
            `lambda u: upgrad(preference=u)`. Or a `Population`, for all solutions together:
            `hypervolume_gradient(reference)`.
        optimizer: the optimizer.
        preferences: `[K, m]`, one in a row: `lattice(m, divisions)`. `None`: those of the front to go on with, or
            for a population.
        scale, buffers, engine, has_aux: as for `train_state`; every solution has its own scale and buffers.
        chunk_size: how many solutions at once, where memory is short; `None`: all. Not for a population.
        compile: `False` runs the Python code of a step, `"eager"` its operators: the same bits, in a third of the time
            for small solutions. `"cudagraphs"` captures these on a GPU. `True` or `"inductor"`: machine code.
        on_step, progress, patience: as for `fit`; leaves of infos and states have K as their first dimension, and a
            step counts as skipped if no solution took it.

    Returns:
        The solutions, with their losses on the last batch.

    Guarantees:
        Solution k is that of `train_state` and `step` alone with `rule(preferences[k])`, to rounding; for a
        population, with the weights that it gives to all. Two calls on halves of the batches are one call on all. Pure;
        random numbers in the losses need keys (`keyed`).

    Example:
        >>> losses = lambda w: torch.stack([(w - 1).square().sum(), (w + 1).square().sum()])
        >>> method = {"losses": losses, "rule": tchebycheff, "optimizer": sgd(0.1)}
        >>> front = fronts.train(torch.zeros(2), [()] * 100, preferences=fronts.lattice(2, 6), **method)
        >>> front.losses.shape, front[3].params
        (torch.Size([7, 2]), tensor([0., 0.]))
    """
    if not isinstance(compile, bool | str) or compile not in (False, True, "eager", "inductor", "cudagraphs"):
        cure = "'eager' runs the operators of a step without a compiler."
        refuse("compile", "False, True, 'eager', 'inductor' or 'cudagraphs'", compile, cure, ValueError)
    if chunk_size is not None:
        check_integer("chunk_size", chunk_size, 1, "It counts solutions.")
    start, preferences, marks, rule_of = _solutions(start, preferences, rule, chunk_size)
    first, remaining = _first_of(batches)
    last = arguments_of(first)
    method: dict[str, Any] = {"losses": losses, "optimizer": optimizer, "engine": engine, "has_aux": has_aux}

    def one(state: TrainState, mark: Tensor, *batch: Any) -> tuple[TrainState, StepInfo]:
        return step(state, *batch, aggregator=rule_of(mark), **method)

    def every(state: TrainState, *batch: Any) -> tuple[TrainState, StepInfo]:
        return torch.vmap(one, in_dims=(0, 0, *[None] * len(batch)), chunk_size=chunk_size)(state, marks, *batch)

    def begin(params: Params, buffers: Tree, mark: Tensor) -> TrainState:
        return train_state(params, *last, aggregator=rule_of(mark), scale=scale, buffers=buffers, **method)

    if isinstance(start, Front):
        states = start.states
    else:
        apart = isinstance(rule, Population)
        begin(tree_map(lambda x: x[0], start) if apart else start, buffers, marks[0])  # alone: tells what is wrong
        each = tree_map(lambda x: torch.stack([x] * len(marks)), buffers) if apart else buffers  # for batch norm
        states = torch.vmap(begin, in_dims=(0, 0, 0) if apart else (None, None, 0))(start, each, marks)
        # What does not depend on k is one value with stride 0: a step would be compiled for that, and once more.
        states = tree_map(lambda x: x.contiguous(), states)
    take = compiled(every, backend="inductor" if compile is True else compile) if compile else every

    def noted(states: TrainState, *batch: Any) -> tuple[TrainState, StepInfo]:
        nonlocal last
        last = batch
        with torch.no_grad():  # else parameters that the losses only close over keep the graph of all steps
            return take(states, *batch)

    batches = chain([first], remaining)
    states = fit(noted, states, batches, on_step=on_step, progress=progress, patience=patience)
    _, info = noted(states, *last)
    found = torch.cat([x.detach().reshape(len(preferences), -1).double() for x in tree_leaves(info.losses)], 1)
    return Front(states, found, preferences)


def _solutions(
    start: Params | Front, preferences: Tensor | None, rule: Any, chunk_size: int | None
) -> tuple[Params | Front, Tensor, Tensor, Callable[[Tensor], Aggregator]]:
    """The start, preferences (without entries for a population), the marks of solutions, and the rule of a mark."""
    known, leaves = start.preferences if isinstance(start, Front) else None, tree_leaves(start)
    if isinstance(rule, Population):
        for name, value in (("chunk_size", chunk_size), ("preferences", preferences)):
            if value is not None:
                refuse(name, "None for a population", value, "Leave it out.", ValueError)
        if known is None:
            leaves, _ = floating_leaves(start)
            if len(sizes := {len(x) if x.ndim else 0 for x in leaves}) != 1 or 0 in sizes:
                raise ValueError(
                    "train: start must be stacked parameters of a population, leaves [K, ...], found shapes "
                    f"{[list(x.shape) for x in leaves[:3]]}. Stack them: torch.func.stack_module_state(models)[0]."
                )
            start, known = detach_tree(start), leaves[0].detach().new_empty((len(leaves[0]), 0))
        return start, known, torch.arange(len(known), device=known.device), partial(member, rule)
    check_function("rule", rule, "Pass a function from a preference to a rule, such as tchebycheff, or a Population.")
    if preferences is not None or known is None:
        preferences = check_matrix("preferences", preferences, cure := "Take lattice(m, divisions).")
        if len(preferences) != (count := max(len(preferences), 1) if known is None else len(known)):
            refuse("preferences", f"{count}, one for each solution", len(preferences), cure, ValueError)
        at = leaves[0].device if leaves and isinstance(leaves[0], Tensor) else None  # where each step needs them
        known = preferences.detach().to(at)
    return start, known, known, rule


def _first_of(batches: Iterable[Any]) -> tuple[Any, Iterator[Any]]:
    """The first batch, and an iterator over the others."""
    check_batches(batches, "Of no arguments: [()].")
    for first in (remaining := iter(batches)):
        return first, remaining
    raise ValueError("train: batches must have an item, found none. Pass [()] for losses of params alone.")
