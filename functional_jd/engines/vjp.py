"""Evaluate once, with the vector-Jacobian product: plain autograd where no transform is active, else torch.func."""

from collections.abc import Callable, Iterable
from contextlib import nullcontext
from typing import Any, NamedTuple, TypeAlias, cast

import torch
from torch import Tensor

from functional_jd.core.torch_internals import under_transform
from functional_jd.core.tree import (
    Structure,
    floating_leaves,
    tree_flatten,
    tree_leaves,
    tree_unflatten,
)
from functional_jd.core.types import LossFunction, Tree
from functional_jd.engines.evaluate import detach_tree, evaluate_losses
from functional_jd.engines.norm_workaround import SeparateNormAffine
from functional_jd.precision.autocast import autocast_disabled, with_op_tables

Cotangent: TypeAlias = list[Tensor | None]
"""One per output; `None` where the cotangent is zero, so that plain autograd never walks that output's graph."""


class Vjp(NamedTuple):
    """A function at a point.

    Attributes:
        outputs: what the function returned first.
        extra: what it returned second.
        pullback: `pullback(cotangent, among=slice(None), last=False) -> gradients`, one per input among those of the
            slice; `None` where an input certainly has no part in it. The last call frees what another would need.
        inputs: where plain autograd's gradients arrive; empty where somebody else recorded the graph.
    """

    outputs: list[Tensor]
    extra: Any
    pullback: Callable[..., list[Tensor | None]]
    inputs: tuple[Tensor, ...] = ()


class MultitaskVjp(NamedTuple):
    """A trunk and its heads at a point.

    Attributes:
        trunk: from the shared parameters to the differentiable features.
        heads: from the heads' parameters, and behind them those features, to the losses.
        shared: leaves and structure of the shared parameters.
        own: leaves and structure of the heads' parameters.
    """

    trunk: Vjp
    heads: Vjp
    shared: tuple[list[Tensor], Structure]
    own: tuple[list[Tensor], Structure]


def vjp(f: Callable[[list[Tensor]], tuple[list[Tensor], Any]], inputs: list[Tensor], *, differentiable: bool) -> Vjp:
    """Evaluate `f(inputs) -> (outputs, extra)` once, and get the way back.

    Args:
        f: a function of a list of tensors.
        inputs: floating-point tensors.
        differentiable: whether somebody may differentiate the gradients: one of the inputs requires grad, or a
            transform that is not our own is active.
    """
    if under_transform():
        return _by_func(f, inputs, differentiable)
    return _by_autograd(f, inputs, differentiable)


def multitask_vjp(
    features: Callable[..., Tree],
    heads: LossFunction,
    params: tuple[Tree, Tree],
    args: tuple[Any, ...],
    *,
    has_aux: bool,
    differentiable: bool,
    where: str,
) -> MultitaskVjp:
    """Evaluate the losses of a trunk and its heads once, and get the way back in two stages."""
    shared, shared_structure = floating_leaves(params[0], f"{where} (shared)")
    # Heads may be losses only, without a parameter of their own.
    own, own_structure = (
        floating_leaves(params[1], f"{where} (heads)") if tree_leaves(params[1]) else tree_flatten(params[1])
    )

    def trunk(inputs: list[Tensor]) -> tuple[list[Tensor], Any]:
        found = with_op_tables(features)(tree_unflatten(shared_structure, inputs), *args)
        return [x for x in tree_leaves(found) if _is_differentiable(x)], found

    below = vjp(trunk, shared, differentiable=differentiable)
    found, structure = tree_flatten(below.extra)

    def top(inputs: list[Tensor]) -> tuple[list[Tensor], Any]:
        differentiated = iter(inputs[len(own) :])
        filled = tree_unflatten(structure, [next(differentiated) if _is_differentiable(x) else x for x in found])
        mine = tree_unflatten(own_structure, inputs[: len(own)])
        return evaluate_losses(heads, (mine, filled, *args), has_aux, where)

    above = vjp(top, own + below.outputs, differentiable=differentiable)
    return MultitaskVjp(below, above, (shared, shared_structure), (own, own_structure))


def to_dense(gradients: Iterable[Tensor | None]) -> list[Tensor | None]:
    """An embedding may hand out sparse gradients: rows are dense, whatever layer they come from."""
    return [g.to_dense() if g is not None and g.is_sparse else g for g in gradients]


def _by_func(f: Callable[[list[Tensor]], tuple[list[Tensor], Any]], inputs: list[Tensor], differentiable: bool) -> Vjp:
    # torch.func hands out tensors only: what else `extra` holds, and its structure, goes round by the side.
    beside: list[Any] = []

    def tensors_only(points: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        with SeparateNormAffine() if differentiable else nullcontext():
            outputs, extra = f(points)
        leaves, structure = tree_flatten(extra)
        beside[:] = [structure, [None if isinstance(x, Tensor) else x for x in leaves]]
        return outputs, [x for x in leaves if isinstance(x, Tensor)]

    outputs, pull, tensors = cast(tuple[Any, ...], torch.func.vjp(tensors_only, inputs, has_aux=True))
    structure, others = beside
    rest = iter(tensors)
    extra = tree_unflatten(structure, [next(rest) if x is None else x for x in others])

    def pullback(cotangent: Cotangent, among: slice = slice(None), last: bool = False) -> list[Tensor | None]:  # noqa: ARG001
        filled = [torch.zeros_like(y) if c is None else c for y, c in zip(outputs, cotangent, strict=True)]
        with autocast_disabled(inputs):
            return to_dense(pull(filled)[0][among])

    return Vjp(outputs, extra, pullback)


def _by_autograd(
    f: Callable[[list[Tensor]], tuple[list[Tensor], Any]], inputs: list[Tensor], differentiable: bool
) -> Vjp:
    # Aliases, not the tensors themselves: the gradient must stop here, wherever else the caller uses them.
    with torch.enable_grad():
        points = [x.view_as(x) if differentiable and x.requires_grad else x.detach().requires_grad_() for x in inputs]
        with SeparateNormAffine() if differentiable else nullcontext():
            outputs, extra = f(points)
    # One tensor for each device is enough to tell whether autocast is on there.
    devices = list({x.device: x for x in inputs}.values())

    def pullback(cotangent: Cotangent, among: slice = slice(None), last: bool = False) -> list[Tensor | None]:
        pairs = [(y, c) for y, c in zip(outputs, cotangent, strict=True) if c is not None and y.requires_grad]
        wanted = points[among]
        if not pairs or not wanted:
            return [None] * len(wanted)
        given = [c for _, c in pairs]
        # The weights of a cotangent may be what somebody differentiates, when nothing else is.
        create_graph = differentiable or (torch.is_grad_enabled() and any(c.requires_grad for c in given))
        with autocast_disabled(devices):
            return to_dense(
                torch.autograd.grad(
                    [y for y, _ in pairs],
                    wanted,
                    given,
                    retain_graph=create_graph or not last,
                    create_graph=create_graph,
                    allow_unused=True,
                )
            )

    return Vjp(outputs, extra if differentiable else detach_tree(extra), pullback, tuple(points))


def _is_differentiable(value: Any) -> bool:
    return isinstance(value, Tensor) and (value.is_floating_point() or value.is_complex())
