"""A workaround for second derivatives of norm layers that torch gets wrong."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from functional_jd.torch_compat.recomputation import RecomputedMode
from functional_jd.torch_compat.torch_internals import function_name, traceable


class SeparateNormAffine(RecomputedMode):
    """Runs norm layers without weight and bias, which are applied by separate ops, and `weight_norm` as plain ops.

    Where rows are differentiated together and the weight requires a gradient, torch treats the mean and deviation that
    a norm layer saved as constants: derivatives of the rows would be wrong (functorch#534). The second backward pass of
    `weight_norm` treats the norm that it saved as a constant, too.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.note_checkpoints()
        func = traceable(func)
        form: Any = _weight_norm if function_name(func) == "_weight_norm" else _NORMS.get(func, func)
        return form(*args, **(kwargs or {}))


def _layer_norm(
    input: Tensor, normalized_shape: Any, weight: Any = None, bias: Any = None, eps: float = 1e-5
) -> Tensor:
    return _affine(nn.functional.layer_norm(input, normalized_shape, eps=eps), weight, bias)


def _by_channel(norm: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def apart(
        input: Tensor,
        running_mean: Any = None,
        running_var: Any = None,
        weight: Any = None,
        bias: Any = None,
        *rest: Any,
        **options: Any,
    ) -> Tensor:
        shape = (-1, *[1] * (input.ndim - 2))
        parts = [None if part is None else part.reshape(shape) for part in (weight, bias)]
        return _affine(norm(input, running_mean, running_var, None, None, *rest, **options), *parts)

    return apart


def _affine(plain: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    y = plain if weight is None else plain * weight
    return (y if bias is None else y + bias).to(plain.dtype)


def _weight_norm(v: Tensor, g: Tensor, dim: int = 0) -> Tensor:
    return v * (g / torch.norm_except_dim(v, 2, dim))


_NORMS: dict[Any, Callable[..., Tensor]] = {
    nn.functional.layer_norm: _layer_norm,
    nn.functional.batch_norm: _by_channel(nn.functional.batch_norm),
    nn.functional.instance_norm: _by_channel(nn.functional.instance_norm),
}
