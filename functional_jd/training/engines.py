"""Engines as `step` takes them: from losses at a point to a direction."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from functional_jd.aggregation.aggregate import (
    Aggregator,
    combined,
    products_of_rows,
    pullback_of_scaled,
    start,
    updated,
    view_name,
    weigh,
)
from functional_jd.aggregation.views import gramian as look_at_gramian
from functional_jd.aggregation.views import (
    gramian_in,
    gramian_of_leaves,
    inner_products_suffice,
    needs_no_rows,
    norms,
    norms_suffice,
    view_of_products,
)
from functional_jd.aggregation.views import losses as look_at_losses
from functional_jd.core.heads import direction_of_rows, rows_of, split_heads, with_heads
from functional_jd.core.record_display import displayed_as, outline
from functional_jd.core.rows import at_least_float32
from functional_jd.core.sharding import any_sharded
from functional_jd.core.tree import all_finite, tree_leaves, tree_map
from functional_jd.core.types import Direction, Gramian, Jacobian, Losses, LossFunction, Tree, Weights
from functional_jd.engines.features import features_gramian
from functional_jd.engines.gramian.engine import products_for
from functional_jd.engines.jacobian import check_rows, jacobian_for
from functional_jd.engines.weighted import weighted_for
from functional_jd.objectives import Multitask
from functional_jd.objectives.buffers import Carried
from functional_jd.precision.autocast import autocast_disabled
from functional_jd.precision.loss_scale import multiplier, unscale
from functional_jd.precision.scale_state import ScaleState, is_scaled


class Problem(NamedTuple):
    """What an engine is given: losses at a point, and the rule.

    Attributes:
        losses: `losses(*args) -> (losses, (buffers, aux))`.
        args: the parameters, and what follows them.
        aggregator: the rule.
        memory: the rule's state; `None` before the first step.
        scale: the loss scale.
        where: the function that the user called, for errors and warnings.
    """

    losses: LossFunction
    args: tuple[Any, ...]
    aggregator: Aggregator
    memory: Tree
    scale: ScaleState
    where: str = "step"

    @property
    def factor(self) -> ScaleState | None:
        """The scale for the engines, `None` where nothing is scaled."""
        return self.scale if is_scaled(self.scale) else None


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


def _unchanged(tree: Tree) -> Tree:
    return tree


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
    replicate: Callable[[Tree], Tree] = _unchanged

    @property
    def is_replicated(self) -> bool:
        """Whether several replicas differentiate, each with a batch of its own."""
        return self.replicate is not _unchanged


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
    check_rows("jacobian_engine", mode, chunk_size)
    evaluate = partial(jacobian_for, has_aux=True, mode=mode, chunk_size=chunk_size)

    def rows(problem: Problem) -> tuple[Jacobian, Losses, Carried]:
        jacobian, (values, carried) = evaluate(problem.where, problem.losses, scale=problem.factor)(*problem.args)
        return jacobian, values, carried

    def differentiate(problem: Problem) -> EngineResult:
        jacobian, values, carried = rows(problem)
        if inner_products_suffice(problem.aggregator):
            leaves = tree_leaves(rows_of(jacobian))
            # The squares of finite float32 numbers are finite in float64. Without a scale it does not matter whether a
            # step is skipped for rows or for squares that overflow.
            if problem.factor is None or all(leaf.dtype.itemsize <= 4 for leaf in leaves):
                return _by_products(problem, values, carried, *_products_of_rows(problem, jacobian, leaves))
        jacobian, finite = unscale(problem.scale, jacobian)
        weights, memory, view = weigh(problem.aggregator, jacobian, problem.memory, losses=values, where=problem.where)
        direction = combined(problem.where, jacobian, weights)
        # The heads' gradient was finite, or is zero, as `unscale` left it.
        direction_finite = all_finite(direction_of_rows(direction, split_heads(jacobian)[1]))
        seen = gramian_in(problem.aggregator, view)
        return EngineResult(direction, weights, memory, values, finite, direction_finite, carried, seen)

    def begin(problem: Problem) -> Tree:
        jacobian, values, _ = rows(problem)
        return start(problem.aggregator, unscale(problem.scale, jacobian)[0], losses=values)

    return Engine(lambda *_: None, begin, differentiate)


def weighted_engine() -> Engine:
    """One backward pass with the weights as cotangent, for rules whose view is `no_gradients` or `losses`.

    Returns:
        An `Engine`, for `step` and `train_state`. With one scale per objective, the backward pass runs at the largest
        scale that serves all, and all flags are equal.

    Raises:
        ValueError: from `step` and `train_state`, for a rule with another view.

    Laws:
        The direction is that of `jacobian_engine`, up to the order of sums.
    """

    def differentiate(problem: Problem) -> EngineResult:
        losses = weighted_for(problem.where, problem.losses, has_aux=True, scale=problem.factor)
        (values, carried), pullback = losses(*problem.args)
        weights, memory, _ = weigh(
            problem.aggregator, loss_rows(values), problem.memory, losses=values, where=problem.where
        )
        # Weights that are not finite are the rule's doing, not an overflow: the scale must not back off for them.
        weights_finite = weights.isfinite().all()
        direction, finite = pullback(torch.where(weights_finite, weights, 0), last=True)
        return EngineResult(direction, weights, memory, values, finite, weights_finite, carried)

    return Engine(partial(_require, "weighted", needs_no_rows, "no gradients"), start_without_rows, differentiate)


def gramian_engine() -> Engine:
    """Inner products of the rows, without rows where layers allow, for rules whose view is `gramian` or `norms`, or one
    of them and the losses.

    Returns:
        An `Engine`, for `step` and `train_state`: see `gramian_fn`, and `squared_norms_fn` for rules that need norms.

    Raises:
        ValueError: from `step` and `train_state`, for a rule with another view.

    Laws:
        Weights and direction are those of `jacobian_engine`, up to the order of sums.
    """

    def look(problem: Problem) -> tuple[Losses, Carried, Tensor, Callable[[Tensor], Direction]]:
        kind = "norms" if norms_suffice(problem.aggregator) else "gramian"
        losses = products_for(problem.where, problem.losses, has_aux=True, scale=problem.factor, products=kind)
        products, (values, carried), pullback = losses(*problem.args)
        return values, carried, products, pullback

    def differentiate(problem: Problem) -> EngineResult:
        return _by_products(problem, *look(problem))

    def begin(problem: Problem) -> Tree:
        values, _, products, _ = look(problem)
        products, _ = _without_overflow(problem, products)
        with autocast_disabled(products):
            return problem.aggregator.init(view_of_products(problem.aggregator, products, values))

    needed = "inner products of rows"
    return Engine(partial(_require, "gramian", inner_products_suffice, needed), begin, differentiate)


def features_engine() -> Engine:
    """Inner products of the rows with respect to the features of `multitask` losses, for rules that need the Gramian.

    The heads are differentiated once per objective, the trunk once for all: the weighted sum of the rows goes through
    it. The Gramian is that of the features, and the weights are those for the features, not for the parameters:
    `"auto"` never takes this engine.

    Returns:
        An `Engine`, for `step` and `train_state`. With one scale per objective, an overflow in the trunk cannot be
        assigned to an objective: all scales back off.

    Raises:
        ValueError: from `step` and `train_state`, for losses that are not made by `multitask`, or a rule with another
            view.

    Laws:
        The direction of the trunk is `sum_i w_i J_i`, with w the rule's weights for `Z Z'` and Z the rows by feature.

    Source:
        Sener and Koltun, Multi-task learning as multi-objective optimization, NeurIPS 2018, arXiv 1810.04650, section
        3.3 (MGDA-UB).
    """

    def look(problem: Problem) -> tuple[Gramian, Losses, Carried, Callable[[Tensor], tuple[Direction, Tensor]]]:
        tasks = cast(Multitask, problem.losses)
        return features_gramian(problem.where, tasks, problem.args, problem.factor)

    def differentiate(problem: Problem) -> EngineResult:
        products, values, carried, pullback = look(problem)
        products, rows = _without_overflow(problem, products)
        with autocast_disabled(products):
            weights, memory = updated(problem.aggregator, products, problem.memory, problem.where)
        weights_finite = weights.isfinite().all()
        direction, passed = pullback(torch.where(weights_finite, weights, 0))
        # A row that overflowed is to blame for what comes after it.
        finite = rows & (passed | ~rows.all())
        return EngineResult(direction, weights, memory, values, finite, weights_finite, carried, products)

    def begin(problem: Problem) -> Tree:
        products, _ = _without_overflow(problem, look(problem)[0])
        with autocast_disabled(products):
            return problem.aggregator.init(products)

    def check(where: str, problem: Problem) -> None:
        if not isinstance(problem.losses, Multitask):
            raise ValueError(
                f"{where}: features_engine() serves losses with features, found {type(problem.losses).__name__}. Make "
                "them with multitask(features, heads), or use engine='auto'."
            )
        _require("features", _sees_gramian, "the Gramian", where, problem)

    return Engine(check, begin, differentiate)


def start_without_rows(problem: Problem) -> Tree:
    """The initial state of a rule that needs no gradients."""
    (values, _), _ = weighted_for(problem.where, problem.losses, has_aux=True, scale=problem.factor)(*problem.args)
    return start(problem.aggregator, loss_rows(values), losses=values)


def loss_rows(values: Losses) -> Tensor:
    """Rows enough for the views that need the number of rows, or the losses: float64 `[m]`."""
    return look_at_losses(None, losses=values)


def _by_products(
    problem: Problem, values: Losses, carried: Carried, products: Tensor, pullback: Callable[[Tensor], Direction]
) -> EngineResult:
    """The rule on the Gramian or the norms, and the pullback of its weights."""
    products, rows = _without_overflow(problem, products)
    with autocast_disabled(products):
        view = view_of_products(problem.aggregator, products, values)
        weights, memory = updated(problem.aggregator, view, problem.memory, problem.where)
    direction, seen = pullback(weights), gramian_in(problem.aggregator, view)
    # Where the heads' gradient is not finite, no row is.
    weighted = direction["shared"] if isinstance(problem.losses, Multitask) else direction
    return EngineResult(direction, weights, memory, values, rows, all_finite(weighted), carried, seen)


def _without_overflow(problem: Problem, products: Tensor) -> tuple[Tensor, Tensor]:
    """The Gramian or its diagonal with zeros for rows that overflowed, and flags of the rows that did not, of the shape
    of the scale.
    """
    # Half the ops of `isfinite`, which is not one of its own.
    rows = (products if products.ndim == 1 else products.diagonal()).abs() < torch.inf
    # As with unscaled rows, the rule never sees what is not finite, nor any row where one scale serves all; the
    # direction does.
    if not problem.scale.scale.ndim:
        finite = rows.all()
        return torch.where(finite, products, 0), finite
    return torch.where(rows if products.ndim == 1 else rows[:, None] & rows, products, 0), rows


def _products_of_rows(
    problem: Problem, jacobian: Jacobian, leaves: list[Tensor]
) -> tuple[Tensor, Callable[[Tensor], Direction]]:
    """The unscaled Gramian of scaled rows, or its diagonal, and their pullback. The scale goes into products and
    weights: no pass over the rows, whose leaves these are.
    """
    rows, heads = split_heads(jacobian)
    is_scaled = problem.factor is not None
    if norms_suffice(problem.aggregator) or any_sharded(leaves):
        whole = with_heads(tree_map(at_least_float32, rows), heads)
        products = norms(whole).square() if norms_suffice(problem.aggregator) else gramian_of_leaves(leaves)
        pullback = pullback_of_scaled(problem.where, whole) if is_scaled else partial(combined, problem.where, whole)
    else:
        products, pullback = products_of_rows(problem.where, jacobian, is_scaled)
    if heads:  # an overflow there belongs to no row
        products = torch.where(all_finite(heads), products, torch.nan)
    if not is_scaled:
        return products, pullback
    inverse = multiplier(problem.scale).double().reciprocal().expand(len(products))
    factors = inverse if products.ndim == 1 else inverse[:, None]
    return products * factors * inverse, lambda weights: pullback(weights.double() * inverse)


def _sees_gramian(aggregator: Aggregator) -> bool:
    return aggregator.view is look_at_gramian


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
