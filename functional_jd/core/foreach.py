"""Many tensors in a few launches of an accelerator: their largest magnitude, their products with a number, copies."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from functional_jd.torch_compat.torch_internals import private, under_transform

_times: Any = private("_foreach_mul", "loss scales", otherwise=lambda leaves, factor: [x * factor for x in leaves])
copy_each: Any = private("_foreach_copy_", "adamw", otherwise=lambda to, given: list(map(Tensor.copy_, to, given)))
"""Copies into many tensors."""

# Leaves of up to so many elements are looked at together; on an accelerator all, if they have no more together: 4 MB.
_SMALL, _SMALL_ELSEWHERE = 1 << 10, 1 << 20


def largest_magnitude(tensors: list[Tensor]) -> Tensor | None:
    """The largest magnitude of all values `[]`, NaN if one is NaN, constant to derivatives; None of no values."""
    values = [x.detach() if x.requires_grad else x for x in tensors if x.numel()]
    if not values:
        return None
    if not (values[0].is_cpu or under_transform()):
        if sum(x.numel() for x in values) <= _SMALL_ELSEWHERE and len({x.dtype for x in values}) == 1 < len(values):
            values = [torch.cat([_flat(x) for x in values])]
        one = len(values) == 1
        return (
            torch.linalg.vector_norm(values[0], torch.inf) if one else torch.nn.utils.get_total_norm(values, torch.inf)
        )
    small: list[Tensor] = []
    extrema: list[Tensor] = []
    joins = not torch.compiler.is_compiling()
    for x in values:
        if joins and x.numel() <= _SMALL and x.device == values[0].device:
            small.append(x if x.ndim == 1 else x.reshape(-1))
        else:
            extrema.extend(torch.aminmax(x))
    if small:  # of small leaves, a call costs more than what it computes
        joined = small[0] if len(small) == 1 else torch.cat(small)
        if not extrema:
            return joined.abs().amax()
        extrema.extend(torch.aminmax(joined))
    return torch.stack(extrema).abs().amax()


def _flat(x: Tensor) -> Tensor:
    """The elements in any order, of a matrix or its transpose without a copy."""
    return (x.mT if x.ndim == 2 and not x.is_contiguous() else x).reshape(-1)


def each_magnitude(tensors: Sequence[Tensor]) -> list[Tensor]:
    """The largest magnitude `[]` of each tensor, NaN if a value is, 0 of no values."""
    magnitude = (lambda x: x.abs().amax()) if under_transform() else partial(torch.linalg.vector_norm, ord=torch.inf)
    return [magnitude(x) if x.numel() else x.new_zeros(()) for x in tensors]


def times(leaves: list[Tensor], factor: Tensor) -> list[Tensor]:
    """The products of tensors with a factor `[]`, each in its own dtype: of all of one dtype at once."""
    if not leaves:
        return []
    factors = {dtype: factor.to(leaves[0].device, dtype) for dtype in {leaf.dtype for leaf in leaves}}
    if len(factors) == 1 and not under_transform():
        return _times(leaves, factors[leaves[0].dtype])
    return [leaf * factors[leaf.dtype] for leaf in leaves]
