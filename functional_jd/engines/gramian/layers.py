"""The known layers, in a table: add a layer here.

A layer says how the rows of its parameters are formed from its input and the gradients of its output: as `Factors`,
whose inner products need no rows, or as rows.
"""

from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn

from functional_jd.engines.gramian.elementwise_layers import ELEMENTWISE_FORMS, NORM_FORMS, plus, slopes
from functional_jd.engines.gramian.factors import Factors
from functional_jd.engines.gramian.parameter_views import FLAT, MATRIX, WHOLE

Form: TypeAlias = Callable[[Tensor, Tensor, dict[str, Any]], Factors | Tensor]
"""`form(input [m or 1, *x], gradients of the output [m, *y], other arguments)`."""


class Layer(NamedTuple):
    """How an op is recorded.

    Attributes:
        names: the names of its positional arguments. The input is `"input"`, or `"other"` where that one is a leaf.
        forms: for each argument that may be a leaf, how its factors or rows are formed.
        fits: `fits(arguments)`: whether the forms hold for these arguments.
        reach: the largest distance of a weight from its leaf, WHOLE, MATRIX or FLAT; other arguments may have any. FLAT
            is for forms that return rows.
        keeps: further tensors that the forms need.
    """

    names: tuple[str, ...]
    forms: dict[str, Form]
    fits: Callable[[dict[str, Any]], bool]
    reach: int = WHOLE
    keeps: tuple[str, ...] = ()


def _columns(x: Tensor) -> Tensor:
    """`[m, *, i]` as `[m, positions, 1, i]`."""
    return x.reshape(len(x), x.shape[1:-1].numel(), 1, x.shape[-1])


def _pixels(x: Tensor, dims: int, groups: int) -> Tensor:
    """`[m, *, channels, *s]` as `[m, positions, groups, channels per group]`."""
    first = x.ndim - dims
    return _channels_first(x.movedim(first - 1, 1).flatten(2), groups)


def _patches(x: Tensor, kernel: tuple[int, ...], positions: torch.Size, options: dict[str, Any]) -> Tensor:
    """What the kernel sees at each position: `[m, *, channels, *s]` as `[m, positions, groups, channels * kernel]`."""
    dims = len(kernel)
    stride, dilation = (_each(options.get(name, 1), dims) for name in ("stride", "dilation"))
    padding = _padding(options.get("padding", 0), kernel, dilation)
    x = nn.functional.pad(x, padding) if any(padding) else x
    first = x.ndim - dims
    for d in range(dims):
        windows = x.unfold(first + d, (kernel[d] - 1) * dilation[d] + 1, stride[d])
        x = windows[..., :: dilation[d]].narrow(first + d, 0, positions[d])
    x = x.movedim((first - 1, *range(x.ndim - dims, x.ndim)), tuple(range(1, dims + 2)))
    return _channels_first(x.flatten(1, dims + 1).flatten(2), options.get("groups", 1))


def _channels_first(x: Tensor, groups: int) -> Tensor:
    """`[m, channels, positions]` as `[m, positions, groups, channels per group]`, neighbours in memory being pixels:
    to copy runs of pixels is several times faster than to copy them one by one.
    """
    return x.unflatten(1, (groups, x.shape[1] // groups)).permute(0, 3, 1, 2)


def _each(value: Any, dims: int) -> tuple[int, ...]:
    values = (value,) if isinstance(value, int) else tuple(value)
    return values * dims if len(values) == 1 else values


def _padding(padding: Any, kernel: tuple[int, ...], dilation: tuple[int, ...]) -> list[int]:
    """As `pad` wants it: last dimension first, before and after."""
    if padding == "same":
        whole = [d * (k - 1) for d, k in zip(dilation, kernel, strict=True)]
        return [n for total in reversed(whole) for n in (total // 2, total - total // 2)]
    each = _each(0 if padding == "valid" else padding, len(kernel))
    return [n for n in reversed(each) for _ in range(2)]


def _conv(dims: int) -> Layer:
    def weight(x: Tensor, gradient: Tensor, options: dict[str, Any]) -> Factors:
        right = _patches(x, options["shape"][2:], gradient.shape[-dims:], options)
        return Factors(_pixels(gradient, dims, options.get("groups", 1)), right)

    names = ("input", "weight", "bias", "stride", "padding", "dilation", "groups")
    return Layer(names, {"weight": weight, "bias": _channel_sums(dims)}, _is_real)


def _conv_transpose(dims: int) -> Layer:
    def weight(x: Tensor, gradient: Tensor, options: dict[str, Any]) -> Factors:
        right = _patches(gradient, options["shape"][2:], x.shape[-dims:], options)
        return Factors(_pixels(x, dims, options.get("groups", 1)), right)

    names = ("input", "weight", "bias", "stride", "padding", "output_padding", "groups", "dilation")
    return Layer(names, {"weight": weight, "bias": _channel_sums(dims)}, _is_real)


def _channel_sums(dims: int) -> Form:
    return lambda _x, gradient, _options: _sums(_pixels(gradient, dims, 1))


def _sums(columns: Tensor) -> Tensor:
    """Rows of what is added at every position."""
    return columns.sum((1, 2), dtype=torch.promote_types(columns.dtype, torch.float32))


def _lookup(x: Tensor, gradient: Tensor, options: dict[str, Any]) -> Factors:
    padding = options.get("padding_idx")
    right = _columns(gradient)
    if padding is not None:
        row = padding % options["shape"][0]
        right = torch.where((x == row).reshape(len(x), -1, 1, 1), 0, right)
    return Factors(x.reshape(len(x), x.shape[1:].numel()).long(), right)


def _is_real(given: dict[str, Any]) -> bool:
    source = given.get("input")
    return isinstance(source, Tensor) and source.is_floating_point()


def _is_flat(given: dict[str, Any]) -> bool:
    """Whether the matrix is one, so that every row of what goes in is a position of its own."""
    return _is_real(given) and given["weight"].ndim == 2


def _is_linear(given: dict[str, Any]) -> bool:
    """Whether the bias has an element for each output; torch broadcasts others."""
    bias = given.get("bias")
    return _is_flat(given) and (bias is None or bias.shape == given["weight"].shape[:1])


def _is_pair(given: dict[str, Any]) -> bool:
    other = given.get("other")
    return isinstance(other, Tensor) and other.is_floating_point() and _is_real(given)


def _is_plain_lookup(given: dict[str, Any]) -> bool:
    return given.get("max_norm") is None and not given.get("scale_grad_by_freq")


_LINEAR = Layer(
    ("input", "weight", "bias"),
    {
        "weight": lambda x, gradient, _options: Factors(_columns(gradient), _columns(x)),
        "bias": lambda _x, gradient, _options: _sums(_columns(gradient)),
    },
    _is_linear,
    MATRIX,
)


_MATMUL = Layer(
    ("input", "weight"),
    {"weight": lambda x, gradient, _options: Factors(_columns(x), _columns(gradient))},
    _is_flat,
    MATRIX,
)


_EMBEDDING = Layer(
    ("input", "weight", "padding_idx", "max_norm", "norm_type", "scale_grad_by_freq", "sparse"),
    {"weight": _lookup},
    _is_plain_lookup,
)


_ADDMM = Layer(
    ("bias", "input", "weight"),
    {"weight": _MATMUL.forms["weight"], "bias": plus},
    _is_flat,
    MATRIX,
)


_STATISTICS = ("running_mean", "running_var")

_PRELU = Layer(("input", "weight"), {"weight": slopes}, _is_real, FLAT)

LAYERS: dict[Any, Layer] = {
    nn.functional.linear: _LINEAR,
    torch.matmul: _MATMUL,
    Tensor.matmul: _MATMUL,
    Tensor.__matmul__: _MATMUL,
    torch.mm: _MATMUL,
    Tensor.mm: _MATMUL,
    torch.addmm: _ADDMM,
    Tensor.addmm: _ADDMM,
    nn.functional.embedding: _EMBEDDING,
    nn.functional.conv1d: _conv(1),
    nn.functional.conv2d: _conv(2),
    nn.functional.conv3d: _conv(3),
    nn.functional.conv_transpose1d: _conv_transpose(1),
    nn.functional.conv_transpose2d: _conv_transpose(2),
    nn.functional.conv_transpose3d: _conv_transpose(3),
    nn.functional.prelu: _PRELU,
    Tensor.prelu: _PRELU,
    **{op: Layer(("input", "other"), dict(forms), _is_pair, FLAT) for op, forms in ELEMENTWISE_FORMS.items()},
    **{op: Layer(names, dict(forms), _is_real, FLAT, _STATISTICS) for op, (names, forms) in NORM_FORMS.items()},
}
