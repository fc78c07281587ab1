"""The weighted engine: for rules that look at no row, one backward pass with the weights as cotangent."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from functional_jd.core.torch_internals import under_transform
from functional_jd.core.tree import Structure, floating_leaves, tree_unflatten
from functional_jd.core.types import Direction, LossFunction
from functional_jd.engines.evaluate import (
    any_requires_grad,
    check_example_losses,
    evaluate_losses,
    objective_count,
    row_scales,
)
from functional_jd.engines.row_vjps import vmap_or_loop
from functional_jd.engines.vjp import Vjp, multitask_vjp, vjp
from functional_jd.objectives import Multitask, PerExample, stacked
from functional_jd.precision.loss_scale import ScaleState, multiplier, unscale

_HERE = "weighted_fn"


# A power of two whose inverse is a normal float32.
_CEILING = 2.0**126


Pullback = Callable[..., tuple[Direction, Tensor]]
"""`pullback(weights, *, last=False) -> (direction, finite)`."""


def weighted_fn(
    losses: LossFunction, *, has_aux: bool = False, scale: ScaleState | Tensor | None = None
) -> Callable[..., tuple[Any, Pullback]]:
    """Turn losses into a function that returns their values, and the way back for weights.

    `direction = sum_i weights_i d losses_i / d params`, in one backward pass, whatever m.

    Args:
        losses: `losses(params, *args)`, as for `jacobian_fn`: plain, or made by `per_example` or `multitask`.
        has_aux: whether `losses` returns `(losses, aux)`, with aux a pytree of tensors.
        scale: a `ScaleState` or tensor, `[]` or `[m]`: the backward pass runs at that scale, the direction comes out
            unscaled. One pass has one scale: of `[m]` it is the largest power of two S with
            `|weights_i| S <= scale_i` for all i.

    Returns:
        `f(*args) -> (losses, pullback)`, with `has_aux` `((losses, aux), pullback)`. The losses are not scaled.
        `pullback(weights, *, last=False) -> (direction, finite)`: weights `[m]`; direction a pytree like params, at
        least float32, zeros where it is not finite; finite bool of the scale's shape. One pass cannot tell whose the
        overflow was: all m flags are one. `last=True` frees what another call would need.
        For `multitask` losses the trunk gets the weighted direction, and the heads the gradient of the plain sum.

    Raises:
        TypeError: losses or parameters that are not floating-point tensors, `losses` not callable.
        ValueError: no objectives, a scale that does not fit m, weights that are not `[m]`.

    Laws:
        Equal to `combine(unscale(jacobian), weights)` to rounding, where every row is finite; linear in the weights.
        Composes with vmap, grad, jvp and compile; nothing stays attached to a graph unless an input, or the weights,
        require grad. Weights that are not finite make a direction that is not. Weight 0 does not hide a row that
        overflows.
    """
    if not callable(losses):
        raise TypeError(f"{_HERE}: losses must be a function, found {type(losses).__name__}. Pass losses(params, ...).")
    factor = None if scale is None else multiplier(scale, _HERE)

    def losses_and_pullback(params: Any, *args: Any) -> tuple[Any, Any]:
        differentiable = any_requires_grad((params, args, factor)) or under_transform()
        way: Any = _multitask if isinstance(losses, Multitask) else _plain
        (values, aux), pullback = way(losses, params, args, has_aux, factor, differentiable)
        return (values, aux) if has_aux else values, pullback

    return losses_and_pullback


def _plain(
    losses: Any, params: Any, args: tuple[Any, ...], has_aux: bool, scale: Tensor | None, differentiable: bool
) -> tuple[Any, Pullback]:
    leaves, structure = floating_leaves(params, _HERE)

    def linearized(losses: Any) -> Vjp:
        def f(inputs: list[Tensor]) -> tuple[list[Tensor], Any]:
            return evaluate_losses(losses, (tree_unflatten(structure, inputs), *args), has_aux, _HERE)

        return vjp(f, leaves, differentiable=differentiable)

    # Losses of examples too: one pass back through the graph of the batch, not m small ones.
    point = linearized(losses)
    if isinstance(losses, PerExample):
        check_example_losses(point.outputs, (losses.count(args),))
    scales = row_scales(scale, objective_count(point.outputs), point.outputs[0], _HERE)

    def pullback(weights: Tensor, *, last: bool = False) -> tuple[Direction, Tensor]:
        cotangent, common = _cotangent(point.outputs, weights, scales, scale)
        if isinstance(losses, PerExample):
            # What recomputes on the way back, as checkpoints do, is then no longer within vmap.
            alone = partial(_one_by_one, losses)
            way_back = partial(point.pullback, cotangent, last=last)
            gradient = vmap_or_loop("auto", way_back, lambda: linearized(alone).pullback(cotangent, last=last))
        else:
            gradient = point.pullback(cotangent, last=last)
        direction, finite = unscale(common, _filled(gradient, leaves, structure))
        return direction, _flags(finite, scale)

    return point.extra, pullback


def _one_by_one(losses: PerExample, params: Any, *batch: Any) -> Any:
    return stacked([losses.loss(params, *example) for example in losses.examples(batch)])


def _multitask(
    losses: Multitask, params: Any, args: tuple[Any, ...], has_aux: bool, scale: Tensor | None, differentiable: bool
) -> tuple[Any, Pullback]:
    tasks = multitask_vjp(
        losses.features,
        losses.heads,
        losses.split(params),
        args,
        has_aux=has_aux,
        differentiable=differentiable,
        where=_HERE,
    )
    outputs, n = tasks.heads.outputs, len(tasks.own[0])
    scales = row_scales(scale, objective_count(outputs), outputs[0], _HERE)

    def pullback(weights: Tensor, *, last: bool = False) -> tuple[Direction, Tensor]:
        ones, plain = _cotangent(outputs, torch.ones_like(weights), scales, scale)
        weighted, common = _cotangent(outputs, weights, scales, scale)
        # Twice through the heads, but each time only to what is wanted: no weight's gradient is computed twice.
        own = tasks.heads.pullback(ones, slice(n))
        features = tasks.heads.pullback(weighted, slice(n, None), last=last)
        shared = tasks.trunk.pullback(features, last=last)
        heads, calm = unscale(plain, _filled(own, *tasks.own))
        trunk, finite = unscale(common, _filled(shared, *tasks.shared))
        return {"shared": trunk, "heads": heads}, _flags(finite & calm, scale)

    return tasks.heads.extra, pullback


def _cotangent(
    outputs: list[Tensor], weights: Tensor, scales: Tensor, scale: Tensor | None
) -> tuple[list[Tensor | None], Tensor]:
    """The scaled weights, by output, and the scale `[]` that they have in common."""
    if not isinstance(weights, Tensor) or weights.shape != scales.shape:  # pyright: ignore[reportUnnecessaryIsInstance]
        found = f"shape {list(weights.shape)}" if isinstance(weights, Tensor) else type(weights).__name__  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ValueError(
            f"{_HERE}: weights must be one tensor [{len(scales)}], one per objective, found {found}. "
            "Rules that count entry by entry need the Jacobian."
        )
    common = scales[0] if scale is None or not scale.ndim else _common(weights, scales)
    parts = (weights.double() * common).split([y.numel() for y in outputs])
    return [part.reshape(y.shape).to(y.dtype) for part, y in zip(parts, outputs, strict=True)], common


def _common(weights: Tensor, scales: Tensor) -> Tensor:
    """The largest power of two S with `|weights_i| S <= scale_i` for all i: exact to divide by, hence no derivative."""
    largest = (scales.detach().double() / weights.detach().double().abs()).amin().clamp(max=_CEILING)
    mantissa, _ = torch.frexp(largest)
    return multiplier(largest / (2 * mantissa))


def _filled(gradient: list[Tensor | None], leaves: list[Tensor], structure: Structure) -> Direction:
    dense = [torch.zeros_like(x) if g is None else g for g, x in zip(gradient, leaves, strict=True)]
    return tree_unflatten(structure, dense)


def _flags(finite: Tensor, scale: Tensor | None) -> Tensor:
    return finite if scale is None else finite.expand(scale.shape)
