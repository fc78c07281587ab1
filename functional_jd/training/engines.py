"""Engines as `step` takes them: from losses at a point to a direction."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from functional_jd.aggregation.aggregate import Aggregator, combine, start, view_name, weigh
from functional_jd.aggregation.views import gramian as look_at_gramian
from functional_jd.aggregation.views import losses as look_at_losses
from functional_jd.aggregation.views import needs_no_rows
from functional_jd.core.multitask import direction_of_rows, split_heads
from functional_jd.core.record_display import displayed_as, outline
from functional_jd.core.tree import all_finite
from functional_jd.core.types import Direction, Gramian, Jacobian, Losses, LossFunction, Tree, Weights
from functional_jd.engines.gramian.engine import gramian_fn
from functional_jd.engines.jacobian import jacobian_fn
from functional_jd.engines.weighted import weighted_fn
from functional_jd.objectives.buffers import Carried
from functional_jd.precision.autocast import autocast_disabled
from functional_jd.precision.loss_scale import ScaleState, unscale


class Problem(NamedTuple):
    """What an engine is given: losses at a point, and the rule.

    Attributes:
        losses: `losses(*args) -> (losses, (buffers, aux))`.
        args: the parameters, and what follows them.
        aggregator: the rule.
        memory: the rule's state; `None` before the first step.
        scale: the loss scale.
    """

    losses: LossFunction
    args: tuple[Any, ...]
    aggregator: Aggregator
    memory: Tree
    scale: ScaleState


class EngineResult(NamedTuple):
    """What an engine finds: all that the optimizer and the next step need.

    Attributes:
        direction: a pytree like params.
        weights: the weight of each row.
        aggregator: the rule's next state.
        losses: the values, unscaled.
        finite: bool with the scale's shape: which rows did not overflow.
        direction_finite: bool `[]`: whether the weights, and with them the direction, are finite. If they are not while
            all rows are, no other scale would help: the rule refused, or a sum overflowed.
        carried: `(buffers, aux)` from the losses.
        gramian: `[m, m]` as the rule received it; `()` for rules that need something else.
    """

    direction: Direction
    weights: Weights
    aggregator: Tree
    losses: Losses
    finite: Tensor
    direction_finite: Tensor
    carried: Carried
    gramian: Gramian | tuple[()] = ()


@displayed_as(outline)
class Engine(NamedTuple):
    """How a step differentiates. `jacobian_engine`, `gramian_engine` and `weighted_engine` make one.

    Attributes:
        check: `check(where, problem)` raises ValueError unless the engine gives the rule what it needs.
        start: `start(problem)` returns the rule's initial state.
        differentiate: `differentiate(problem)` returns an `EngineResult`.
        replicate: `replicate(tree)` returns the tensors that must be equal on all replicas, equal.
    """

    check: Callable[[str, Problem], None]
    start: Callable[[Problem], Tree]
    differentiate: Callable[[Problem], EngineResult]
    replicate: Callable[[Tree], Tree] = lambda tree: tree


def jacobian_engine(mode: str = "auto", chunk_size: int | None = None) -> Engine:
    """All rows, for every rule.

    Args:
        mode: how rows are differentiated, as for `jacobian_fn`.
        chunk_size: the number of rows differentiated at once, as for `jacobian_fn`.

    Returns:
        An `Engine`, for `step` and `train_state`.

    Raises:
        ValueError: an unknown mode, or a chunk size below 1.
    """
    evaluate = partial(jacobian_fn, has_aux=True, mode=mode, chunk_size=chunk_size)
    evaluate(lambda _: None)  # a mistake is named here

    def rows(problem: Problem) -> tuple[Jacobian, Tensor, Losses, Carried]:
        jacobian, (values, carried) = evaluate(problem.losses, scale=problem.scale)(*problem.args)
        return *unscale(problem.scale, jacobian), values, carried

    def differentiate(problem: Problem) -> EngineResult:
        jacobian, finite, values, carried = rows(problem)
        weights, memory, view = weigh(problem.aggregator, jacobian, problem.memory, losses=values)
        direction = combine(jacobian, weights)
        # The heads' gradient was finite, or is zero, as `unscale` left it.
        direction_finite = all_finite(direction_of_rows(direction, split_heads(jacobian)[1]))
        seen = view if problem.aggregator.view is look_at_gramian else ()
        return EngineResult(direction, weights, memory, values, finite, direction_finite, carried, seen)

    def begin(problem: Problem) -> Tree:
        jacobian, _, values, _ = rows(problem)
        return start(problem.aggregator, jacobian, losses=values)

    return Engine(lambda *_: None, begin, differentiate)


def weighted_engine() -> Engine:
    """One backward pass with the weights as cotangent, for rules whose view is `no_gradients` or `losses`.

    Returns:
        An `Engine`, for `step` and `train_state`. With one scale per objective, the backward pass runs at the largest
        scale that serves all, and all flags are equal.
    """

    def differentiate(problem: Problem) -> EngineResult:
        losses = weighted_fn(problem.losses, has_aux=True, scale=problem.scale)
        (values, carried), pullback = losses(*problem.args)
        weights, memory, _ = weigh(problem.aggregator, loss_rows(values), problem.memory, losses=values)
        # Weights that are not finite are the rule's doing, not an overflow: the scale must not back off for them.
        weights_finite = weights.isfinite().all()
        direction, finite = pullback(torch.where(weights_finite, weights, 0), last=True)
        return EngineResult(direction, weights, memory, values, finite, weights_finite, carried)

    return Engine(partial(_require, "weighted", needs_no_rows, "no gradients"), start_without_rows, differentiate)


def gramian_engine() -> Engine:
    """Inner products of the rows, without rows where layers allow, for rules whose view is `gramian`.

    Returns:
        An `Engine`, for `step` and `train_state`: see `gramian_fn`.
    """

    def differentiate(problem: Problem) -> EngineResult:
        products, rows, values, carried, pullback = _gramian_without_overflow(problem)
        with autocast_disabled(products):
            weights, memory = problem.aggregator.update(products, problem.memory)
        direction = pullback(weights)
        finite = rows if problem.scale.scale.ndim else rows.all()
        return EngineResult(
            direction, weights, memory, values, finite, all_finite(direction), carried, gramian=products
        )

    def begin(problem: Problem) -> Tree:
        products, *_ = _gramian_without_overflow(problem)
        with autocast_disabled(products):
            return problem.aggregator.init(products)

    serves = lambda aggregator: aggregator.view is look_at_gramian
    return Engine(partial(_require, "gramian", serves, "the Gramian"), begin, differentiate)


def start_without_rows(problem: Problem) -> Tree:
    """The initial state of a rule that needs no gradients."""
    (values, _), _ = weighted_fn(problem.losses, has_aux=True, scale=problem.scale)(*problem.args)
    return start(problem.aggregator, loss_rows(values), losses=values)


def loss_rows(values: Losses) -> Tensor:
    """Rows enough for the views that need the number of rows, or the losses: float64 `[m]`."""
    return look_at_losses(None, losses=values)


def _gramian_without_overflow(
    problem: Problem,
) -> tuple[Gramian, Tensor, Losses, Carried, Callable[[Tensor], Direction]]:
    """The Gramian with zeros for rows that overflowed, flags of the rows that did not, the losses, what they carry, and
    the pullback.
    """
    losses = gramian_fn(problem.losses, has_aux=True, scale=problem.scale)
    products, (values, carried), pullback = losses(*problem.args)
    rows = products.diagonal().isfinite()
    # As with unscaled rows, the rule never sees what is not finite, nor any row where one scale serves all; the
    # direction does.
    rows = rows if problem.scale.scale.ndim else rows.all().expand_as(rows)
    return torch.where(rows[:, None] & rows, products, 0), rows, values, carried, pullback


def _require(
    name: str,
    serves: Callable[[Aggregator], bool],
    needed: str,
    where: str,
    problem: Problem,
) -> None:
    if not serves(problem.aggregator):
        raise ValueError(
            f"{where}: engine={name!r} serves rules that need {needed}, found one that needs "
            f"{view_name(problem.aggregator)}. Use engine='auto' or 'jacobian'."
        )


ENGINES: dict[str, Engine] = {
    "jacobian": jacobian_engine(),
    "gramian": gramian_engine(),
    "weighted": weighted_engine(),
}
"""The engines of a step, by name; `"auto"` is `chosen_engine`."""
