"""Clipping of pytrees by norm: `torch.nn.utils.clip_grad_norm_` as a pure function.

    direction = clip_by_norm(aggregate(rule, jacobian).direction, 1.0)

Clip between `aggregate` and the optimizer, where the direction is unscaled. TypeError: a leaf is not a floating-point
tensor. ValueError: an empty tree, a negative bound, or a `norm_type` below 1.
"""

import math
from functools import reduce

import torch
from torch import Tensor

from functional_jd.core.arguments import at_least, check_number
from functional_jd.core.sharding import over_all_ranks, shard_of, sharded_as, sum_over_shards
from functional_jd.core.tree import any_sharded, floating_leaves, tree_map
from functional_jd.core.types import Direction


def global_norm(direction: Direction, norm_type: float = 2.0) -> Tensor:
    """Compute the norm of all entries of a direction: `(sum_k |d_k|^p)^(1/p)`.

    Args:
        direction: pytree of floating-point tensors of any shapes.
        norm_type: the power p >= 1; `math.inf` for the largest magnitude.

    Returns:
        `[]`, in the unit of the direction and its widest dtype, at least float32. Zero for tensors without entries.
        Infinite or NaN only if an entry is, or if the norm itself overflows that dtype.

    Guarantees:
        Homogeneous: entries of 1e-30 do not underflow, those of 1e30 do not overflow. The derivative at zero is zero.

    Source:
        `torch.nn.utils.get_total_norm`.
    """
    unit, ratio = _unit_and_ratio(direction, norm_type)
    return unit * ratio


def clip_by_norm(direction: Direction, max_norm: float | Tensor, norm_type: float = 2.0) -> Direction:
    """Scale a direction whose norm exceeds `max_norm` to this norm.

    `direction min(1, max_norm / global_norm(direction, p))`

    Args:
        direction: pytree of floating-point tensors of any shapes, unscaled, as `aggregate` returns it. For a scaled
            direction pass `max_norm * scale.scale`.
        max_norm: a number >= 0 or a tensor `[]`, in the unit of the direction.
        norm_type: the power p >= 1; `math.inf` for the largest magnitude.

    Returns:
        A pytree like the direction, in its dtypes. `global_norm` returns the norm before clipping.

    Guarantees:
        A direction of norm at most `max_norm` is returned bit for bit; zero stays zero. Homogeneous to rounding, also
        if the norm overflows the dtype of the entries. An infinite entry becomes NaN, and NaN stays NaN.

    Source:
        Pascanu, Mikolov & Bengio, On the difficulty of training recurrent neural networks, ICML 2013, algorithm 1;
        `torch.nn.utils.clip_grad_norm_`.

    Differences:
        From torch, which divides by the norm + 1e-6: there, `max_norm=1e-6` halves a direction of norm 1e-6.
    """
    check_number("max_norm", max_norm, at_least(0), "Pass math.inf to clip nothing.", tensors=True)
    unit, ratio = _unit_and_ratio(direction, norm_type)
    exceeds = unit * ratio > max_norm
    # Both operands are replaced in the branch that `where` discards: 0 / 0 or inf there would make derivatives NaN.
    factor = torch.where(exceeds, max_norm, torch.zeros_like(ratio)) / torch.where(exceeds, ratio, 1)
    # The norm and its inverse are never computed: either may overflow or underflow where the result does not.

    def clipped(d: Tensor) -> Tensor:
        return torch.where(exceeds, (d.to(unit.dtype) / unit * factor).to(d.dtype), d)

    return tree_map(lambda d: sharded_as(clipped(shard_of(d)), d), direction)


def _unit_and_ratio(direction: Direction, norm_type: float) -> tuple[Tensor, Tensor]:
    """Return two factors of the norm: the largest magnitude, detached, and the norm of the entries divided by it."""
    check_number("norm_type", norm_type, at_least(1), "Common values are 2.0 and math.inf.")
    leaves, _ = floating_leaves(direction)
    dtype = reduce(torch.promote_types, (leaf.dtype for leaf in leaves), torch.float32)
    # A rank may hold no entry of a leaf that others do.
    shards = [leaf.to(dtype) for leaf in map(shard_of, leaves)]
    promoted = [shard for shard in shards if shard.numel()]
    zero = shards[0].new_zeros((), dtype=dtype)
    peak = over_all_ranks("most", torch.stack([zero, *(x.detach().abs().amax() for x in promoted)]).amax(), leaves)
    unit = torch.where((peak > 0) & (peak < torch.inf), peak, 1)
    norms = [torch.linalg.vector_norm(shard / unit, norm_type) if shard.numel() else zero for shard in shards]
    if not any_sharded(leaves):
        return unit, torch.linalg.vector_norm(torch.stack(norms), norm_type)
    if norm_type == math.inf:
        return unit, over_all_ranks("most", torch.stack(norms).amax(), leaves)
    total = sum_over_shards([norm**norm_type for norm in norms], leaves)
    return unit, torch.where(total == 0, 0, torch.where(total == 0, 1, total) ** (1 / norm_type))
