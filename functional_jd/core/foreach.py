"""Many tensors in a few launches of an accelerator: magnitudes, products with a number, copies, choices."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from functional_jd.torch_compat.torch_internals import private, under_transform

_times: Any = private("_foreach_mul", "loss scales", otherwise=lambda leaves, factor: [x * factor for x in leaves])
_copy_each: Any = private("_foreach_copy_", "adamw", otherwise=lambda to, given: list(map(Tensor.copy_, to, given)))

# Leaves of up to so many elements are looked at together; on an accelerator all, if they have no more together: 4 MB.
_SMALL, _SMALL_ELSEWHERE = 1 << 10, 1 << 20
# Of these, a product with 1 is a copy in CUDA: a NaN may become another one. Other devices may flush tiny numbers.
_COPIED = {torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32}
_CHOSEN = 1 << 14  # elements, at most, of tensors that are joined for one `torch.where`


def largest_magnitude(tensors: list[Tensor]) -> Tensor | None:
    """The largest magnitude of all values `[]`, NaN if one is NaN, constant to derivatives; None of no values."""
    values = [x.detach() if x.requires_grad else x for x in tensors if x.numel()]
    if not values:
        return None
    if not (values[0].is_cpu or under_transform()):
        if sum(x.numel() for x in values) <= _SMALL_ELSEWHERE and len({x.dtype for x in values}) == 1 < len(values):
            # In any order: a matrix that is the transpose of another is not copied.
            rows = [x.mT if x.ndim == 2 and not x.is_contiguous() else x for x in values]
            values = [torch.cat([x.reshape(-1) for x in rows])]
        if len(values) == 1:
            return torch.linalg.vector_norm(values[0], torch.inf)
        # Without the flag, torch takes the tensors of a tracer one by one. Other devices may not know `foreach`.
        return torch.nn.utils.get_total_norm(values, torch.inf, foreach=True if values[0].is_cuda else None)
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


def times(leaves: list[Tensor], factor: Tensor) -> list[Tensor]:
    """The products of tensors with a factor `[]`, each in its own dtype: of all of one dtype at once."""
    # Where the factor requires grad, the derivative of torch's own raises.
    if len({leaf.dtype for leaf in leaves}) == 1 and not (under_transform() or factor.requires_grad):
        return _times(leaves, factor.to(leaves[0].device, leaves[0].dtype))
    return [leaf * factor.to(leaf.device, leaf.dtype) for leaf in leaves]


def copy_each(to: Sequence[Tensor], given: Sequence[Tensor]) -> None:
    """Copy into many tensors: one launch for all of a dtype and a layout."""
    alike = len({(x.dtype, x.device) for x in (*to, *given)}) == 1 and not any(x.requires_grad for x in given)
    if alike and [*map(Tensor.stride, to)] == [*map(Tensor.stride, given)]:
        _copy_each(list(to), list(given))
        return
    groups: dict[Any, list[tuple[Tensor, Tensor]]] = {}
    for target, x in zip(to, given, strict=True):
        if x.requires_grad:
            target.copy_(x)
            continue
        key = target.dtype, x.dtype, target.is_cpu, target.stride() == x.stride()
        groups.setdefault(key, []).append((target, x))
    for pairs in groups.values():
        _copy_each(*map(list, zip(*pairs, strict=True)))


def clone_each(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Copies, detached: on an accelerator in one launch for each dtype."""
    if not _few_launches(tensors):
        return [(x.detach() if x.requires_grad else x).clone() for x in tensors]
    copies: dict[int, Tensor] = {}
    for dtype in {x.dtype for x in tensors}:
        places = [index for index, x in enumerate(tensors) if x.dtype is dtype]
        own = [tensors[index] for index in places]
        if own[0].is_cuda and dtype in _COPIED:
            made = _times(own, 1)
        else:
            copy_each(made := list(map(torch.empty_like, own)), own)
        copies |= dict(zip(places, made, strict=True))
    return [copies[index] for index in range(len(tensors))]


def where_each(flag: Tensor, new: Sequence[Tensor], old: Sequence[Tensor]) -> list[Tensor]:
    """`torch.where` of many pairs of tensors with the same shapes and dtypes; small ones are joined."""
    if not _few_launches((*new, *old)):
        return [torch.where(flag, x, y) for x, y in zip(new, old, strict=True)]
    small: dict[torch.dtype, list[int]] = {}
    for index, x in enumerate(new):
        if x.numel() <= _CHOSEN:
            small.setdefault(x.dtype, []).append(index)
    found: dict[int, Tensor] = {}
    for places in (own for own in small.values() if len(own) > 4):  # of fewer, joining takes as many launches
        both = [torch.cat([given[index].reshape(-1) for index in places]) for given in (new, old)]
        parts = torch.where(flag, *both).split([new[index].numel() for index in places])
        shaped = [part.view(new[index].shape) for part, index in zip(parts, places, strict=True)]
        found |= dict(zip(places, clone_each(shaped), strict=True))  # each has memory of its own
    pairs = enumerate(zip(new, old, strict=True))
    return [found[index] if index in found else torch.where(flag, x, y) for index, (x, y) in pairs]


def _few_launches(tensors: Sequence[Tensor]) -> bool:
    """Whether several tensors, plain, dense and without gradients, stand on one accelerator."""
    if len(tensors) < 2 or tensors[0].is_cpu or torch.compiler.is_compiling() or under_transform():
        return False
    device, plain = tensors[0].device, all(type(x) is Tensor and x.layout is torch.strided for x in tensors)
    return plain and all(x.device == device and not x.requires_grad for x in tensors)
