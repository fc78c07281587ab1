"""The gradients of heads without their loss scales, and which row overflowed in them."""

from functools import reduce

import torch
from torch import Tensor

from functional_jd.core.rows import at_least_float32, per_row
from functional_jd.core.together import each_magnitude, times
from functional_jd.engines.evaluate import Options, row_scales
from functional_jd.engines.row_vjps import Rows
from functional_jd.precision.loss_scale import inverse_of
from functional_jd.torch_compat.torch_internals import under_transform


def assigns_overflows(options: Options) -> bool:
    """Whether each row has a scale of its own."""
    return options.scale is not None and options.scale.ndim > 0


def blamed(blame: Tensor, rows: Rows) -> Rows:
    """The rows `[m, *z]`, all NaN where `[m]` is NaN and not 0."""
    return [None if row is None else row + per_row(blame, row).to(row.dtype) for row in rows]


def unscaled_rows(
    rows: list[Rows], features: list[Rows], factors: Tensor, options: Options
) -> tuple[list[Rows], Tensor | None]:
    """The rows of the heads, one after the other, divided by their scales, in at least float32; with a scale for each
    zeros where one is not finite, and NaN `[m]` for it, if it has a row of features to blame.
    """
    found = [at_least_float32(g) for row in rows for g in row if g is not None]
    blame = None
    if found and assigns_overflows(options):
        sizes = [sum(g.numel() for g in row if g is not None) for row in rows]
        reach = [any(z is not None for z in row) for row in features]
        found, blame = _each_unscaled(found, sizes, reach, factors)
    elif found:
        found = times(found, inverse_of(factors[0], reduce(torch.promote_types, {g.dtype for g in found})))
    rest = iter(found)
    return [[None if g is None else next(rest) for g in row] for row in rows], blame


def _each_unscaled(
    gradients: list[Tensor], sizes: list[int], reach: list[bool], factors: Tensor
) -> tuple[list[Tensor], Tensor]:
    """The gradients of the heads in order, of which each loss has so many elements: see `unscaled_rows`. On an
    accelerator in as many launches for many as for few, where the sizes are equal.
    """
    joined = torch.cat([g.reshape(-1) for g in gradients])
    checked = [part.detach() for part, yes in zip(joined.split(sizes), reach, strict=True) if yes and part.numel()]
    largest = iter(each_magnitude(checked))
    zero = factors.new_zeros(()) if len(checked) < len(sizes) else factors
    blame = torch.stack([next(largest) if yes and size else zero for yes, size in zip(reach, sizes, strict=True)]) * 0
    overflowed, inverse = blame != 0, inverse_of(factors, joined.dtype)
    if len(set(sizes)) == 1:
        blocks = [(joined.view(len(sizes), -1), overflowed[:, None], inverse[:, None])]
    else:
        blocks = list(zip(joined.split(sizes), overflowed.unbind(), inverse.unbind(), strict=True))
    if under_transform() or joined.requires_grad or inverse.requires_grad:
        joined = torch.cat([(part.masked_fill(bad, 0) * own).reshape(-1) for part, bad, own in blocks])
    else:
        for part, bad, own in blocks:
            part.masked_fill_(bad, 0).mul_(own)
    parts = joined.split([g.numel() for g in gradients])
    return [part.view(g.shape) for part, g in zip(parts, gradients, strict=True)], blame


def unscaled_sum(rows: Tensor, scale: Tensor | None, options: Options) -> Tensor:
    """Sum rows `[m, *p]`, each divided by its scale, in at least float32."""
    rows = at_least_float32(rows)
    if scale is None:
        return rows.sum(0)
    inverse = inverse_of(row_scales(scale, len(rows), rows, options.where), rows.dtype)
    return torch.tensordot(inverse, rows, dims=1)
