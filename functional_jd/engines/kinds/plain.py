"""Any losses: a function of parameters and a batch."""

from typing import Any

from torch import Tensor

from functional_jd.core.tree import floating_leaves, tree_unflatten
from functional_jd.engines.evaluate import dense_rows, element_count, evaluate_losses, row_scales, select_arguments
from functional_jd.engines.gramian.assemble import gramian_of_uses, recorded, shaped
from functional_jd.engines.gramian.recorder import LayerRecorder
from functional_jd.engines.kinds.kind import Kind
from functional_jd.engines.kinds.results import Args, FoundGramian, FoundJacobian, FoundWeighted, Pullback, PulledRows
from functional_jd.engines.plan import Plan
from functional_jd.engines.row_vjps import jacobian_rows, unscaled_rows
from functional_jd.engines.vjp import vjp
from functional_jd.engines.weighted_cotangent import flags, unscaled_direction, weighted_cotangent


def jacobian(losses: Any, args: Args, plan: Plan) -> FoundJacobian:
    """The rows of all losses."""
    chosen, rebuild = select_arguments(plan.argnums, args, plan.where)
    leaves, structure = floating_leaves(chosen, plan.where)

    def f(inputs: list[Tensor]) -> tuple[list[Tensor], Any]:
        return evaluate_losses(losses, rebuild(tree_unflatten(structure, inputs)), plan)

    point = vjp(f, leaves, differentiable=plan.differentiable, where=plan.where)
    m = element_count(point.outputs)
    factors = row_scales(plan.scale, m, point.outputs[0], plan.where)
    rows = jacobian_rows(point, factors, plan)
    rows = rows if plan.scale is None else unscaled_rows(rows, plan.scale)
    return tree_unflatten(structure, dense_rows(rows, leaves, m)), *point.extra


def gramian(losses: Any, args: Args, plan: Plan) -> FoundGramian:
    """The Gramian of all losses, layer by layer."""
    chosen, rebuild = select_arguments(plan.argnums, args, plan.where)
    leaves, structure = floating_leaves(chosen, plan.where)

    def f(points: list[Tensor], recorder: LayerRecorder) -> tuple[list[Tensor], Any]:
        return evaluate_losses(losses, rebuild(tree_unflatten(structure, points)), plan, recorder)

    point, recording = recorded(f, leaves, plan)
    m = element_count(point.outputs)
    rows = jacobian_rows(point, row_scales(plan.scale, m, point.outputs[0], plan.where), plan)
    rows = rows if plan.scale is None else unscaled_rows(rows, plan.scale)
    products, pullback = gramian_of_uses(recording, rows, leaves, m, plan)
    return products, *point.extra, shaped(pullback, structure)


def weighted(losses: Any, args: Args, plan: Plan) -> FoundWeighted:
    """One backward pass with the weights as cotangent."""
    params, *batch = args
    leaves, structure = floating_leaves(params, plan.where)

    def f(inputs: list[Tensor]) -> tuple[list[Tensor], Any]:
        return evaluate_losses(losses, (tree_unflatten(structure, inputs), *batch), plan)

    point = vjp(f, leaves, differentiable=plan.differentiable, where=plan.where)

    def rows(weights: Tensor, *, last: bool = False) -> PulledRows:
        cotangent, common = weighted_cotangent(point.outputs, weights, plan)
        direction, finite = unscaled_direction(common, point.pullback(cotangent, last=last), leaves, structure)
        return direction, flags(plan, finite)

    return *point.extra, Pullback(rows)


PLAIN = Kind(jacobian, gramian, weighted, over_shards=lambda losses, chosen, enter: enter(losses, chosen))
"""The kind of a plain function of the parameters, for a kind of yours that differs from it in some entries."""
