"""The known layers, in a table: add a layer here.

A layer tells how the rows of its parameters are formed from its input and the gradients of its output: as `Factors`,
whose inner products need no rows, or as rows. Only layers whose rows are worth it are known: all other parameters,
those of norms among them, get their rows from autograd, as fast.
"""

from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn

F = nn.functional

Given: TypeAlias = dict[str, Any]
"""The arguments of an op by name."""


class Factors(NamedTuple):
    """Rows of a leaf, not multiplied out: `row_s = sum_p left_sp right_sp'`, group by group.

    Attributes:
        left: `[m, positions, groups, o]`; or int64 `[m, positions]`, the indices of unit vectors of length o.
        right: `[m, positions, groups, i]`. 1 instead of m if all rows share it.
    """

    left: Tensor
    right: Tensor


Form: TypeAlias = Callable[[Tensor, Tensor, Given], Factors | Tensor]
"""`form(inputs [m or 1, n, *x], gradients of the outputs [m, n, *y], other arguments)`, of n inputs."""


class Layer(NamedTuple):
    """How an op is recorded."""

    names: tuple[str, ...]  # of its positional arguments; its input is `"input"`
    forms: dict[str, Form]  # for each argument that may be a parameter, how its factors or rows are formed
    fits: Callable[[Given], bool]  # whether the forms hold for these arguments
    dims: int = 1  # the number of dimensions of one input, without those along which there are several
    matrix: bool = False  # whether the weight may be the transpose of a parameter


def _added(_x: Tensor, gradient: Tensor, _given: Given) -> Tensor:
    """Rows of a term that is added at every position of `[m, n, channels, *s]`."""
    positions = [d for d in range(gradient.ndim) if d not in (0, 2)]
    return gradient.sum(positions, dtype=torch.promote_types(gradient.dtype, torch.float32))


def _patches(x: Tensor, kernel: tuple[int, ...], positions: torch.Size, given: Given) -> Tensor:
    """The kernel's patch at each position: `[m, n, channels, *s]` as `[m, positions, groups, channels * kernel]`."""
    dims = len(kernel)
    stride, dilation = (_each(given.get(name, 1), dims) for name in ("stride", "dilation"))
    padding = _padding(given.get("padding", 0), kernel, dilation)
    x = F.pad(x, padding) if any(padding) else x
    for d in range(dims):
        windows = x.unfold(3 + d, (kernel[d] - 1) * dilation[d] + 1, stride[d])
        x = windows[..., :: dilation[d]].narrow(3 + d, 0, positions[d])
    x = x.movedim((2, *range(x.ndim - dims, x.ndim)), tuple(range(1, dims + 2)))
    return _channels_first(x.flatten(1, dims + 1).flatten(2), given.get("groups", 1))


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
    return [n for n in reversed(_each(0 if padding == "valid" else padding, len(kernel))) for _ in range(2)]


def _is_real(given: Given) -> bool:
    source = given.get("input")
    return isinstance(source, Tensor) and source.is_floating_point()


def _conv(dims: int, *, transposed: bool = False) -> Layer:
    """A convolution: the transposed one exchanges the input and the gradient of the output."""

    def weight(x: Tensor, gradient: Tensor, given: Given) -> Factors:
        small, large = (x, gradient) if transposed else (gradient, x)
        left = _channels_first(small.transpose(1, 2).flatten(2), given.get("groups", 1))
        return Factors(left, _patches(large, given["shape"][2:], small.shape[3:], given))

    def fits(given: Given) -> bool:
        return _is_real(given) and given["input"].ndim in (dims + 1, dims + 2)

    last = "output_padding groups dilation" if transposed else "dilation groups"
    names = f"input weight bias stride padding {last}".split()
    return Layer(tuple(names), {"weight": weight, "bias": _added}, fits, dims + 1)


def _lookup(x: Tensor, gradient: Tensor, given: Given) -> Factors:
    padding, right = given.get("padding_idx"), gradient.unsqueeze(2)
    if padding is not None:
        right = torch.where((x == padding % given["shape"][0])[:, :, None, None], 0, right)
    return Factors(x.long(), right)


def _is_plain_lookup(given: Given) -> bool:
    plain = given.get("max_norm") is None and not given.get("scale_grad_by_freq")
    return plain and isinstance(given.get("input"), Tensor)


def _product(names: str, *, transposed: bool = False) -> Layer:
    """A matrix `[o, i]` times each input, or, transposed, each input times a matrix `[i, o]`."""

    def weight(x: Tensor, gradient: Tensor, _given: Given) -> Factors:
        left, right = (x, gradient) if transposed else (gradient, x)
        return Factors(left.unsqueeze(2), right.unsqueeze(2))

    def fits(given: Given) -> bool:
        """Whether the bias has an element for each output: torch broadcasts others."""
        if not _is_real(given) or given["weight"].ndim != 2 or given["input"].ndim < 1:
            return False
        bias, outputs = given.get("bias"), given["weight"].shape[1 if transposed else 0]
        return bias is None or bias.shape == (outputs,)

    return Layer(tuple(names.split()), {"weight": weight, "bias": _added}, fits, matrix=True)


def _of_matrices(layer: Layer) -> Layer:
    return layer._replace(fits=lambda given: layer.fits(given) and given["input"].ndim == 2)


_MATMUL = _product("input weight", transposed=True)
_ADDMM = _product("bias input weight", transposed=True)
_EMBEDDING = "input weight padding_idx max_norm norm_type scale_grad_by_freq sparse"

LAYERS: dict[Any, Layer] = {
    F.linear: _product("input weight bias"),
    **dict.fromkeys((torch.matmul, Tensor.matmul, Tensor.__matmul__), _MATMUL),
    **dict.fromkeys((torch.mm, Tensor.mm), _of_matrices(_MATMUL)),
    **dict.fromkeys((torch.addmm, Tensor.addmm), _of_matrices(_ADDMM)),
    F.embedding: Layer(tuple(_EMBEDDING.split()), {"weight": _lookup}, _is_plain_lookup, dims=0),
    **{getattr(F, f"conv{dims}d"): _conv(dims) for dims in (1, 2, 3)},
    **{getattr(F, f"conv_transpose{dims}d"): _conv(dims, transposed=True) for dims in (1, 2, 3)},
}
