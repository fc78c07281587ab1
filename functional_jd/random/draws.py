"""torch's functions of random numbers, as functions of a key: each draws its numbers with one key of its own.

`DRAWS[function](numbers, *args, **kwargs)` returns what `function(*args, **kwargs)` returns, with other bits: those of
`numbers`, a mode of `keyed`. Arguments that are wrong go to the function itself, for its error.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from functional_jd.random.keys import permutation

_F: Any = nn.functional


def on_device(key: Tensor, device: torch.device) -> Tensor:
    """The key on a device. The host does not wait: a copy from its memory is made before the call returns."""
    return key if key.device == device else key.to(device, non_blocking=key.is_cpu)


def _events(numbers: Any, probability: Tensor | float, like: Tensor, shape: Any = None) -> Tensor:
    """Booleans that are true with this probability, of the shape of a tensor or of another one."""
    shape = like.shape if shape is None else shape
    double = isinstance(probability, Tensor) and probability.dtype == torch.float64
    uniform = numbers.uniform(math.prod(shape), torch.float64 if double else torch.float32, like.device)
    return uniform.reshape(tuple(shape)) < probability


def _wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype to compute in: at least float32."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


# Factories. `torch.empty` reads sizes, dtype and device as they do, with the same defaults.


def _factory(what: str, empty: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def drawn(numbers: Any, *args: Any, **kwargs: Any) -> Tensor:
        y = empty(*args, **kwargs)
        return _like(y, numbers.draw(what, y.shape, y.dtype, y.device))

    return drawn


def _like(y: Tensor, values: Tensor) -> Tensor:
    """Values for an empty tensor, as it lies in memory; not written into it, as the key may be batched."""
    layout = {4: torch.channels_last, 5: torch.channels_last_3d}.get(y.ndim)
    if layout is not None and y.is_contiguous(memory_format=layout):
        values = values.contiguous(memory_format=layout)
    return values.requires_grad_() if y.requires_grad else values


def _randperm(numbers: Any, n: int, dtype: torch.dtype | None = None, **kwargs: Any) -> Tensor:
    y = torch.empty(n, dtype=dtype or torch.int64, **kwargs)
    return permutation(on_device(numbers.take(), y.device), n).to(y.dtype)


def _normal(numbers: Any, mean: Any, std: Any = 1.0, size: Any = None, **kwargs: Any) -> Tensor:
    if isinstance(std, float | int) and std < 0:
        return torch.normal(mean, std, size or (), **kwargs)
    parts = [x for x in (mean, std) if isinstance(x, Tensor)]
    if not parts:
        y = torch.empty(size, **kwargs)
        shape, dtype, device = y.shape, y.dtype, y.device
    else:
        shape = torch.broadcast_shapes(*[x.shape for x in parts])
        dtype, device = parts[0].dtype, parts[0].device
    z = numbers.draw("normal", shape, _wide(dtype), device)
    mean, std = [x.detach() if isinstance(x, Tensor) else x for x in (mean, std)]
    return (mean + std * z).to(dtype)


def _bernoulli(numbers: Any, input: Tensor, p: Any = None) -> Tensor:
    if isinstance(p, float | int) and not 0 <= p <= 1:
        return torch.bernoulli(input, p)
    return _events(numbers, input.detach() if p is None else p, input).to(input.dtype)


def _multinomial(numbers: Any, input: Tensor, num_samples: int, replacement: bool = False) -> Tensor:
    if input.ndim not in (1, 2) or num_samples < 1 or (not replacement and num_samples > input.shape[-1]):
        return torch.multinomial(input, num_samples, replacement)
    weights = input.detach().double()
    shape, device = [*weights.shape], weights.device
    if not replacement:
        # The smallest of independent exponential waiting times with these rates is that of i with probability p_i.
        return (weights / numbers.draw("exponential", shape, torch.float64, device)).topk(num_samples, dim=-1).indices
    below = weights.cumsum(-1)
    total = below[..., -1:]
    u = numbers.draw("uniform", [*shape[:-1], num_samples], torch.float64, device) * total
    # Rounding must not reach the total, behind which there is no category.
    u = torch.minimum(u, total * (1 - 2.0**-53))
    return torch.searchsorted(below.contiguous(), u.contiguous(), right=True)


def _normal_(numbers: Any, x: Tensor, mean: float = 0.0, std: float = 1.0) -> Tensor:
    if std < 0 or not (x.is_floating_point() or x.is_complex()):
        return x.normal_(mean, std)
    return x.copy_(numbers.draw("normal", x.shape, _wide(x.dtype), x.device).mul(std).add(mean))


def _uniform_(numbers: Any, x: Tensor, *args: float, **kwargs: float) -> Tensor:
    low, high = [*args, *[kwargs.get("from", 0.0), kwargs.get("to", 1.0)][len(args) :]]
    if low > high or not x.is_floating_point() or high - low > torch.finfo(x.dtype).max:
        return x.uniform_(low, high)
    if (low, high) == (0, 1):
        return x.copy_(numbers.draw("uniform", x.shape, x.dtype, x.device))
    values = numbers.draw("uniform", x.shape, _wide(x.dtype), x.device).mul(high - low).add(low).to(x.dtype)
    # Rounding may reach the upper end, which does not belong to the interval.
    return x.copy_(torch.where(values >= high, low, values))


def _bernoulli_(numbers: Any, x: Tensor, p: Any = 0.5) -> Tensor:
    if isinstance(p, float | int) and not 0 <= p <= 1:
        return x.bernoulli_(p)
    return x.copy_(_events(numbers, p, x))


# Dropout, and attention with dropout.


def _dropout(feature: bool = False, alpha: bool = False, in_place: bool = False) -> Callable[..., Tensor]:
    def drawn(numbers: Any, input: Tensor, p: float, train: bool) -> Tensor:
        if not 0 <= p <= 1:
            return torch.dropout(input, p, train)
        if p == 0 or not train or input.numel() == 0:
            return input
        multiply = input.mul_ if in_place else input.mul
        if p == 1:
            return multiply(torch.zeros((), dtype=input.dtype, device=input.device))
        shape = (*input.shape[:2], *[1] * (input.ndim - 2)) if feature else input.shape
        # As torch does it: in the input's dtype, step by step.
        noise = _events(numbers, 1 - p, input, shape).to(input.dtype)
        if not alpha:
            return multiply(noise.div_(1 - p))
        slope = 1.7580993408473766
        a = 1 / math.sqrt((slope * slope * p + 1) * (1 - p))
        shift = noise.add(-1).mul_(slope * a).add_(slope * a * p)
        return multiply(noise.mul_(a)).add_(shift)

    return drawn


def _attention(
    numbers: Any, query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None,
    dropout_p: float = 0.0, is_causal: bool = False, *, scale: float | None = None, enable_gqa: bool = False,
) -> Tensor:  # fmt: skip
    options: dict[str, Any] = {"scale": scale, "enable_gqa": enable_gqa}
    if not 0 < dropout_p < 1:  # without numbers, or its error
        whole = _F.scaled_dot_product_attention(
            query, key, value, attn_mask, 0.0 if dropout_p == 1 else dropout_p, is_causal, **options
        )
        return whole * 0 if dropout_p == 1 else whole
    # With unit vectors as values, torch returns the weights.
    units = torch.eye(key.shape[-2], dtype=value.dtype, device=value.device).expand(*key.shape[:-2], -1, -1)
    weights = _F.scaled_dot_product_attention(query, key, units, attn_mask, 0.0, is_causal, **options)
    if enable_gqa:
        value = value.repeat_interleave(query.shape[-3] // value.shape[-3], -3)
    return _dropout()(numbers, weights, dropout_p, True) @ value


DRAWS: dict[Any, Callable[..., Any]] = {
    torch.rand: _factory("uniform", torch.empty),
    torch.randn: _factory("normal", torch.empty),
    torch.rand_like: _factory("uniform", torch.empty_like),
    torch.randn_like: _factory("normal", torch.empty_like),
    torch.randperm: _randperm,
    torch.normal: _normal,
    torch.bernoulli: _bernoulli,
    Tensor.bernoulli: _bernoulli,
    torch.multinomial: _multinomial,
    Tensor.multinomial: _multinomial,
    Tensor.normal_: _normal_,
    Tensor.uniform_: _uniform_,
    Tensor.bernoulli_: _bernoulli_,
    torch.dropout: _dropout(),
    torch.dropout_: _dropout(in_place=True),
    torch.feature_dropout: _dropout(feature=True),
    torch.feature_dropout_: _dropout(feature=True, in_place=True),
    torch.alpha_dropout: _dropout(alpha=True),
    torch.alpha_dropout_: _dropout(alpha=True, in_place=True),
    torch.feature_alpha_dropout: _dropout(feature=True, alpha=True),
    torch.feature_alpha_dropout_: _dropout(feature=True, alpha=True, in_place=True),
    _F.scaled_dot_product_attention: _attention,
}
"""Functions in C++, as Python calls them."""
