"""Layers whose parameters scale or shift elementwise: norms, `prelu`, plain products and sums.

Such a parameter is small, and its row is a sum over positions, which is formed in at least float32.
"""

from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from functional_jd.core.rows import at_least_float32

Options: TypeAlias = dict[str, Any]

Rows: TypeAlias = Callable[[Tensor, Tensor, Options], Tensor]
"""`rows(input [m or 1, *x], gradients of the output [m, *y], other arguments) -> [m, *leaf]`."""

Normalize: TypeAlias = Callable[[Tensor, Options], Tensor]
"""`normalize(input [m or 1, *x], other arguments)`: the output of the norm without weight and bias."""


def _times(x: Tensor, gradient: Tensor, options: Options) -> Tensor:
    """Rows of a factor, broadcast or not."""
    aligned = x.reshape(len(x), *[1] * (gradient.ndim - x.ndim), *x.shape[1:])
    return _summed(at_least_float32(gradient) * at_least_float32(aligned), options["shape"])


def plus(_x: Tensor, gradient: Tensor, options: Options) -> Tensor:
    """Rows of a summand."""
    return _summed(gradient, options["shape"])


def _minus(_x: Tensor, gradient: Tensor, options: Options) -> Tensor:
    """Rows of what is subtracted."""
    return -_summed(gradient, options["shape"])


def slopes(x: Tensor, gradient: Tensor, options: Options) -> Tensor:
    """Rows of what `prelu` multiplies negative numbers by: one number, or one for each channel."""
    trailing = gradient.ndim - 3 if options["shape"].numel() > 1 else 0
    return _summed(at_least_float32(gradient) * at_least_float32(x).clamp(max=0), options["shape"], trailing)


def _scales(normalize: Normalize, *, channels: bool) -> Rows:
    """Rows of a norm's weight, along its channels (the dimension after the first), or the last dimensions."""

    def rows(x: Tensor, gradient: Tensor, options: Options) -> Tensor:
        trailing = gradient.ndim - 3 if channels else 0
        return _summed(at_least_float32(gradient) * normalize(at_least_float32(x), options), options["shape"], trailing)

    return rows


def _shifts(*, channels: bool) -> Rows:
    """Rows of a norm's bias."""

    def rows(_x: Tensor, gradient: Tensor, options: Options) -> Tensor:
        return _summed(gradient, options["shape"], gradient.ndim - 3 if channels else 0)

    return rows


def _layer_norm(x: Tensor, options: Options) -> Tensor:
    return nn.functional.layer_norm(x, options["normalized_shape"], eps=options.get("eps", 1e-5))


def _rms_norm(x: Tensor, options: Options) -> Tensor:
    return nn.functional.rms_norm(x, options["normalized_shape"], eps=options.get("eps"))


def _group_norm(x: Tensor, options: Options) -> Tensor:
    return nn.functional.group_norm(x.flatten(0, 1), options["num_groups"], eps=options.get("eps", 1e-5)).view_as(x)


def _batch_norm(x: Tensor, options: Options) -> Tensor:
    if not options.get("training", False):
        return _by_statistics(x, options)
    # Each row has a batch of its own: as if it were more channels.
    apart = x.transpose(0, 1)
    normalized = nn.functional.batch_norm(apart.flatten(1, 2), None, None, training=True, eps=options.get("eps", 1e-5))
    return normalized.view_as(apart).transpose(0, 1)


def _instance_norm(x: Tensor, options: Options) -> Tensor:
    if not options.get("use_input_stats", True):
        return _by_statistics(x, options)
    return nn.functional.instance_norm(x.flatten(0, 1), eps=options.get("eps", 1e-5)).view_as(x)


def _by_statistics(x: Tensor, options: Options) -> Tensor:
    mean, var = options["running_mean"], options["running_var"]
    mean, var = mean.to(x.dtype), var.to(x.dtype)
    return nn.functional.batch_norm(x.flatten(0, 1), mean, var, eps=options.get("eps", 1e-5)).view_as(x)


def _summed(rows: Tensor, shape: torch.Size, trailing: int = 0) -> Tensor:
    """`[m, *y]` as `[m, *shape]`: the sum over all along which that shape is broadcast, so many dimensions after it."""
    aligned = (*[1] * (rows.ndim - 1 - len(shape) - trailing), *shape, *[1] * trailing)
    dims = [d for d, size in enumerate(aligned, start=1) if size == 1]
    dtype = torch.promote_types(rows.dtype, torch.float32)
    total = rows.sum(dims, dtype=dtype) if dims else rows.to(dtype)
    return total.reshape(len(rows), *shape)


def _affine(names: str, normalize: Normalize, *, channels: bool) -> tuple[tuple[str, ...], dict[str, Rows]]:
    forms = {"weight": _scales(normalize, channels=channels), "bias": _shifts(channels=channels)}
    return tuple(names.split()), forms


NORM_FORMS = {
    nn.functional.layer_norm: _affine("input normalized_shape weight bias eps", _layer_norm, channels=False),
    nn.functional.rms_norm: _affine("input normalized_shape weight eps", _rms_norm, channels=False),
    nn.functional.group_norm: _affine("input num_groups weight bias eps", _group_norm, channels=True),
    nn.functional.batch_norm: _affine(
        "input running_mean running_var weight bias training momentum eps", _batch_norm, channels=True
    ),
    nn.functional.instance_norm: _affine(
        "input running_mean running_var weight bias use_input_stats momentum eps", _instance_norm, channels=True
    ),
}
"""By op, the names of its arguments, and how to form the rows of its weight and bias."""

ELEMENTWISE_FORMS: dict[Any, dict[str, Rows]] = {
    **{op: {"input": _times, "other": _times} for op in (torch.mul, torch.multiply, Tensor.mul, Tensor.multiply)},
    **{op: {"input": plus, "other": plus} for op in (torch.add, Tensor.add)},
    **{op: {"input": plus, "other": _minus} for op in (torch.sub, torch.subtract, Tensor.sub, Tensor.subtract)},
}
"""By op, how to form the rows of either operand. `x * y` is the method `mul`, and `x + y` and `x - y` are alike."""
