"""Clipping: what `torch.nn.utils.clip_grad_norm_` and `clip_grad_value_` do, as pure functions on pytrees.

    direction = clip_by_norm(aggregate(rule, jacobian).direction, 1.0)

Between `aggregate` and the optimizer: what is clipped is unscaled.
"""

from functools import reduce
from typing import Any

import torch
from torch import Tensor

from functional_jd.core.rows import at_least_float32
from functional_jd.core.tree import floating_leaves, tree_map, tree_unflatten
from functional_jd.core.types import Direction


def global_norm(direction: Direction, norm_type: float = 2.0) -> Tensor:
    """The norm of all entries of a direction, as of one long vector.

    `(sum_k |d_k|^p)^(1/p)`, computed as `peak (sum_k |d_k / peak|^p)^(1/p)` with the largest magnitude `peak`.

    Args:
        direction: pytree of floating-point tensors of any shapes.
        norm_type: the power p >= 1; `math.inf` for the largest magnitude.

    Returns:
        `[]`, in the direction's unit and widest dtype, at least float32. Zero for tensors without entries. Infinite or
        NaN only when an entry is, or when the norm itself is no number of that dtype.

    Raises:
        TypeError: a leaf is no floating-point tensor.
        ValueError: an empty tree, or a `norm_type` below 1.

    Laws:
        Homogeneous: neither entries of 1e-30 nor of 1e30 leave the range. The derivative at zero is zero.

    Source:
        `torch.nn.utils.get_total_norm`.
    """
    unit, ratio = _unit_and_ratio(direction, norm_type, "global_norm")
    return unit * ratio


def clip_by_norm(direction: Direction, max_norm: float | Tensor, norm_type: float = 2.0) -> Direction:
    """Shorten a direction that is longer than `max_norm` to that length.

    `direction min(1, max_norm / global_norm(direction, p))`

    Args:
        direction: pytree of floating-point tensors of any shapes: unscaled, as it comes out of `aggregate`. One that is
            still scaled takes `max_norm * scale.scale`.
        max_norm: a number >= 0 or a tensor `[]`, in the direction's unit.
        norm_type: the power p >= 1; `math.inf` for the largest magnitude.

    Returns:
        A pytree like the direction, in its dtypes. Ask `global_norm` for the norm before clipping.

    Raises:
        TypeError: a leaf is no floating-point tensor.
        ValueError: an empty tree, a negative `max_norm`, or a `norm_type` below 1.

    Laws:
        A direction no longer than `max_norm` comes back bit for bit; zero stays zero. Homogeneous:
        `clip_by_norm(c d, c max_norm) = c clip_by_norm(d, max_norm)` for `c > 0`, to rounding. Entries whose norm is no
        number of their dtype are clipped as any others. An infinite entry comes out as NaN, and NaN stays: never
        hidden.

    Source:
        Pascanu, Mikolov & Bengio, On the difficulty of training recurrent neural networks, ICML 2013, algorithm 1;
        `torch.nn.utils.clip_grad_norm_`.

    Differs:
        From torch, which divides by the norm + 1e-6: a direction of norm 1e-6 is halved there by `max_norm=1e-6`.
    """
    _require_bound(max_norm, "clip_by_norm", "max_norm")
    unit, ratio = _unit_and_ratio(direction, norm_type, "clip_by_norm")
    longer = unit * ratio > max_norm
    # On the side that is not taken, zero over zero and infinity would make derivatives NaN.
    length = torch.where(longer, max_norm, torch.zeros_like(ratio)) / torch.where(longer, ratio, 1)
    # Neither the norm nor its inverse appears: either may leave the range where the outcome does not.
    return tree_map(lambda d: torch.where(longer, (d.to(unit.dtype) / unit * length).to(d.dtype), d), direction)


def clip_by_value(direction: Direction, limit: float | Tensor) -> Direction:
    """Keep every entry of a direction between `-limit` and `limit`.

    `min(max(d_k, -limit), limit)`

    Args:
        direction: pytree of floating-point tensors of any shapes, unscaled.
        limit: a number >= 0 or a tensor `[]`, in the direction's unit.

    Returns:
        A pytree like the direction, in its dtypes.

    Raises:
        TypeError: a leaf is no floating-point tensor.
        ValueError: an empty tree, or a negative `limit`.

    Laws:
        Idempotent; entries within the limit come back bit for bit. NaN stays; infinity becomes the limit, so look at
        what `unscale` says of finiteness, which comes first.

    Source:
        `torch.nn.utils.clip_grad_value_`.
    """
    _require_bound(limit, "clip_by_value", "limit")
    leaves, structure = floating_leaves(direction, "clip_by_value")
    bound: Any = limit
    return tree_unflatten(structure, [at_least_float32(leaf).clamp(-bound, bound).to(leaf.dtype) for leaf in leaves])


def _unit_and_ratio(direction: Direction, norm_type: float, where: str) -> tuple[Tensor, Tensor]:
    """The norm as a product: the largest magnitude, and the norm of what is left after dividing by it.

    The unit is a constant to derivatives: the product does not depend on it.
    """
    if not norm_type >= 1:
        raise ValueError(f"{where}: norm_type must be a number >= 1, found {norm_type}. Usual are 2.0 and math.inf.")
    leaves, _ = floating_leaves(direction, where)
    dtype = reduce(torch.promote_types, (leaf.dtype for leaf in leaves), torch.float32)
    at_least_float32 = [leaf.to(dtype) for leaf in leaves if leaf.numel()]
    if not at_least_float32:
        return leaves[0].new_ones((), dtype=dtype), leaves[0].new_zeros((), dtype=dtype)
    peak = torch.stack([leaf.detach().abs().amax() for leaf in at_least_float32]).amax()
    unit = torch.where((peak > 0) & (peak < torch.inf), peak, 1)
    parts: Any = [torch.linalg.vector_norm(leaf / unit, norm_type) for leaf in at_least_float32]
    return unit, torch.linalg.vector_norm(torch.stack(parts), norm_type)


def _require_bound(bound: Any, where: str, name: str) -> None:
    if not isinstance(bound, Tensor) and not bound >= 0:
        raise ValueError(f"{where}: {name} must be a number >= 0, found {bound}. math.inf clips nothing.")
