"""Many vector-Jacobian products: rows by vmap, in groups, or one by one; or one product, for weights of the rows."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain
from typing import Any, TypeAlias, TypeVar

import torch
from torch import Tensor

from functional_jd.core.float64 import widest
from functional_jd.core.foreach import copy_each
from functional_jd.core.rows import neighbours, per_row, widest_join
from functional_jd.core.tree import Structure
from functional_jd.core.types import Direction
from functional_jd.engines.choose import choose_rows, stack_at_once
from functional_jd.engines.evaluate import check_weights, element_count, row_scales
from functional_jd.engines.plan import Plan
from functional_jd.engines.vjp import Vjp
from functional_jd.precision.autocast import autocast_disabled
from functional_jd.precision.loss_scale import common_scale, divided
from functional_jd.torch_compat.repaired_ops import refuse_wrong_rows
from functional_jd.torch_compat.slow_path import attempt
from functional_jd.torch_compat.torch_internals import under_transform

Rows: TypeAlias = list[Tensor | None]
"""m cotangents or gradients, by tensor: each `[m, *x]`, or `None` where all rows are zero."""

Result = TypeVar("Result")

_COTANGENTS = 1 << 16  # elements of the cotangents that the loop makes at once

LOOP = "differentiates one row after the other, which takes m backward passes"


def vjp_rows(point: Vjp, cotangents: Rows, plan: Plan) -> Rows:
    """The vector-Jacobian products of m cotangents, stacked."""
    m = next((len(c) for c in cotangents if c is not None), 0)
    if m == 0:
        return [None] * len(point.pullback([None] * len(cotangents)))

    def one_by_one() -> Rows:
        by_row = zip(*[[None] * m if c is None else c.unbind() for c in cotangents], strict=True)
        return stack_rows((point.pullback(list(cotangent)) for cotangent in by_row), m)

    return _rows(point, m, plan, lambda group: [c if c is None else c[group] for c in cotangents], one_by_one)


def jacobian_rows(point: Vjp, factors: Tensor, plan: Plan) -> Rows:
    """The rows of the Jacobian: the gradient of every element of the outputs, multiplied by its factor `[m]`."""
    m = len(factors)
    one_by_one = lambda: stack_rows(gradients_one_by_one(point, factors), m)
    return _rows(point, m, plan, lambda group: _cotangents(point, factors, group), one_by_one)


def _rows(point: Vjp, m: int, plan: Plan, cotangents: Callable[[slice], Rows], one_by_one: Callable[[], Rows]) -> Rows:
    """Rows in the way that shapes choose."""
    with autocast_disabled():
        mode, chunk_size = choose_rows(point, m, plan)
        return by_mode(mode, lambda: _together(point, cotangents, m, chunk_size), one_by_one, plan)


def dense(found: Sequence[Tensor | None], leaves: Sequence[Tensor], *rows: int) -> list[Tensor]:
    """One gradient `[*p]` per leaf, or m rows `[m, *p]`, zeros instead of None."""
    filled: list[Any] = list(found)
    for index, x in enumerate(filled):
        if x is None:
            filled[index] = leaves[index].new_zeros((*rows, *leaves[index].shape))
    return filled


def blamed(magnitude: Tensor, rows: Rows, own: bool = False) -> Rows:
    """The rows `[m, *z]`, all NaN if the magnitude of the heads' gradient by this loss is not finite; `own`: these have
    memory of their own, and may be overwritten.
    """
    own = own and not (under_transform() or any(row is not None and row.requires_grad for row in rows))
    # Zero times what is not finite is NaN.
    add = Tensor.add_ if own else lambda row, x, alpha: torch.add(row, x.to(row.dtype), alpha=alpha)
    return [None if row is None else add(row, per_row(magnitude, row), alpha=0) for row in rows]


def by_mode(mode: str, vmapped: Callable[[], Result], looped: Callable[[], Result], plan: Plan) -> Result:
    """Run one of two forms of the same: `"auto"` takes the vmapped one and, if vmap raises, the loop."""
    if mode == "loop":
        return looped()
    if mode == "vmap" or torch.compiler.is_compiling():
        return vmapped()
    return attempt(vmapped, looped, instead=LOOP, journal=plan.journal)


def gradients_one_by_one(point: Vjp, factors: Tensor) -> Iterator[list[Tensor | None]]:
    """The rows of the Jacobian one after the other. Other outputs get no cotangent: zeros times infinity are NaN."""
    sizes = [y.numel() for y in point.outputs]
    parts = factors.unbind() if sizes.count(1) == len(sizes) else factors.split(sizes)
    for owner, (y, own) in enumerate(zip(point.outputs, parts, strict=True)):
        given: list[Tensor | None] = [None] * len(point.outputs)
        # Most losses are one number, which needs no diagonal.
        one = own if y.shape == own.shape and y.dtype is own.dtype else own.reshape(y.shape).to(y.dtype)
        for given[owner] in [one] if y.numel() == 1 else _one_by_one(y, own):
            yield point.pullback(given)


def _one_by_one(y: Tensor, factors: Tensor) -> Iterator[Tensor]:
    """The cotangents of the elements of an output."""
    for group in _groups(y.numel(), max(1, _COTANGENTS // max(1, y.numel()))):
        block = _diagonal(factors, group).to(y.dtype)
        yield from block.reshape(len(block), *y.shape).unbind()


def are_linear(point: Vjp, factors: Tensor) -> list[bool]:
    """Which rows halve with their factors."""
    pairs = zip(gradients_one_by_one(point, factors), gradients_one_by_one(point, factors / 2), strict=True)
    return [all(map(_is_half, halves, wholes)) for wholes, halves in pairs]


def _is_half(half: Tensor | None, whole: Tensor | None) -> bool:
    """Whether one is half of the other, up to half of the digits, or not finite."""
    if half is None or whole is None or not half.numel():
        return True
    return not (whole - 2 * half).abs().max() > torch.finfo(half.dtype).eps ** 0.5 * whole.abs().max()


def stack_rows(gradients: Iterable[list[Tensor | None]], m: int) -> Rows:
    """Rows by input, from m gradients by row. The caller switches autocast off."""
    parts = iter(gradients)
    first = next(parts)
    if stack_at_once(first, m):
        return _stacked([first, *parts])
    return _written(enumerate(chain([first], parts)), m)


def _groups(m: int, size: int) -> Iterator[slice]:
    return (slice(start, min(start + size, m)) for start in range(0, m, size))


def _diagonal(factors: Tensor, group: slice) -> Tensor:
    """Some rows of the diagonal matrix of the factors, without the others: there may be too many for all of them."""
    # eye(m) * factors would turn one infinite factor into a NaN in every row.
    m, square = len(factors), torch.diag(factors[group])
    return square if len(square) == m else torch.nn.functional.pad(square, (group.start, m - group.stop))


def _cotangents(point: Vjp, factors: Tensor, group: slice) -> Rows:
    """The cotangents of some of the m objectives, by output `[rows, *y]`."""
    blocks = _diagonal(factors, group).split([y.numel() for y in point.outputs], dim=1)
    return [block.reshape(len(block), *y.shape).to(y.dtype) for block, y in zip(blocks, point.outputs, strict=True)]


def _together(point: Vjp, cotangents: Callable[[slice], Rows], m: int, chunk_size: int | None) -> Rows:
    """Rows by vmap, `chunk_size` at once. Cotangents are made by groups, as those of all objectives are `[m, m]`."""
    reached: list[bool] = []
    refuse_wrong_rows(point.outputs)

    def rows(group: slice) -> Rows:
        given = cotangents(group)

        def row(*some: Tensor) -> list[Tensor]:
            rest = iter(some)
            gradient = point.pullback([None if c is None else next(rest) for c in given])
            reached[:] = [g is not None for g in gradient]
            return [g for g in gradient if g is not None]

        found = iter(torch.vmap(row)(*[c for c in given if c is not None]))
        return [next(found) if yes else None for yes in reached]

    if chunk_size is None or chunk_size >= m:
        return rows(slice(0, m))
    parts = (rows(group) for group in _groups(m, chunk_size))
    if under_transform():
        return [None if column[0] is None else torch.cat(column) for column in zip(*parts, strict=True)]
    return _written(zip(_groups(m, chunk_size), parts, strict=True), m)


def _stacked(gradients: list[list[Tensor | None]]) -> Rows:
    """Stack the rows of each input, and let them go before the next one's are stacked."""
    columns = [list(column) for column in zip(*gradients, strict=True)][::-1]
    for gradient in gradients:
        gradient.clear()  # the caller holds the first
    return [_stack(columns.pop()) for _ in range(len(columns))]


def _stack(column: list[Tensor | None]) -> Tensor | None:
    missing, like = False, None
    for g in column:
        missing, like = missing or g is None, g if like is None else like
    if like is None:
        return None
    return torch.stack([torch.zeros_like(like) if g is None else g for g in column] if missing else column)  # pyright: ignore[reportArgumentType]


def _written(parts: Iterable[tuple[int | slice, list[Tensor | None]]], m: int) -> Rows:
    """Write each part into preallocated rows: the parts and the rows are never in memory together."""
    rows: Rows = []
    for place, part in parts:
        rows = rows or _memory(part, m, one=isinstance(place, int))
        to: list[Tensor] = []
        for k, (mine, g) in enumerate(zip(rows, part, strict=True)):
            if mine is None and g is not None:
                rows[k] = mine = g.new_zeros(m, *(g.shape if isinstance(place, int) else g.shape[1:]))
            if g is not None and mine is not None:
                to.append(mine[place])
            elif mine is not None:
                mine[place] = 0
            g = None
        copy_each(to, [g for g in part if g is not None])
        part.clear()  # `enumerate` and the caller hold the list while the next part is differentiated
    return rows


def _memory(part: list[Tensor | None], m: int, one: bool) -> Rows:
    """Rows without values, like `part`, one or several. On an accelerator, neighbours are columns of a matrix."""
    rows: Rows = [None] * len(part)
    own = [(k, g, g.shape if one else g.shape[1:]) for k, g in enumerate(part) if g is not None]
    apart = [g.is_cpu or g.requires_grad for _, g, _ in own]
    kinds = [(k if apart[k] else (g.dtype, g.device), shape.numel()) for k, (_, g, shape) in enumerate(own)]
    for group in neighbours(kinds, widest_join(m, on_host=False)):
        matrix, start = own[group[0]][1].new_empty(m, sum(kinds[k][1] for k in group)), 0
        for k, _, shape in (own[k] for k in group):
            rows[k] = matrix[:, start : start + shape.numel()].view(m, *shape)
            start += shape.numel()
    return rows


def weighted_cotangent(outputs: list[Tensor], weights: Tensor, plan: Plan) -> tuple[list[Tensor], Tensor | None]:
    """The scaled weights, by output, and the scale `[]` that they have in common; None without a scale."""
    m, common = element_count(outputs), None
    check_weights(weights, m)
    if plan.scale is not None:
        weights = weights.to(widest(outputs[0].device))
        scales = row_scales(plan, m, outputs[0])
        common = common_scale(weights, scales) if plan.scale.ndim else scales[0]
        weights = weights * common
    return by_output(outputs, weights), common


def by_output(outputs: list[Tensor], numbers: Tensor) -> list[Tensor]:
    """The cotangent with one number `[m]` for each element of the outputs."""
    if len({y.dtype for y in outputs}) == 1:  # at once, and not for each
        numbers = numbers.to(outputs[0].dtype)
    parts = numbers.split([y.numel() for y in outputs]) if len(outputs) > 1 else [numbers]
    return [part.reshape(y.shape).to(y.dtype) for part, y in zip(parts, outputs, strict=True)]


def unscaled(common: Tensor | None, found: list[Tensor], plan: Plan) -> tuple[list[Tensor], Tensor | None]:
    """Gradients divided by the scale if there is one, and whether they are finite, in the scale's shape: None without a
    scale. If they are not finite, they may be anything.
    """
    if common is None or plan.scale is None:
        return [g if g.dtype.itemsize >= 4 else g.float() for g in found], None
    found, finite = divided(common, found)
    return found, finite.expand(plan.scale.shape)


def pulled(
    point: Vjp, leaves: Sequence[Tensor], structure: Structure, plan: Plan, weights: Tensor, *, last: bool = False
) -> tuple[Direction, Tensor | None]:
    """One backward pass with the weights as cotangent: the unscaled direction, and whether it is finite."""
    with autocast_disabled():
        cotangent, common = weighted_cotangent(point.outputs, weights, plan)
        found, finite = unscaled(common, dense(point.pullback(cotangent, last=last), leaves), plan)
    return structure.unflatten(found), finite
