"""The gradients of heads without their loss scales, and which row overflowed in them."""

from functools import reduce

import torch
from torch import Tensor

from functional_jd.core.foreach import each_magnitude, times
from functional_jd.core.rows import at_least_float32, magnitudes, per_row
from functional_jd.engines.evaluate import Options, row_scales
from functional_jd.engines.row_vjps import Rows
from functional_jd.precision.loss_scale import inverse_of
from functional_jd.torch_compat.torch_internals import under_transform


def assigns_overflows(options: Options) -> bool:
    """Whether each row has a scale of its own."""
    return options.scale is not None and options.scale.ndim > 0


def blamed(magnitude: Tensor, rows: Rows, own: bool = False) -> Rows:
    """The rows `[m, *z]`, all NaN where the magnitude `[m]` of the heads' rows is not finite; `own`: whether these have
    memory of their own, and may be overwritten.
    """
    # Zero times what is not finite is NaN.
    if own and not (under_transform() or any(row is not None and row.requires_grad for row in rows)):
        return [None if row is None else row.add_(per_row(magnitude, row), alpha=0) for row in rows]
    zero = magnitude * 0
    return [None if row is None else row + per_row(zero, row).to(row.dtype) for row in rows]


def unscaled_rows(
    rows: list[Rows], features: list[Rows], factors: Tensor, options: Options
) -> tuple[list[Rows], Tensor | None]:
    """The rows of the heads, one after the other, divided by their scales, in at least float32; with a scale for each
    zeros where one is not finite, and the magnitude of each `[m]`, if there are rows of features to blame.
    """
    found = [at_least_float32(g) for row in rows for g in row if g is not None]
    largest = None
    if found and assigns_overflows(options):
        sizes = [sum(g.numel() for g in row if g is not None) for row in rows]
        found, largest = _each_unscaled(found, sizes, factors, any(z is not None for row in features for z in row))
    elif found:
        found = times(found, inverse_of(factors[0], reduce(torch.promote_types, {g.dtype for g in found})))
    rest = iter(found)
    return [[None if g is None else next(rest) for g in row] for row in rows], largest


def _each_unscaled(
    gradients: list[Tensor], sizes: list[int], factors: Tensor, blames: bool
) -> tuple[list[Tensor], Tensor | None]:
    """The gradients of the heads in order, of which each loss has so many elements: see `unscaled_rows`. On an
    accelerator in as many launches for many as for few, where the sizes are equal.
    """
    joined = torch.cat([g.reshape(-1) for g in gradients])
    alike = len(set(sizes)) == 1
    largest = _largest(joined.detach(), sizes, alike)
    finite = largest < torch.inf if blames else torch.ones_like(largest, dtype=torch.bool)
    in_place = not (under_transform() or joined.requires_grad or factors.requires_grad)
    # The inverse, or 0, after which zeros are in the place of what is not finite: 0 times inf is NaN.
    own = finite / factors.to(joined.dtype) if in_place else inverse_of(factors, joined.dtype) * finite
    if alike:
        blocks = [(joined.view(len(sizes), -1), own[:, None])]
    else:
        blocks = list(zip(joined.split(sizes), own.unbind(), strict=True))
    zeros = (0.0, 0.0, 0.0) if blames else (torch.nan, torch.inf, -torch.inf)
    if in_place:
        for part, factor in blocks:
            part.nan_to_num_(*zeros).mul_(factor)
    else:
        joined = torch.cat([(part.nan_to_num(*zeros) * factor).reshape(-1) for part, factor in blocks])
    parts = joined.split([g.numel() for g in gradients])
    return [part.view(g.shape) for part, g in zip(parts, gradients, strict=True)], largest if blames else None


def _largest(joined: Tensor, sizes: list[int], alike: bool) -> Tensor:
    """The largest magnitude of each loss's elements `[m]`, NaN if a value is; 0 of none."""
    if alike:
        return magnitudes(joined.view(len(sizes), -1))
    found = iter(each_magnitude([part for part in joined.split(sizes) if part.numel()]))
    zero = joined.new_zeros(())
    return torch.stack([next(found) if size else zero for size in sizes])


def unscaled_sum(rows: Tensor, scale: Tensor | None, options: Options) -> Tensor:
    """Sum rows `[m, *p]`, each divided by its scale, in at least float32."""
    rows = at_least_float32(rows)
    if scale is None:
        return rows.sum(0)
    inverse = inverse_of(row_scales(scale, len(rows), rows, options.where), rows.dtype)
    return torch.tensordot(inverse, rows, dims=1)
