"""The Jacobian engine: one row per objective, by leaf, in the parameters' dtypes."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from functional_jd.core.rows import at_least_float32, per_row
from functional_jd.core.torch_internals import under_transform
from functional_jd.core.tree import floating_leaves, tree_map, tree_unflatten
from functional_jd.core.types import Jacobian, Losses, LossFunction, MultitaskJacobian, Tree
from functional_jd.engines.choose import row_schedule
from functional_jd.engines.evaluate import (
    any_requires_grad,
    check_example_losses,
    detach_tree,
    evaluate_losses,
    objective_count,
    row_scales,
)
from functional_jd.engines.row_vjps import Rows, gradients_one_by_one, jacobian_rows, stack_rows, vjp_rows, vmap_or_loop
from functional_jd.engines.vjp import multitask_vjp, vjp
from functional_jd.objectives import Multitask, PerExample, stacked
from functional_jd.precision.autocast import autocast_disabled
from functional_jd.precision.loss_scale import ScaleState, multiplier

_HERE = "jacobian_fn"


MODES = ("auto", "vmap", "loop", "forward")


Parted: TypeAlias = tuple[Rows, Rows]
"""The heads' gradient, by leaf `[*p]`, and the rows that go on into the trunk, by feature `[m, *z]`."""


class Plan(NamedTuple):
    """How to differentiate: the options of `jacobian_fn`, and what the call itself decides."""

    mode: str
    chunk_size: int | None
    has_aux: bool
    scale: Tensor | None
    differentiable: bool


def jacobian_fn(
    losses: LossFunction,
    *,
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    scale: ScaleState | Tensor | None = None,
    mode: str = "auto",
    chunk_size: int | None = None,
) -> Callable[..., tuple[Jacobian, Any]]:
    """Turn losses into a function that returns their Jacobian and their values.

    `J_i = scale_i * d losses_i / d params`

    Args:
        losses: `losses(params, *args)`: a tensor, or a pytree of tensors, with m elements in leaf order; plain, or made
            by `per_example` or `multitask`.
        argnums: the argument to differentiate, or several; with several, the Jacobian is a tuple. Other than 0, the
            structure of `per_example` and `multitask` is not used.
        has_aux: whether `losses` returns `(losses, aux)`, with aux a pytree of tensors.
        scale: a `ScaleState` or tensor, `[]` or `[m]`: row i comes out multiplied by it, because the cotangent is
            scaled. The returned losses are never scaled.
        mode: `"vmap"` differentiates rows together; `"loop"` one after the other, without vmap; `"forward"` column by
            column, which costs less where m is far above the number of parameters; `"auto"` chooses by shapes (a loop
            for few or wide rows on a CPU; groups, so that they fit its cache), and falls back to the loop.
        chunk_size: rows (or columns) differentiated at once; 1 is the loop.

    Returns:
        `f(*args) -> (jacobian, losses)`, with `has_aux` `(jacobian, (losses, aux))`. Jacobian: pytree like params with
        leaves `[m, *p]` in the parameters' dtypes; for `multitask` losses `MultitaskJacobian(shared, heads)`. Losses
        come back in the structure that the function gave them. Parameters that no objective depends on have rows of
        zeros. With one scale per objective, a row that overflowed in the heads is NaN in `shared` and left out of the
        sum that is `heads`: so its own scale backs off, not all. An infinite derivative of one objective can make other
        rows NaN, as 0 x inf, where rows are differentiated together. Examples stay apart, and in the loop so do losses
        that are tensors of their own.

    Raises:
        TypeError: losses or parameters that are not floating-point tensors, `losses` not callable.
        ValueError: no objectives, an unknown mode, a chunk size below 1, a scale that does not fit m.

    Laws:
        Equal to a loop of plain autograd in every mode. Linear in the scale. Composes with vmap, grad, jvp and compile;
        a derivative of the Jacobian is right, but for `"forward"` mode with layer, batch or instance norms, whose
        second forward derivative is wrong in torch (pytorch#196700). Where no transform is active and no input
        requires grad, plain autograd does the work and nothing stays attached to a graph. Parameters that only a
        closure captures do not count as inputs.

    Differs:
        From `torch.func.jacrev`: native autocast inside works with every layer, and the backward pass is never
        autocast; custom functions without a vmap rule, buffers changed in place and checkpoints work in
        `"auto"` and `"loop"`.
    """
    if not callable(losses):
        raise TypeError(
            f"jacobian_fn: losses must be a function, found {type(losses).__name__}. Pass losses(params, ...)."
        )
    if mode not in MODES:
        raise ValueError(f"jacobian_fn: mode must be one of {', '.join(MODES)}, found {mode!r}.")
    if chunk_size is not None and chunk_size < 1:
        raise ValueError(f"jacobian_fn: chunk_size must be None or at least 1, found {chunk_size}. 1 is the loop.")
    factor = None if scale is None else multiplier(scale, _HERE)
    if chunk_size == 1 and mode in ("auto", "vmap"):
        mode = "loop"

    def jacobian_and_losses(*args: Any) -> tuple[Jacobian, Any]:
        selected = _selected(argnums, args)
        plan = Plan(mode, chunk_size, has_aux, factor, any_requires_grad((args, factor)) or under_transform())
        if isinstance(losses, PerExample) and argnums == 0 and mode != "forward":
            jacobian, values, aux = _per_example(losses, args[0], args[1:], plan)
        elif isinstance(losses, Multitask) and argnums == 0:
            jacobian, values, aux = _multitask(losses, args[0], args[1:], plan)
        else:
            jacobian, values, aux = _plain(losses, *selected, plan)
        result = jacobian, (values, aux) if has_aux else values
        # Parameters that only a closure captures may require grad.
        return result if plan.differentiable else detach_tree(result)

    return jacobian_and_losses


def _plain(
    losses: LossFunction, chosen: Tree, rebuild: Callable[[Tree], tuple[Any, ...]], plan: Plan
) -> tuple[Jacobian, Losses, Any]:
    leaves, structure = floating_leaves(chosen, "jacobian_fn")

    def f(inputs: list[Tensor]) -> tuple[list[Tensor], Any]:
        return evaluate_losses(losses, rebuild(tree_unflatten(structure, inputs)), plan.has_aux, _HERE)

    if plan.mode == "forward":
        rows, (values, aux) = _forward(f, leaves, plan)
    else:
        point = vjp(f, leaves, differentiable=plan.differentiable)
        factors = row_scales(plan.scale, objective_count(point.outputs), point.outputs[0], _HERE)
        rows, (values, aux) = jacobian_rows(point, factors, plan.mode, plan.chunk_size), point.extra
    return tree_unflatten(structure, _filled(rows, leaves, objective_count(values))), values, aux


def _per_example(losses: PerExample, params: Tree, batch: tuple[Any, ...], plan: Plan) -> tuple[Jacobian, Losses, Any]:
    leaves, structure = floating_leaves(params, "jacobian_fn")
    m = losses.count(batch)
    factors = row_scales(plan.scale, m, leaves[0], _HERE)

    def one(inputs: list[Tensor], factor: Tensor, *example: Any) -> tuple[list[Tensor], Any, Any]:
        def f(inputs: list[Tensor]) -> tuple[list[Tensor], Any]:
            return evaluate_losses(losses.loss, (tree_unflatten(structure, inputs), *example), plan.has_aux, _HERE)

        point = vjp(f, inputs, differentiable=plan.differentiable)
        check_example_losses(point.outputs, ())
        gradient = point.pullback([factor.to(point.outputs[0].dtype)])
        values, aux = point.extra
        return [torch.zeros_like(x) if g is None else g for g, x in zip(gradient, inputs, strict=True)], values, aux

    def together() -> tuple[list[Tensor], Any, Any]:
        dims = (None, 0, *losses.dims(batch))
        return torch.vmap(one, dims, randomness="different", chunk_size=plan.chunk_size)(leaves, factors, *batch)

    def one_by_one() -> tuple[list[Tensor], Any, Any]:
        results = [one(leaves, factors[i], *example) for i, example in enumerate(losses.examples(batch))]
        return stacked(results)

    rows, values, aux = vmap_or_loop(plan.mode, together, one_by_one)
    return tree_unflatten(structure, rows), values, aux


def _multitask(losses: Multitask, params: Tree, args: tuple[Any, ...], plan: Plan) -> tuple[Jacobian, Losses, Any]:
    shared, heads = losses.split(params)
    if plan.mode == "forward":
        jacobian, values, aux = _plain(losses, *_selected(0, (params, *args)), plan)
        heads_gradient = tree_map(lambda rows: _unscaled_sum(rows, plan.scale).to(rows.dtype), jacobian["heads"])
        return MultitaskJacobian(jacobian["shared"], heads_gradient), values, aux
    tasks = multitask_vjp(
        losses.features,
        losses.heads,
        (shared, heads),
        args,
        has_aux=plan.has_aux,
        differentiable=plan.differentiable,
        where=_HERE,
    )
    below, above, (shared_leaves, shared_structure), (heads_leaves, heads_structure) = tasks
    factors = row_scales(plan.scale, objective_count(above.outputs), above.outputs[0], _HERE)

    def together() -> Parted:
        rows = jacobian_rows(above, factors, "vmap", plan.chunk_size)
        return _heads_and_features(rows, len(heads_leaves), factors, plan.scale)

    def one_by_one() -> Parted:
        sums: Rows = [None] * len(heads_leaves)
        features: list[list[Tensor | None]] = []
        for factor, gradient in zip(factors.split(1), gradients_one_by_one(above, factors), strict=True):
            mine, theirs = _one_row(gradient, len(heads_leaves), factor, plan.scale)
            sums = [a if b is None else b if a is None else a + b for a, b in zip(sums, mine, strict=True)]
            features.append(theirs)
        return sums, stack_rows(features, len(factors))

    # One scalar per task: a loop walks each head once. Together, every row would walk every head.
    apart = plan.mode == "auto" and len(above.outputs) > 1 and not under_transform()
    mode = "loop" if apart else row_schedule(above, len(factors), plan.mode, plan.chunk_size)[0]
    sums, feature_rows = vmap_or_loop(mode, together, one_by_one)
    trunk_rows = vjp_rows(below, feature_rows, plan.mode, plan.chunk_size)
    gradient = [torch.zeros_like(x) if g is None else g.to(x.dtype) for g, x in zip(sums, heads_leaves, strict=True)]
    jacobian = MultitaskJacobian(
        tree_unflatten(shared_structure, _filled(trunk_rows, shared_leaves, len(factors))),
        tree_unflatten(heads_structure, gradient),
    )
    return jacobian, *above.extra


def _heads_and_features(rows: Rows, n_heads: int, factors: Tensor, scale: Tensor | None) -> Parted:
    """The heads' gradient, rows summed and unscaled; and the rows `[m, *z]` that go on into the trunk.

    With one scale per objective, a row that overflowed in the heads is left out of the sum, where nobody could tell
    whose it was, and goes on as NaN: the trunk's row then says which scale must back off.
    """
    heads, features = rows[:n_heads], rows[n_heads:]
    present = [row for row in heads if row is not None]
    if scale is not None and scale.ndim and present and any(row is not None for row in features):
        finite = torch.stack([row.isfinite().reshape(len(row), row.shape[1:].numel()).all(1) for row in present]).all(0)
        heads = [None if row is None else torch.where(per_row(finite, row), row, 0) for row in heads]
        blame = torch.where(finite, 0.0, torch.nan)
        features = [None if row is None else row + per_row(blame, row).to(row.dtype) for row in features]
    return [None if row is None else _unscaled_sum(row, None if scale is None else factors) for row in heads], features


def _one_row(gradient: Rows, n_heads: int, factor: Tensor, scale: Tensor | None) -> Parted:
    """The same for a single row, by tensors without a dimension of rows."""
    if scale is None:
        # Copies: autograd may hand out one tensor for two parameters.
        heads = [None if g is None else at_least_float32(g.clone()) for g in gradient[:n_heads]]
        return heads, gradient[n_heads:]
    heads, features = _heads_and_features([None if g is None else g[None] for g in gradient], n_heads, factor, scale)
    return heads, [None if g is None else g[0] for g in features]


def _forward(
    f: Callable[[list[Tensor]], tuple[list[Tensor], Any]], leaves: list[Tensor], plan: Plan
) -> tuple[Rows, Any]:
    outputs, extra = f(leaves)

    def columns(index: int) -> Tensor:
        def along(tangent: Tensor) -> list[Tensor]:
            def of_leaf(leaf: Tensor) -> list[Tensor]:
                return f([*leaves[:index], leaf, *leaves[index + 1 :]])[0]

            # A copy: forward mode refuses numbers that share memory.
            return torch.func.jvp(of_leaf, (leaves[index].clone(),), (tangent,))[1]

        leaf = leaves[index]
        basis = torch.eye(leaf.numel(), dtype=leaf.dtype, device=leaf.device).reshape(leaf.numel(), *leaf.shape)
        tangents = torch.vmap(along, chunk_size=plan.chunk_size)(basis)
        with autocast_disabled(tangents):
            return torch.cat([tangent.reshape(len(basis), tangent.shape[1:].numel()) for tangent in tangents], dim=1)

    m = objective_count(outputs)
    factors = row_scales(plan.scale, m, outputs[0], _HERE)
    rows: Rows = []
    for index, leaf in enumerate(leaves):
        scaled = columns(index).mT * factors[:, None] if leaf.numel() else None
        rows.append(None if scaled is None else scaled.reshape(m, *leaf.shape).to(leaf.dtype))
    return rows, extra


def _selected(argnums: int | Sequence[int], args: tuple[Any, ...]) -> tuple[Tree, Callable[[Tree], tuple[Any, ...]]]:
    """The arguments to differentiate, and how to put others in their place."""
    positions = [argnums] if isinstance(argnums, int) else list(argnums)
    known = all(-len(args) <= position < len(args) for position in positions)
    if not positions or not known or len({position % len(args) for position in positions}) < len(positions):
        raise ValueError(
            f"jacobian_fn: argnums must name some of the {len(args)} arguments, each once, found {argnums}. "
            "Count from 0."
        )

    def rebuild(chosen: Tree) -> tuple[Any, ...]:
        replaced = list(args)
        for position, value in zip(positions, [chosen] if isinstance(argnums, int) else chosen, strict=True):
            replaced[position] = value
        return tuple(replaced)

    return (args[argnums] if isinstance(argnums, int) else tuple(args[p] for p in positions)), rebuild


def _unscaled_sum(rows: Tensor, scale: Tensor | None) -> Tensor:
    """Sum rows `[m, *p]`, each divided by its scale, in at least float32."""
    rows = at_least_float32(rows)
    if scale is None:
        return rows.sum(0)
    inverse = row_scales(scale, len(rows), rows, _HERE).double().reciprocal().to(rows.dtype)
    with autocast_disabled(rows):
        return torch.tensordot(inverse, rows, dims=1)


def _filled(rows: Rows, leaves: list[Tensor], m: int) -> list[Tensor]:
    return [x.new_zeros(m, *x.shape) if row is None else row for row, x in zip(rows, leaves, strict=True)]
