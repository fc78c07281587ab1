"""From recorded uses of layers to the Gramian of all leaves, and the pullback of weights."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor

from functional_jd.core.rows import at_least_float32
from functional_jd.core.tree import Structure
from functional_jd.core.types import Direction
from functional_jd.engines.gramian.layers import Factors
from functional_jd.engines.gramian.products import products_of_leaves
from functional_jd.engines.gramian.recorder import LayerRecorder, Recording, parts_of
from functional_jd.engines.plan import LeafGroup, Plan
from functional_jd.engines.row_vjps import Rows
from functional_jd.engines.vjp import Cotangent, Vjp, vjp
from functional_jd.precision.autocast import autocast_disabled
from functional_jd.precision.loss_scale import unscaled_rows
from functional_jd.torch_compat.autograd_graph import to_dense
from functional_jd.torch_compat.torch_internals import is_batched, traced_grad, transform_level

Recorded: TypeAlias = Callable[..., tuple[list[Tensor], Any]]
"""`f(points, record) -> (outputs, extra)`, where `record(points)` makes the recorder of what receives the points."""


def recorded(f: Recorded, leaves: list[Tensor], plan: Plan, m: int = 0) -> tuple[Vjp, Recording]:
    """Evaluate `f(points, record) -> (outputs, extra)` once. Returns the vector-Jacobian product with respect to the
    outputs of the recorded layers and, behind them, the points; and the recording.

    Layers receive the leaves, and `f` the points: the leaves too, or copies `[m, *p]`, one for each of m examples.
    """
    recording = Recording([], [], [], [], [])
    inside: list[list[Any]] = []  # as in torch.func, the tensors inside a transform leave it by a list
    n = len(leaves)

    def inner(inputs: list[Tensor]) -> tuple[list[Tensor], Any]:
        points, constants = inputs[:n], inputs[n:]
        record = partial(LayerRecorder, constants=constants, recording=recording, traced=plan.differentiable, m=m)
        outputs, extra = f(points, record)
        inside[:] = [outputs, [*recording.ends, *points]]
        return outputs, (extra, recording.sources)

    copies = [x.expand(m, *x.shape) for x in leaves] if m else leaves
    point = vjp(inner, [*copies, *leaves], plan, ends=recording.ends)
    outputs, inputs = inside
    extra, sources = point.extra
    recording = recording._replace(sources=sources if m else [x[None] for x in sources])
    if point.inputs:  # a graph of plain autograd
        pullback, recording = partial(point.pullback, among=slice(len(inputs))), recording._replace(outputs=outputs)
    else:
        pullback = partial(_traced_pullback, outputs, inputs)
    return point._replace(extra=extra, pullback=pullback, inputs=point.inputs[:n]), recording


def _traced_pullback(outputs: list[Tensor], inputs: list[Tensor], cotangent: Cotangent, last: bool = False) -> Rows:  # noqa: ARG001
    """`None` where a gradient is certainly zero."""
    pairs = list(zip(outputs, cotangent, strict=True))
    with autocast_disabled():
        if torch.compiler.is_compiling():
            # The only function for gradients that is traced here. It needs the same graph for all cotangents, and
            # returns zeros in the place of None. They are told apart: what does not vary with the cotangent is zero.
            filled = [torch.zeros_like(y) if c is None else c for y, c in pairs]
            found = traced_grad(outputs, inputs, filled, retain_graph=True, create_graph=True)
            depth = transform_level()[0]
            return [g if is_batched(g, depth) else None for g in found]
        # A zero cotangent would turn an infinite derivative into NaN.
        sent = [(y, c) for y, c in pairs if c is not None and y.requires_grad]
        if not sent:
            return [None] * len(inputs)
        given: Any = [[y for y, _ in sent], inputs, [c for _, c in sent]]
        return to_dense(torch.autograd.grad(*given, retain_graph=True, create_graph=True, allow_unused=True))


def gramian_of_uses(
    recording: Recording, rows: Rows, leaves: list[Tensor], structure: Structure, m: int, plan: Plan
) -> tuple[Any, Callable[[Any], Direction]]:
    """The Gramian of all leaves, or the products that `plan.products` names, and the pullback of weights to a
    direction (none for factors): from the scaled rows by end and, behind them, by leaf.
    """
    n = len(recording.ends)
    if plan.examples:  # one example after the other
        rows = [g if g is None or i >= n else g.unflatten(0, (m, -1)) for i, g in enumerate(rows)]
    if plan.scale is not None:
        rows = unscaled_rows(rows, plan.scale)
    leaves = like_direction(leaves, plan)
    by_leaf: list[list[Factors | Tensor]] = [[] if direct is None else [direct] for direct in rows[n:]]
    with autocast_disabled():
        for leaf, part in parts_of(recording, rows[:n]):
            by_leaf[leaf].append(part)
        if plan.products == "factors":
            return by_leaf, lambda _: ()
        if plan.groups is None:
            products, pull = products_of_leaves(by_leaf, leaves, m, plan.products)
        else:
            products, pull = _products_by_group(by_leaf, leaves, m, plan.groups)
    return products, lambda weights: structure.unflatten(pull(weights))


def like_direction(leaves: list[Tensor], plan: Plan) -> list[Tensor]:
    """Tensors in the shapes and dtypes of the sum of the rows, which is at least float32."""
    if plan.scale is None and all(x.dtype.itemsize >= 4 for x in leaves):
        return leaves
    return [at_least_float32(x.new_empty(())).expand(x.shape) for x in leaves]


def _products_by_group(
    by_leaf: list[list[Factors | Tensor]], leaves: list[Tensor], m: int, groups: Sequence[LeafGroup]
) -> tuple[dict[str, Tensor], Callable[[Any], list[Tensor]]]:
    """By name, of groups of leaves that follow one another."""
    products: dict[str, Tensor] = {}
    pulls: dict[str, Callable[[Tensor], list[Tensor]]] = {}
    start = 0
    for key, count, needed in groups:
        part = slice(start, start + count)
        products[key], pulls[key] = products_of_leaves(by_leaf[part], leaves[part], m, needed)
        start += count
    return products, lambda weights: [x for key, pull in pulls.items() for x in pull(weights[key])]
