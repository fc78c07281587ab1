"""Any losses: a function of parameters and a batch."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from functional_jd.core.rows import as_matrix
from functional_jd.core.tree import detach_tree, floating_leaves, tree_unflatten
from functional_jd.engines.evaluate import (
    Options,
    dense_rows,
    element_count,
    evaluate_losses,
    objective_count,
    row_scales,
    select_arguments,
)
from functional_jd.engines.gramian.assemble import gramian_of_uses, recorded, shaped
from functional_jd.engines.gramian.recorder import LayerRecorder
from functional_jd.engines.kinds.kind import Kind
from functional_jd.engines.kinds.results import Args, FoundGramian, FoundJacobian, FoundWeighted, Pullback, PulledRows
from functional_jd.engines.row_vjps import Rows, jacobian_rows
from functional_jd.engines.vjp import vjp
from functional_jd.engines.weighted_cotangent import flags, unscaled_direction, weighted_cotangent
from functional_jd.precision.autocast import autocast_disabled
from functional_jd.torch_compat.autograd_graph import graph_nodes
from functional_jd.torch_compat.forward_mode import NoGrad
from functional_jd.torch_compat.torch_internals import under_transform, untraced


def jacobian(losses: Any, args: Args, options: Options) -> FoundJacobian:
    """The rows of all losses."""
    chosen, rebuild = select_arguments(options.argnums, args, options.where)
    leaves, structure = floating_leaves(chosen, options.where)

    def f(inputs: list[Tensor]) -> tuple[list[Tensor], Any]:
        return evaluate_losses(losses, rebuild(tree_unflatten(structure, inputs)), options)

    if options.mode == "forward":
        rows, (values, aux) = _forward(f, leaves, options)
        m = objective_count(values)
    else:
        point = vjp(f, leaves, differentiable=options.differentiable, where=options.where)
        m = element_count(point.outputs)
        factors = row_scales(options.scale, m, point.outputs[0], options.where)
        rows, (values, aux) = jacobian_rows(point, factors, options), point.extra
    return tree_unflatten(structure, dense_rows(rows, leaves, m)), values, aux


def gramian(losses: Any, args: Args, options: Options) -> FoundGramian:
    """The Gramian of all losses, layer by layer."""
    chosen, rebuild = select_arguments(options.argnums, args, options.where)
    leaves, structure = floating_leaves(chosen, options.where)

    def f(points: list[Tensor], recorder: LayerRecorder) -> tuple[list[Tensor], Any]:
        return evaluate_losses(losses, rebuild(tree_unflatten(structure, points)), options, recorder)

    point, recording = recorded(f, leaves, options)
    m = element_count(point.outputs)
    rows = jacobian_rows(point, row_scales(options.scale, m, point.outputs[0], options.where), options)
    products, pullback = gramian_of_uses(recording, rows, leaves, m, options)
    return products, *point.extra, shaped(pullback, structure), ()


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


def _forward(
    f: Callable[[list[Tensor]], tuple[list[Tensor], Any]], leaves: list[Tensor], options: Options
) -> tuple[Rows, Any]:
    """Column by column, by forward mode."""
    outputs, extra = f(leaves) if under_transform() else _without_hooks(f, leaves, options)

    def columns(index: int) -> Tensor:
        def along(tangent: Tensor) -> list[Tensor]:
            def of_leaf(leaf: Tensor) -> list[Tensor]:
                with torch.enable_grad(), NoGrad(options.where):
                    return f([*leaves[:index], leaf, *leaves[index + 1 :]])[0]

            # A copy: forward mode refuses elements that share memory.
            return torch.func.jvp(of_leaf, (leaves[index].clone(),), (tangent,))[1]

        leaf = leaves[index]
        basis = torch.eye(leaf.numel(), dtype=leaf.dtype, device=leaf.device).reshape(leaf.numel(), *leaf.shape)
        tangents = torch.vmap(along, chunk_size=options.chunk_size)(basis)
        with autocast_disabled():
            return torch.cat(list(map(as_matrix, tangents)), dim=1)

    m = element_count(outputs)
    factors = row_scales(options.scale, m, outputs[0], options.where)
    rows: Rows = []
    for index, leaf in enumerate(leaves):
        scaled = columns(index).mT * factors[:, None] if leaf.numel() else None
        rows.append(None if scaled is None else scaled.reshape(m, *leaf.shape).to(leaf.dtype))
    # Parameters that only a closure captures may require grad.
    return (rows, extra) if options.differentiable else detach_tree((rows, extra))


def _without_hooks(
    f: Callable[[list[Tensor]], tuple[list[Tensor], Any]], leaves: list[Tensor], options: Options
) -> tuple[list[Tensor], Any]:
    """Evaluate as for a backward pass, and refuse hooks, which would change its rows: forward mode has none."""
    with torch.enable_grad(), _NoHooks(options.where):
        points = [x if options.differentiable and x.requires_grad else x.detach().requires_grad_() for x in leaves]
        outputs, extra = f(points)
    if any(node.name() == "BackwardHookFunctionBackward" for node in graph_nodes(outputs)):
        raise _hook_error(options.where, "a backward hook of a module")
    return (outputs, extra) if options.differentiable else detach_tree((outputs, extra))


class _NoHooks(TorchFunctionMode):
    def __init__(self, where: str):
        super().__init__()
        self.where = where

    @untraced
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.register_hook:
            raise _hook_error(self.where, "Tensor.register_hook")
        return func(*args, **(kwargs or {}))


def _hook_error(where: str, found: str) -> ValueError:
    return ValueError(
        f"{where}: mode='forward' has no backward pass, expected losses without hooks on gradients, found {found}. "
        "Use mode='auto'."
    )


PLAIN = Kind(jacobian, gramian, weighted, over_shards=lambda losses, chosen, enter: enter(losses, chosen))
"""The kind of a plain function of the parameters, for a kind of yours that differs from it in some entries."""
