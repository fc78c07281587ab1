"""Any losses: a function of parameters and a batch."""

from typing import Any

from torch import Tensor

from functional_jd.core.tree import floating_leaves, tree_unflatten
from functional_jd.engines.evaluate import (
    Options,
    dense_rows,
    element_count,
    evaluate_losses,
    row_scales,
    select_arguments,
)
from functional_jd.engines.gramian.assemble import gramian_of_uses, recorded, shaped
from functional_jd.engines.gramian.recorder import LayerRecorder
from functional_jd.engines.kinds.kind import Kind
from functional_jd.engines.kinds.results import Args, FoundGramian, FoundJacobian, FoundWeighted, Pullback, PulledRows
from functional_jd.engines.row_vjps import jacobian_rows, unscaled_rows
from functional_jd.engines.vjp import vjp
from functional_jd.engines.weighted_cotangent import flags, unscaled_direction, weighted_cotangent


def jacobian(losses: Any, args: Args, options: Options) -> FoundJacobian:
    """The rows of all losses."""
    chosen, rebuild = select_arguments(options.argnums, args, options.where)
    leaves, structure = floating_leaves(chosen, options.where)

    def f(inputs: list[Tensor]) -> tuple[list[Tensor], Any]:
        return evaluate_losses(losses, rebuild(tree_unflatten(structure, inputs)), options)

    point = vjp(f, leaves, differentiable=options.differentiable, where=options.where)
    m = element_count(point.outputs)
    factors = row_scales(options.scale, m, point.outputs[0], options.where)
    rows = jacobian_rows(point, factors, options)
    rows = rows if options.scale is None else unscaled_rows(rows, options.scale)
    return tree_unflatten(structure, dense_rows(rows, leaves, m)), *point.extra


def gramian(losses: Any, args: Args, options: Options) -> FoundGramian:
    """The Gramian of all losses, layer by layer."""
    chosen, rebuild = select_arguments(options.argnums, args, options.where)
    leaves, structure = floating_leaves(chosen, options.where)

    def f(points: list[Tensor], recorder: LayerRecorder) -> tuple[list[Tensor], Any]:
        return evaluate_losses(losses, rebuild(tree_unflatten(structure, points)), options, recorder)

    point, recording = recorded(f, leaves, options)
    m = element_count(point.outputs)
    rows = jacobian_rows(point, row_scales(options.scale, m, point.outputs[0], options.where), options)
    rows = rows if options.scale is None else unscaled_rows(rows, options.scale)
    products, pullback = gramian_of_uses(recording, rows, leaves, m, options)
    return products, *point.extra, shaped(pullback, structure)


def weighted(losses: Any, args: Args, options: Options) -> FoundWeighted:
    """One backward pass with the weights as cotangent."""
    params, *batch = args
    leaves, structure = floating_leaves(params, options.where)

    def f(inputs: list[Tensor]) -> tuple[list[Tensor], Any]:
        return evaluate_losses(losses, (tree_unflatten(structure, inputs), *batch), options)

    point = vjp(f, leaves, differentiable=options.differentiable, where=options.where)

    def rows(weights: Tensor, *, last: bool = False) -> PulledRows:
        cotangent, common = weighted_cotangent(point.outputs, weights, options)
        direction, finite = unscaled_direction(common, point.pullback(cotangent, last=last), leaves, structure)
        return direction, flags(options, finite)

    return *point.extra, Pullback(rows)


PLAIN = Kind(jacobian, gramian, weighted, over_shards=lambda losses, chosen, enter: enter(losses, chosen))
"""The kind of a plain function of the parameters, for a kind of yours that differs from it in some entries."""
