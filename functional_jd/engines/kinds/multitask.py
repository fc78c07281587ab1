"""Several tasks on one trunk: rows for the trunk, one summed gradient for the heads."""

from collections.abc import Callable, Sequence
from functools import partial
from itertools import compress
from typing import Any, NamedTuple, TypeAlias, cast

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from functional_jd.aggregation.combine import products_of_rows
from functional_jd.core.float64 import widest
from functional_jd.core.foreach import times
from functional_jd.core.heads import MultitaskJacobian, nan_unless_finite
from functional_jd.core.rows import as_matrix, at_least_float32, magnitudes, per_row
from functional_jd.core.tree import TENSORS, all_finite, floating_leaves, own_containers, tree_flatten, tree_leaves
from functional_jd.core.types import Direction, Params, Tree
from functional_jd.engines.choose import choose_heads
from functional_jd.engines.evaluate import called, check_weights, element_count, evaluate_losses, row_scales
from functional_jd.engines.gramian.assemble import gramian_of_uses, recorded
from functional_jd.engines.gramian.recorder import Recording
from functional_jd.engines.kinds.kind import (
    Args,
    FoundGramian,
    FoundJacobian,
    FoundWeighted,
    Kind,
    Pullback,
    finite_rows,
)
from functional_jd.engines.plan import Plan, RowsNeededError
from functional_jd.engines.row_vjps import (
    Rows,
    blamed,
    by_mode,
    by_output,
    dense,
    gradients_one_by_one,
    jacobian_rows,
    stack_rows,
    unscaled,
    vjp_rows,
    weighted_cotangent,
)
from functional_jd.engines.vjp import Vjp, vjp
from functional_jd.objectives import Multitask
from functional_jd.objectives.buffers import CarryingLosses, Extras, FeaturesAndBuffers, checked_buffers, with_carried
from functional_jd.precision.autocast import autocast_disabled
from functional_jd.precision.loss_scale import common_inverse, inverse_of, unscaled_rows
from functional_jd.torch_compat.autograd_graph import graph_nodes
from functional_jd.torch_compat.callers import here
from functional_jd.torch_compat.torch_internals import under_transform

Parted: TypeAlias = tuple[Rows, Rows]
"""The heads' gradient, by leaf `[*p]`, and the rows of the features, by feature `[m, *z]`."""


class _Point(NamedTuple):
    """A trunk and its heads at a point."""

    trunk: Vjp  # from the shared parameters to the differentiable features
    heads: Vjp  # from the heads' parameters, and behind them those features, to the losses
    shared: tuple[list[Tensor], Any]
    own: tuple[list[Tensor], Any]
    recording: Recording | None  # what the layers of the trunk recorded, if it was asked for


def jacobian(losses: Multitask, args: Args, plan: Plan) -> FoundJacobian:
    """Rows of the trunk, by one pass through the heads and m through the trunk."""
    point = _evaluate(losses, args, plan)
    factors, sums, features = _parted(point, plan)
    shared, structure = point.shared
    rows = dense(vjp_rows(point.trunk, features, plan), shared, len(factors))
    heads, found = _heads(point, sums, plan, wide=plan.scale is not None), point.heads.extra
    del point, sums, features  # the graph goes before the rows are divided
    rows = rows if plan.scale is None else unscaled_rows(rows, plan.scale)
    return MultitaskJacobian(structure.unflatten(rows), heads), *found


def _heads(point: _Point, sums: Rows, plan: Plan, *, wide: bool = True) -> Tree:
    """The heads' gradient, divided by a scale that all losses share; in at least float32 if it is `wide`."""
    own, tree = point.own
    found = dense(sums, own)
    if not wide:
        return tree.unflatten([g if g.dtype is x.dtype else g.to(x.dtype) for g, x in zip(found, own, strict=True)])
    found = list(map(at_least_float32, found))
    if found and plan.scale is not None and not plan.scale.ndim:
        found = times(found, inverse_of(plan.scale, found[0].dtype))
    return tree.unflatten(found)


def gramian(losses: Multitask, args: Args, plan: Plan) -> FoundGramian:
    """The Gramian of the trunk, layer by layer, and the heads' gradient."""
    by_shapes = plan._replace(mode="auto")
    point = _evaluate(losses, args, by_shapes, record=True)
    if any(x.is_complex() for x in point.trunk.outputs):
        raise RowsNeededError("features are complex numbers")
    factors, sums, features = _parted(point, by_shapes)
    heads, rows = _heads(point, sums, plan), vjp_rows(point.trunk, features, plan)
    products, pull = gramian_of_uses(cast(Recording, point.recording), rows, *point.shared, len(factors), plan)
    if plan.products != "factors":
        products = nan_unless_finite(products, (heads,))
    return products, *point.heads.extra, lambda weights: {"shared": pull(weights), "heads": heads}


def features(losses: Multitask, args: Args, plan: Plan) -> FoundGramian:
    """Products of rows with respect to the features, and one pass through the trunk for their weighted sum."""
    point = _evaluate(losses, args, plan)
    if any(x.is_complex() for x in point.trunk.outputs):
        cure = "Return torch.view_as_real(features), or use engine='jacobian'."
        raise ValueError(f"{here()}: features must be real, found complex ones. {cure}")
    products, pullback = _by_features(point, plan, "gramian")
    return products, *point.heads.extra, pullback


def weighted(losses: Multitask, args: Args, plan: Plan) -> FoundWeighted:
    """One backward pass for the trunk, one for the heads."""
    point = _evaluate(losses, args, plan)
    below, above, (shared, shared_structure), (own, own_structure), _ = point
    if plan.scale is not None and plan.scale.ndim and not any(x.is_complex() for x in below.outputs):
        return *above.extra, _by_features(point, plan, "magnitudes")[1]
    m, of_heads = element_count(above.outputs), []

    # Twice through the heads, but each time only to what is wanted: no weight's gradient is computed twice.
    def pullback(weights: Tensor, *, last: bool = False) -> tuple[Direction, Tensor | None]:
        with autocast_disabled():
            cotangent, common = weighted_cotangent(above.outputs, weights, plan)
            if plan.groups is None or not of_heads:  # weights have no say in it: one pass for all groups of a step
                ones = above.outputs[0].new_ones(m) if common is None else common.expand(m)
                of_heads[:] = dense(above.pullback(by_output(above.outputs, ones), slice(len(own))), own)
            features = above.pullback(cotangent, slice(len(own), None), last=last)
            trunk = dense(below.pullback(features, last=last), shared)
            found, finite = unscaled(common, [*of_heads, *trunk], plan)
        heads = own_structure.unflatten(found[: len(own)])
        return {"shared": shared_structure.unflatten(found[len(own) :]), "heads": heads}, finite

    return *above.extra, pullback


def _by_features(point: _Point, plan: Plan, needed: str) -> tuple[Tensor, Pullback]:
    """The result of `products_of_rows` for the rows by feature, and the pullback of weights. The heads and the features
    take the scale of each loss, one loss after the other, and show which overflow. The trunk takes one pass at a common
    scale, whose overflow has no owner.
    """
    scales, sums, rows = _parted(point, plan, masked=needed == "gramian")  # what has magnitudes tells by itself
    heads, (shared, structure) = _heads(point, sums, plan), point.shared
    reached, found_structure = tree_flatten([row for row in rows if row is not None])
    by_row, wide = needed != "gramian", widest(scales.device)
    if reached:
        products, pull = products_of_rows(reached, found_structure, needed)
    else:
        products, pull = torch.zeros_like(scales if by_row else scales.diag(), dtype=wide), lambda _: []
    if not by_row and plan.scale is not None:
        products = products / scales.to(wide)[:, None] / scales.to(wide)
    rows_finite = finite_rows(products, 0 if plan.scale is None else plan.scale.ndim)

    def pullback(weights: Tensor, *, last: bool = False) -> tuple[Direction, Tensor]:
        check_weights(weights, len(scales))
        own = weights.to(torch.promote_types(products.dtype, scales.dtype)) / scales
        inverse = common_inverse(own)
        summed = iter(pull(own / inverse))
        pairs = zip(rows, point.trunk.outputs, strict=True)
        cotangent = [None if row is None else next(summed).to(y.dtype) for row, y in pairs]
        found = map(at_least_float32, dense(point.trunk.pullback(cotangent, last=last), shared))
        direction = {"shared": structure.unflatten(times(list(found), inverse)), "heads": heads}
        return direction, torch.where(rows_finite.all(), all_finite(direction), rows_finite)

    return products, pullback


def _evaluate(losses: Multitask, args: Args, plan: Plan, *, record: bool = False) -> _Point:
    """Evaluate the losses of a trunk and its heads once, with a vector-Jacobian product of each."""
    params, *batch = args
    if not TENSORS.issuperset(map(type, batch)):  # the heads see what the trunk adds to them
        batch = [*map(own_containers, batch)]
    shared_params, heads_params = losses.split(params)
    shared, shared_structure = floating_leaves(shared_params, part=" (shared)")
    # Heads may be losses only, without a parameter of their own.
    own, own_structure = floating_leaves(heads_params, part=" (heads)", some=False)
    inside: list[Any] = []
    hidden = plan.differentiable and under_transform()  # where tensors do not tell whether they require grad

    def trunk(inputs: list[Tensor], record: Callable[..., Any] | None = None) -> tuple[list[Tensor], Any]:
        recorder = None if record is None else record(inputs)
        found = called(losses.features, (shared_structure.unflatten(inputs), *batch), plan, recorder)
        through = tree_leaves(found.features if isinstance(found, FeaturesAndBuffers) else found)
        moving = [_moves(x, hidden) for x in through]  # others, such as targets, are constants of the heads
        inside[:] = [moving, inputs if recorder is None else [*inputs, *recorder.constants]]
        return [*compress(through, moving)], found

    below, recording = recorded(trunk, shared, plan) if record else (vjp(trunk, shared, plan), None)

    def top(inputs: list[Tensor]) -> tuple[list[Tensor], Any]:
        (moving, points), n = inside, len(inside[0])  # behind n features there are buffers
        leaves, structure = tree_flatten(below.extra)
        rest = iter(inputs[len(own) :])
        leaves[:n] = [next(rest) if moves else x for x, moves in zip(leaves[:n], moving, strict=True)]
        mine = own_structure.unflatten(inputs[: len(own)])
        outputs, extra = evaluate_losses(losses.heads, (mine, structure.unflatten(leaves), *batch), plan)
        if below.inputs:  # a graph of plain autograd
            carried = [x for x in leaves[n:] if isinstance(x, Tensor) and x.requires_grad]
            _refuse_other_ways(outputs, [*inputs[len(own) :], *carried], points)
        return outputs, extra

    above = vjp(top, own + below.outputs, plan, scalars=plan.mode in ("auto", "loop"))
    return _Point(below, above, (shared, shared_structure), (own, own_structure), recording)


def _refuse_other_ways(values: list[Tensor], features: list[Tensor], trunk: Sequence[Tensor]) -> None:
    """The gradient of the trunk goes through the features. Other outputs of the trunk would have none."""
    leaves = [x for x in values if x.requires_grad]
    trunk_leaves = {id(x) for x in trunk if x.is_leaf}
    trunk_nodes = {x.grad_fn for x in trunk if not x.is_leaf}
    for node in graph_nodes(leaves, {get_gradient_edge(x).node for x in features}):
        if node in trunk_nodes or id(getattr(node, "variable", None)) in trunk_leaves:
            found = "the losses of multitask heads must depend on the trunk by its features only, found another way"
            cure = "Return from features(...) all that they use, a loss that a module keeps too, or write plain losses."
            raise ValueError(f"{here()}: {found}. {cure}")


def _parted(point: _Point, plan: Plan, *, masked: bool = True) -> tuple[Tensor, Rows, Rows]:
    """The scale of every row `[m]`, the heads' gradient by leaf, and the rows `[m, *z]` by feature. With a scale each,
    the heads' is divided by them. A loss that is not finite there has NaN as rows; `masked`: the sum leaves it out.
    """
    above, n_heads = point.heads, len(point.own[0])
    factors = row_scales(plan, element_count(above.outputs), above.outputs[0])

    def together() -> Parted:
        rows = jacobian_rows(above, factors, plan._replace(mode="vmap"))
        heads, features = rows[:n_heads], rows[n_heads:]
        if each:
            heads = unscaled_rows(heads, factors)
            present = [as_matrix(row) for row in heads if row is not None]
            if present and any(row is not None for row in features):
                largest = torch.stack(list(map(magnitudes, present))).amax(0)
                heads = [
                    None if row is None else torch.where(per_row(largest < torch.inf, row), row, 0) for row in heads
                ]
                features = blamed(largest, features)
        return [None if row is None else at_least_float32(row).sum(0) for row in heads], features

    def one_by_one() -> Parted:
        mine: list[Rows] = []
        features: list[Rows] = []
        for gradient in gradients_one_by_one(above, factors):
            mine.append(gradient[:n_heads])
            features.append(gradient[n_heads:])
        largest = None
        if each:
            blames = any(z is not None for row in features for z in row)
            mine, largest = _without_scales(mine, factors, blames=blames, masked=masked)
        sums: Rows = [None] * n_heads
        for own in mine:
            for index, g in enumerate(own):
                if g is not None:
                    g = g if g.dtype.itemsize >= 4 else g.float()
                    sums[index] = g if (others := sums[index]) is None else others + g
        rows = stack_rows(features, len(factors))
        return sums, rows if largest is None else blamed(largest, rows, own=True)

    each = plan.scale is not None and plan.scale.ndim > 0
    mode = choose_heads(above, point.own[0], len(factors), plan)
    with autocast_disabled():
        if mode == "apart":
            return factors, *_heads_apart(above, n_heads, factors)
        return factors, *by_mode(mode, together, one_by_one, plan)


def _without_scales(
    gradients: list[Rows], factors: Tensor, *, blames: bool, masked: bool
) -> tuple[list[Rows], Tensor | None]:
    """The gradients of the heads, loss by loss, divided by their scales `[m]`, in as few launches for many losses as
    for one. With `blames` the magnitudes, and `masked` zeros for a loss whose gradient is not finite, which the sum
    could not tell.
    """
    found = [at_least_float32(g) for row in gradients for g in row if g is not None]
    if not found:
        return gradients, None
    sizes = [sum(g.numel() for g in row if g is not None) for row in gradients]
    joined = torch.cat([g.reshape(-1) for g in found])
    alike = len(set(sizes)) == 1
    joined = joined.view(len(sizes), -1) if alike else joined

    def by_element(numbers: Tensor) -> Tensor:
        return numbers[:, None] if alike else torch.cat(list(map(Tensor.expand, numbers.unbind(), sizes)))

    largest = None
    if blames:
        largest = magnitudes(joined) if alike else torch.cat([magnitudes(own[None]) for own in joined.split(sizes)])
        joined = torch.where(by_element(largest < torch.inf), joined, 0) if masked else joined
    parts = (joined / by_element(factors)).reshape(-1).split([g.numel() for g in found])
    rest = iter([part.view(g.shape) for part, g in zip(parts, found, strict=True)])
    return [[None if g is None else next(rest) for g in row] for row in gradients], largest


def _heads_apart(above: Vjp, n_heads: int, factors: Tensor) -> Parted:
    """The heads' gradient by one pass, and the features' rows by one pass from each loss, which is one number."""
    cotangent = by_output(above.outputs, factors)
    sums = above.pullback(cotangent, slice(n_heads)) if n_heads else []
    gradients = [
        above.pullback([c if other == own else None for other, c in enumerate(cotangent)], slice(n_heads, None))
        for own in range(len(cotangent))
    ]
    return sums, stack_rows(gradients, len(factors))


def _moves(x: Any, hidden: bool) -> bool:
    return isinstance(x, Tensor) and (x.requires_grad or (hidden and (x.is_floating_point() or x.is_complex())))


def _over_shards(losses: Multitask, chosen: Sequence[Tree], enter: Callable[..., Any]) -> Multitask:
    shared, heads = losses.split(chosen[0])
    return Multitask(
        enter(losses.features, [shared], "shared.", returns_losses=False), enter(losses.heads, [heads], "heads.")
    )


def _carrying(losses: Multitask, batch: Args, extras: Extras) -> CarryingLosses:
    """The trunk's buffers go on to the heads."""
    if not extras.takes_buffers:
        heads = lambda own, features, *batch: with_carried(losses.heads(own, features, *batch), extras)
        return CarryingLosses(Multitask(losses.features, heads), batch, partial(checked_buffers, extras))

    def features_and_buffers(shared: Params, *args: Any) -> FeaturesAndBuffers:
        found = losses.features(shared, *args)
        if not (isinstance(found, tuple) and len(cast("tuple[Any, ...]", found)) == 2):
            raise TypeError(
                f"{here()}: with buffers, features must return a pair (features, buffers), found "
                f"{type(found).__name__}. Return the buffers unchanged where the trunk has none."
            )
        features, buffers = cast("tuple[Any, Any]", found)
        return FeaturesAndBuffers(features, buffers)

    def heads_with_buffers(own: Params, found: FeaturesAndBuffers, _: Tree, *batch: Any) -> Any:
        return with_carried(losses.heads(own, found.features, found.buffers, *batch), extras)

    carrying = Multitask(features_and_buffers, heads_with_buffers)
    return CarryingLosses(carrying, (extras.buffers, *batch), partial(checked_buffers, extras))


MULTITASK = Kind(
    jacobian,
    gramian,
    weighted,
    features,
    row_params=Multitask.shared,
    # A head is mostly a weight and a bias: half of the leaves of the heads, at least four.
    expected_m=lambda _losses, _batch, others: max(4, others // 2),
    carrying=_carrying,
    over_shards=_over_shards,
)
