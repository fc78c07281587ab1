"""From recorded uses of layers to the Gramian of all leaves, and the pullback of weights."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from functional_jd.core.rows import at_least_float32
from functional_jd.core.tree import Structure, detach_tree, tree_unflatten
from functional_jd.core.types import Direction
from functional_jd.engines.evaluate import LeafGroup, Options
from functional_jd.engines.gramian.factors import Factors, weighted_parts
from functional_jd.engines.gramian.products import products_of_leaves
from functional_jd.engines.gramian.recorder import LayerRecorder, LayerUse
from functional_jd.engines.gramian.traced_recorder import layer_uses, recorded_vjp
from functional_jd.engines.row_vjps import Rows
from functional_jd.engines.vjp import Cotangent, Vjp, refuse_inner_backward, to_dense
from functional_jd.precision.autocast import autocast_disabled


class RowsNeededError(Exception):
    """The Gramian cannot be found layer by layer: the rows are needed."""


def recorded(
    f: Callable[[list[Tensor], LayerRecorder], tuple[list[Tensor], Any]], leaves: list[Tensor], options: Options
) -> tuple[Vjp, list[LayerUse], list[Any]]:
    """Evaluate `f(points, recorder) -> (outputs, extra)` once. Returns the vector-Jacobian product with respect to the
    outputs of the recorded layers and, behind them, the points; the uses; and their edges.
    """
    if options.differentiable:
        point, seen = recorded_vjp(f, leaves)
        extra, sources = point.extra
        return point._replace(extra=extra), layer_uses(seen, [x[None] for x in sources]), list(range(len(sources)))
    uses: list[LayerUse] = []
    constants = [x.detach().requires_grad_() for x in leaves]
    points = [x.detach().requires_grad_() for x in leaves]
    with torch.enable_grad():
        outputs, extra = f(points, LayerRecorder(points, constants, uses, examples=False))
    for x in points:  # as in `vjp`
        if not x.requires_grad:
            x.requires_grad = True
    edges = _edges_of(uses)

    def pullback(cotangent: Cotangent) -> list[Tensor | None]:
        pairs = [(y, c) for y, c in zip(outputs, cotangent, strict=True) if c is not None and y.requires_grad]
        if not pairs:
            return [None] * (len(edges) + len(points))
        outs, given = [y for y, _ in pairs], [c for _, c in pairs]
        ends: Any = [*edges, *points]  # torch's annotation does not know of a mixture
        with autocast_disabled():
            found = torch.autograd.grad(outs, ends, given, retain_graph=True, allow_unused=True)
        refuse_inner_backward(options.where, (*points, *constants))
        return to_dense(found)

    return Vjp(outputs, detach_tree(extra), pullback, tuple(points)), uses, edges


def rows_of_examples(
    losses: Tensor, scales: Tensor, uses: list[LayerUse], points: list[Tensor]
) -> tuple[list[Any], Rows]:
    """The edges of the uses, and the rows of scaled losses `[m]` by edge and, behind them, by point. No loss depends on
    another example: one backward pass from all of them keeps the rows apart.
    """
    edges = _edges_of(uses)
    ends: Any = [*edges, *points]
    with autocast_disabled():
        return edges, to_dense(torch.autograd.grad(losses, ends, scales, allow_unused=True))


def _edges_of(uses: list[LayerUse]) -> list[Any]:
    """Where the gradients of the recorded layers are found, each once."""
    return list(dict.fromkeys([use.edge for use in uses]))


def gramian_of_uses(
    uses: list[LayerUse], edges: list[Any], rows: Rows, leaves: list[Tensor], m: int, options: Options
) -> tuple[Any, Callable[[Any], list[Tensor]]]:
    """The Gramian of all leaves, or what `options.products` says, and their pullback: from the rows by edge and, behind
    them, by leaf.
    """
    leaves = _like_directions(leaves, options)
    by_edge = dict(zip(edges, rows, strict=False))
    products: Any
    by_leaf: list[list[Factors | Tensor]] = [[] if direct is None else [direct] for direct in rows[len(edges) :]]
    with autocast_disabled():
        for use in uses:
            gradient = by_edge[use.edge]
            if gradient is not None:
                by_leaf[use.leaf].append(use.form(gradient))
        if options.products == "factors":
            products, pull = by_leaf, partial(weighted_parts, by_leaf, leaves, m)
        elif options.groups is None:
            products, pull = _products(by_leaf, leaves, m, options.products)
        else:
            products, pull = _products_by_group(by_leaf, leaves, m, options.groups)

    return products, pull


def _products(
    by_leaf: list[list[Factors | Tensor]], leaves: list[Tensor], m: int, needed: str
) -> tuple[Tensor, Callable[[Tensor], list[Tensor]]]:
    if needed != "gramian":
        return products_of_leaves(by_leaf, leaves, m, norms_only=True)
    products, pull = products_of_leaves(by_leaf, leaves, m)
    return (products + products.mT) / 2, pull  # products of factors round differently on either side


def _products_by_group(
    by_leaf: list[list[Factors | Tensor]], leaves: list[Tensor], m: int, groups: Sequence[LeafGroup]
) -> tuple[dict[str, Tensor], Callable[[Any], list[Tensor]]]:
    """By name, of groups of leaves that follow one another."""
    products: dict[str, Tensor] = {}
    pulls: dict[str, Callable[[Tensor], list[Tensor]]] = {}
    start = 0
    for key, count, needed in groups:
        part = slice(start, start + count)
        products[key], pulls[key] = _products(by_leaf[part], leaves[part], m, needed)
        start += count
    return products, lambda weights: [x for key, pull in pulls.items() for x in pull(weights[key])]


def _like_directions(leaves: list[Tensor], options: Options) -> list[Tensor]:
    """Tensors with the shapes and dtypes of the direction, without memory: what was unscaled is at least float32."""
    if options.scale is None:
        return leaves
    return [at_least_float32(x.new_empty(())).expand(x.shape) for x in leaves]


def shaped(pullback: Callable[[Any], list[Tensor]], structure: Structure) -> Callable[[Any], Direction]:
    """The pullback, whose direction is a pytree of this structure."""
    return lambda weights: tree_unflatten(structure, pullback(weights))
