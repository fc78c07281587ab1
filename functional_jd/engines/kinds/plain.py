"""Any losses: a function of parameters and a batch."""

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor

from functional_jd.core.tree import Structure, floating_leaves
from functional_jd.engines.evaluate import element_count, evaluate_losses, row_scales, select_arguments
from functional_jd.engines.gramian.assemble import Recorded, gramian_of_uses, recorded
from functional_jd.engines.kinds.kind import Args, FoundGramian, FoundJacobian, FoundWeighted, Kind
from functional_jd.engines.plan import Plan
from functional_jd.engines.row_vjps import dense, jacobian_rows, pulled
from functional_jd.engines.vjp import vjp
from functional_jd.precision.loss_scale import unscaled_rows


def _of_leaves(losses: Any, args: Args, plan: Plan) -> tuple[Recorded, list[Tensor], Structure]:
    """The losses as a function of the leaves to differentiate, these leaves, and their structure."""
    chosen, rebuild = select_arguments(plan.argnums, args)
    leaves, structure = floating_leaves(chosen)

    def f(inputs: list[Tensor], record: Callable[..., Any] | None = None) -> tuple[list[Tensor], Any]:
        recorder = None if record is None else record(inputs)  # torch 2.11 cannot trace whether a partial is true
        return evaluate_losses(losses, rebuild(structure.unflatten(inputs)), plan, recorder)

    return f, leaves, structure


def jacobian(losses: Any, args: Args, plan: Plan) -> FoundJacobian:
    """The rows of all losses."""
    f, leaves, structure = _of_leaves(losses, args, plan)
    point = vjp(f, leaves, plan)
    m = element_count(point.outputs)
    rows = jacobian_rows(point, row_scales(plan, m, point.outputs[0]), plan)
    rows = rows if plan.scale is None else unscaled_rows(rows, plan.scale)
    return structure.unflatten(dense(rows, leaves, m)), *point.extra


def gramian(losses: Any, args: Args, plan: Plan) -> FoundGramian:
    """The Gramian of all losses, layer by layer."""
    f, leaves, structure = _of_leaves(losses, args, plan)
    point, recording = recorded(f, leaves, plan)
    m = element_count(point.outputs)
    rows = jacobian_rows(point, row_scales(plan, m, point.outputs[0]), plan)
    products, pullback = gramian_of_uses(recording, rows, leaves, structure, m, plan)
    return products, *point.extra, pullback


def weighted(losses: Any, args: Args, plan: Plan) -> FoundWeighted:
    """One backward pass with the weights as cotangent."""
    f, leaves, structure = _of_leaves(losses, args, plan)
    point = vjp(f, leaves, plan)
    return *point.extra, partial(pulled, point, leaves, structure, plan)


PLAIN = Kind(jacobian, gramian, weighted, over_shards=lambda losses, chosen, enter: enter(losses, chosen))
"""The kind of a plain function of the parameters, for a kind of yours that differs from it in some entries."""
