"""Linearize once, pull back any number of cotangents: plain autograd where nothing else is active, else torch.func."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from itertools import chain
from math import ceil
from typing import Any, NamedTuple, TypeAlias, TypeVar, cast

import torch
from torch import Tensor

from functional_jd.graphs import nodes, widest
from functional_jd.norms import AffineApart
from functional_jd.precision import full_precision, portable
from functional_jd.rows import wide
from functional_jd.transforms import transformed
from functional_jd.tree import (
    Structure,
    floating_leaves,
    tree_flatten,
    tree_leaves,
    tree_map,
    tree_names,
    tree_unflatten,
)
from functional_jd.types import Losses, LossFunction, Tree

Cotangent: TypeAlias = list[Tensor | None]
"""One per output; `None` where the cotangent is zero, so that plain autograd never walks that output's graph."""

Rows: TypeAlias = list[Tensor | None]
"""m cotangents or gradients, by tensor: each `[m, *x]`, or `None` where all rows are zero."""


Result = TypeVar("Result")

# What `"auto"` goes by, measured on CPUs: up to so many rows a loop is never slower;
_FEW = 3
# a gradient of so many elements, all rows of a group together, still fits a cache near the core;
_CACHED = 1 << 19
# and a group of fewer rows does not pay for what vmap costs.
_GROUP = 8
# Gradients of so few elements are stacked by one call sooner than written one by one.
_SMALL = 1 << 14


class Linearized(NamedTuple):
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


class Tasks(NamedTuple):
    """A trunk and its heads at a point.

    Attributes:
        trunk: from the shared parameters to the differentiable features.
        heads: from the heads' parameters, and behind them those features, to the losses.
        shared: leaves and structure of the shared parameters.
        own: leaves and structure of the heads' parameters.
    """

    trunk: Linearized
    heads: Linearized
    shared: tuple[list[Tensor], Structure]
    own: tuple[list[Tensor], Structure]


def requires_grad(values: Any) -> bool:
    """Whether somebody outside records a graph on one of the tensors of a pytree."""
    return torch.is_grad_enabled() and any(isinstance(x, Tensor) and x.requires_grad for x in tree_leaves(values))


def detached(tree: Tree) -> Tree:
    """A pytree whose tensors are cut off from any graph; what is no tensor stays."""
    return tree_map(lambda x: x.detach() if isinstance(x, Tensor) and x.requires_grad else x, tree)


def linearize(
    f: Callable[[list[Tensor]], tuple[list[Tensor], Any]], inputs: list[Tensor], *, differentiable: bool
) -> Linearized:
    """Evaluate `f(inputs) -> (outputs, extra)` once, and get the way back.

    Args:
        f: a function of a list of tensors.
        inputs: floating-point tensors.
        differentiable: whether somebody may differentiate the gradients: one of the inputs requires grad, or a
            transform that is not our own is active.
    """
    if transformed():
        return _by_func(f, inputs, differentiable)
    return _by_autograd(f, inputs, differentiable)


def linearize_tasks(
    features: Callable[..., Tree],
    heads: LossFunction,
    params: tuple[Tree, Tree],
    args: tuple[Any, ...],
    *,
    has_aux: bool,
    differentiable: bool,
    where: str,
) -> Tasks:
    """Evaluate the losses of a trunk and its heads once, and get the way back in two stages."""
    shared, shared_structure = floating_leaves(params[0], f"{where} (shared)")
    # Heads may be losses only, without a parameter of their own.
    own, own_structure = (
        floating_leaves(params[1], f"{where} (heads)") if tree_leaves(params[1]) else tree_flatten(params[1])
    )

    def trunk(inputs: list[Tensor]) -> tuple[list[Tensor], Any]:
        found = portable(features)(tree_unflatten(shared_structure, inputs), *args)
        return [x for x in tree_leaves(found) if _is_differentiable(x)], found

    below = linearize(trunk, shared, differentiable=differentiable)
    found, structure = tree_flatten(below.extra)

    def top(inputs: list[Tensor]) -> tuple[list[Tensor], Any]:
        differentiated = iter(inputs[len(own) :])
        filled = tree_unflatten(structure, [next(differentiated) if _is_differentiable(x) else x for x in found])
        mine = tree_unflatten(own_structure, inputs[: len(own)])
        return evaluate(heads, (mine, filled, *args), has_aux, where)

    above = linearize(top, own + below.outputs, differentiable=differentiable)
    return Tasks(below, above, (shared, shared_structure), (own, own_structure))


def evaluate(losses: LossFunction, args: tuple[Any, ...], has_aux: bool, where: str) -> tuple[list[Tensor], Any]:
    """The losses in at least float32, for cotangents that must not overflow; beside them what the function gave."""
    result = portable(losses)(*args)
    if has_aux and not (isinstance(result, tuple) and len(cast(tuple[Any, ...], result)) == 2):
        raise TypeError(
            f"{where}: with has_aux=True the losses must return a pair (losses, aux), found {type(result).__name__}."
        )
    values, aux = result if has_aux else (result, ())
    leaves = tree_leaves(values)
    for index, leaf in enumerate(leaves):
        if not (isinstance(leaf, Tensor) and leaf.is_floating_point()):
            found = str(leaf.dtype) if isinstance(leaf, Tensor) else type(leaf).__name__
            raise TypeError(
                f"{where}: losses must be floating-point tensors, found {found} in {tree_names(values)[index]!r}. "
                "Return the tensors themselves, without .item(); for further values use has_aux=True."
            )
    if not any(leaf.numel() for leaf in leaves):
        raise ValueError(f"{where}: expected at least one objective, found none. Return one element per objective.")
    return [wide(leaf) for leaf in leaves], (values, aux)


def check_scalar(outputs: list[Tensor], shape: tuple[int, ...]) -> None:
    """The losses of examples must be of this shape, one scalar each."""
    if [tuple(y.shape) for y in outputs] != [shape]:
        raise ValueError(
            "per_example: the loss of one example must be one scalar, found "
            f"{[list(y.shape)[len(shape) :] for y in outputs]}. Reduce it, for instance with .mean()."
        )


def count(values: Losses) -> int:
    """The number m of objectives."""
    return sum(leaf.numel() for leaf in tree_leaves(values))


def row_scales(scale: Tensor | None, m: int, like: Tensor, where: str) -> Tensor:
    """The scale of every row, float32 `[m]`."""
    if scale is None:
        return torch.ones(m, device=like.device)
    if scale.ndim and scale.shape != (m,):
        raise ValueError(
            f"{where}: the scale must be of shape [] or [{m}], one per objective, found {list(scale.shape)}. "
            f"Start it with scale_state(shape=({m},))."
        )
    return scale.expand(m)


def in_mode(mode: str, together: Callable[[], Result], one_by_one: Callable[[], Result]) -> Result:
    """Work with vmap, without it, or (`"auto"`) with vmap and, where that cannot go, without.

    Losses that `together` evaluates are then evaluated again: what they change in place would move twice.
    """
    if mode == "loop":
        return one_by_one()
    if mode == "vmap" or torch.compiler.is_compiling():
        return together()
    try:
        return together()
    except torch.OutOfMemoryError:
        raise
    except Exception:
        # Whatever it was that vmap refused: an error of the losses themselves comes back from the loop.
        return one_by_one()


def pull_rows(point: Linearized, cotangents: Rows, mode: str, chunk_size: int | None) -> Rows:
    """Pull back m cotangents: the vector-Jacobian product of each, stacked."""
    m = next((len(c) for c in cotangents if c is not None), 0)
    if m == 0:
        return [None] * len(point.pullback([None] * len(cotangents)))

    def one_by_one() -> Rows:
        by_row = zip(*[[None] * m if c is None else c.unbind() for c in cotangents], strict=True)
        return stacked_rows((point.pullback(list(cotangent)) for cotangent in by_row), m)

    mode, chunk_size = arranged(point, m, mode, chunk_size)
    return in_mode(mode, lambda: _together(point, cotangents, m, chunk_size), one_by_one)


def objective_rows(point: Linearized, factors: Tensor, mode: str, chunk_size: int | None) -> Rows:
    """The rows of the Jacobian: the gradient of every element of the outputs, multiplied by its factor `[m]`."""
    m = len(factors)
    mode, chunk_size = arranged(point, m, mode, chunk_size)
    return in_mode(
        mode,
        lambda: _together(point, [*_diagonal(point, factors)], m, chunk_size),
        lambda: stacked_rows(objective_gradients(point, factors), m),
    )


def objective_gradients(point: Linearized, factors: Tensor) -> Iterator[list[Tensor | None]]:
    """The same rows one by one, each by itself: zeros sent through the outputs of others would cost time, and turn an
    infinity there into NaN.
    """
    for owner, (y, own) in enumerate(
        zip(point.outputs, factors.split([y.numel() for y in point.outputs]), strict=True)
    ):
        block = (own if y.numel() == 1 else torch.diag(own)).to(y.dtype)
        for cotangent in block.reshape(y.numel(), *y.shape).unbind():
            yield point.pullback([cotangent if k == owner else None for k in range(len(point.outputs))])


def stacked_rows(gradients: Iterable[list[Tensor | None]], m: int) -> Rows:
    """Rows by input, from m gradients by row."""
    parts = iter(gradients)
    first = next(parts)
    if transformed() or sum(g.numel() for g in first if g is not None) < _SMALL:
        return _stacked([first, *parts])
    return _written(enumerate(chain([first], parts)), m)


def arranged(point: Linearized, m: int, mode: str, chunk_size: int | None) -> tuple[str, int | None]:
    """What `"auto"` means here: a loop, or vmap over so many rows at once.

    Rows together save the fixed price of every operation, and cost the cache: on a CPU few rows, or wide ones (images),
    go one by one, what is between in groups of about the same size. Where the weights are larger than all that passes
    between the layers, the rows themselves are the work: together, they are written once and never copied.
    """
    if mode != "auto":
        return mode, chunk_size
    if m == 1 or (m <= _FEW and not transformed()):
        return "loop", chunk_size
    if transformed() or not point.inputs or not all(x.is_cpu for x in point.inputs):
        return "auto", chunk_size
    between = widest(nodes(point.outputs), point.inputs)
    if between <= max(x.numel() for x in point.inputs):
        return "auto", chunk_size
    at_once = _CACHED // between
    if at_once < _GROUP:
        return "loop", chunk_size
    size = ceil(m / ceil(m / at_once))
    return "auto", size if chunk_size is None else min(size, chunk_size)


def _diagonal(point: Linearized, factors: Tensor) -> list[Tensor]:
    """The m cotangents of the objectives, by output `[m, *y]`."""
    matrix = torch.diag(factors)  # eye(m) * factors would turn one infinite factor into a NaN in every row
    blocks = matrix.split([y.numel() for y in point.outputs], dim=1)
    return [block.reshape(len(factors), *y.shape).to(y.dtype) for block, y in zip(blocks, point.outputs, strict=True)]


def _together(point: Linearized, cotangents: Rows, m: int, chunk_size: int | None) -> Rows:
    reached: list[bool] = []

    def row(*given: Tensor) -> list[Tensor]:
        rest = iter(given)
        gradient = point.pullback([None if c is None else next(rest) for c in cotangents])
        reached[:] = [g is not None for g in gradient]
        return [g for g in gradient if g is not None]

    def rows(group: slice, chunk_size: int | None = None) -> Rows:
        found = iter(torch.vmap(row, chunk_size=chunk_size)(*[c[group] for c in cotangents if c is not None]))
        return [next(found) if yes else None for yes in reached]

    if chunk_size is None or chunk_size >= m:
        return rows(slice(None))
    if transformed():
        return rows(slice(None), chunk_size)
    groups = (slice(i, i + chunk_size) for i in range(0, m, chunk_size))
    return _written(((group, rows(group)) for group in groups), m)


def _stacked(gradients: list[list[Tensor | None]]) -> Rows:
    rows: Rows = []
    with full_precision(gradients):
        for column in zip(*gradients, strict=True):
            like = next((g for g in column if g is not None), None)
            filled = [torch.zeros_like(like) if g is None else g for g in column] if like is not None else None
            rows.append(None if filled is None else torch.stack(filled))
    return rows


def _written(parts: Iterable[tuple[int | slice, list[Tensor | None]]], m: int) -> Rows:
    """Each part into its place at once, while it is in the cache: so a second Jacobian never exists."""
    rows: Rows = []
    for index, (place, part) in enumerate(parts):
        rows = rows or [None] * len(part)
        for k, (mine, g) in enumerate(zip(rows, part, strict=True)):
            if g is not None and mine is None:
                shape = g.shape if isinstance(place, int) else g.shape[1:]
                rows[k] = mine = (g.new_zeros if index else g.new_empty)(m, *shape)
            if mine is not None:
                mine[place] = 0 if g is None else g
    return rows


def dense(gradients: Iterable[Tensor | None]) -> list[Tensor | None]:
    """An embedding may hand out sparse gradients: rows are dense, whatever layer they come from."""
    return [g.to_dense() if g is not None and g.is_sparse else g for g in gradients]


def _by_func(
    f: Callable[[list[Tensor]], tuple[list[Tensor], Any]], inputs: list[Tensor], differentiable: bool
) -> Linearized:
    # torch.func hands out tensors only: what else `extra` holds, and its structure, goes round by the side.
    beside: list[Any] = []

    def tensors_only(points: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        with AffineApart() if differentiable else nullcontext():
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
        with full_precision(inputs):
            return dense(pull(filled)[0][among])

    return Linearized(outputs, extra, pullback)


def _by_autograd(
    f: Callable[[list[Tensor]], tuple[list[Tensor], Any]], inputs: list[Tensor], differentiable: bool
) -> Linearized:
    # Aliases, not the tensors themselves: the gradient must stop here, wherever else the caller uses them.
    with torch.enable_grad():
        points = [x.view_as(x) if differentiable and x.requires_grad else x.detach().requires_grad_() for x in inputs]
        with AffineApart() if differentiable else nullcontext():
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
        with full_precision(devices):
            return dense(
                torch.autograd.grad(
                    [y for y, _ in pairs],
                    wanted,
                    given,
                    retain_graph=create_graph or not last,
                    create_graph=create_graph,
                    allow_unused=True,
                )
            )

    return Linearized(outputs, extra if differentiable else detached(extra), pullback, tuple(points))


def _is_differentiable(value: Any) -> bool:
    return isinstance(value, Tensor) and (value.is_floating_point() or value.is_complex())
