"""Taps: the layers that a parameter goes through, recognised by the parameter that they receive.

A row of a linear layer's Jacobian is `sum_p left_p right_p'` over the positions p where the layer is applied: one of
the two went in, the other is the gradient of what came out. Inner products of such rows need no row to be formed.
"""

from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.overrides import TorchFunctionMode

_functorch: Any = torch._C._functorch  # pyright: ignore[reportPrivateUsage, reportAttributeAccessIssue]


class Factors(NamedTuple):
    """Rows of a leaf, not multiplied out: `row_s = sum_p left_sp right_sp'`, group by group.

    Attributes:
        left: `[m, positions, groups, o]`; or int64 `[m, positions]`, which stands for unit vectors of length o.
        right: `[m, positions, groups, i]`. What all rows share has 1 in place of m.
    """

    left: Tensor
    right: Tensor


class Tap(NamedTuple):
    """One recognised use of a leaf.

    Attributes:
        leaf: which one.
        edge: where the gradient of what came out passes by.
        form: from the gradients there, to the `Factors` of the rows or to the rows `[m, *p]` themselves.
    """

    leaf: int
    edge: GradientEdge
    form: Callable[[Tensor], Factors | Tensor]


class OpaqueError(Exception):
    """Something happened to the losses that taps would not see."""


Form: TypeAlias = Callable[[Tensor, Tensor, dict[str, Any]], Factors | Tensor]
"""`form(what went in [m or 1, *x], gradient of what came out [m, *y], all arguments)`."""


class Layer(NamedTuple):
    """How to tap an op.

    Attributes:
        names: of its positional arguments, what goes in first.
        forms: by the argument that may be a leaf, how to form the factors of its rows, or the rows themselves.
        fits: whether these arguments are as the forms expect them.
        flips: whether the leaf may come transposed.
    """

    names: tuple[str, ...]
    forms: dict[str, Form]
    fits: Callable[[dict[str, Any]], bool]
    flips: bool = False


class Tapping(TorchFunctionMode):
    """Sees every op that receives a leaf. Where the table knows the op, a constant takes the leaf's place and what
    comes out is tapped: so the gradient that still arrives at the leaf is that of all uses nobody recognised,
    those included that no mode sees, such as a custom autograd function.

    Args:
        leaves: the tensors that the function receives.
        constants: the same values, for autograd leaves of their own.
        taps: a list to fill.
        examples: whether `torch.vmap` hides a dimension of examples.
    """

    def __init__(self, leaves: list[Tensor], constants: list[Tensor], taps: list[Tap], *, examples: bool):
        super().__init__()
        self.known = {id(leaf): (index, False) for index, leaf in enumerate(leaves)}
        self.constants, self.taps, self.examples = constants, taps, examples
        self.level = _level()
        self.alive = list(leaves)  # an id would be free again when its tensor is gone

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _BACKWARD:
            raise OpaqueError  # a derivative within the losses reaches the constants by ways that pass no tap
        layer = _TABLE.get(func)
        if layer is not None:
            given = dict(zip(layer.names, args, strict=False)) | kwargs
            uses = {name: self.known[id(given[name])] for name in layer.forms if id(given.get(name)) in self.known}
            if uses and self.fits(layer, given, uses):
                taken = given | {name: self.constant(*use) for name, use in uses.items()}
                output = func(*[taken[name] for name in layer.names[: len(args)]], **{k: taken[k] for k in kwargs})
                self.record(layer, given, uses, output)
                return output
        output = func(*args, **kwargs)
        if args and id(args[0]) in self.known and _is_transpose(func, args):
            index, flipped = self.known[id(args[0])]
            self.known[id(output)] = (index, not flipped)
            self.alive.append(output)
        return output

    def constant(self, index: int, flipped: bool) -> Tensor:
        return self.constants[index].mT if flipped else self.constants[index]

    def fits(self, layer: Layer, given: dict[str, Any], uses: dict[str, tuple[int, bool]]) -> bool:
        # Within a transform of the losses' own, what comes out is not what the outer gradient passes by.
        return (
            _level() == self.level
            and given.keys() <= set(layer.names)
            and (not self.examples or _functorch.is_batchedtensor(given[layer.names[0]]))
            and (layer.flips or not any(flipped for _, flipped in uses.values()))
            and layer.fits(given)
        )

    def record(self, layer: Layer, given: dict[str, Any], uses: dict[str, tuple[int, bool]], output: Tensor) -> None:
        source, axis = given[layer.names[0]], 0
        if self.examples:
            source = _functorch.get_unwrapped(source).movedim(_functorch.maybe_get_bdim(source), 0).detach()
            output, axis = _functorch.get_unwrapped(output), _functorch.maybe_get_bdim(output)
        else:
            source = source.detach()[None]
        if not output.requires_grad:
            return  # torch.no_grad, within the losses
        options = {name: value for name, value in given.items() if not isinstance(value, Tensor)}
        shape = tuple(given[next(iter(layer.forms))].shape)
        version, edge = source._version, get_gradient_edge(output)
        for name, (index, flipped) in uses.items():

            def form(gradient: Tensor, rule: Form = layer.forms[name], flipped: bool = flipped) -> Factors | Tensor:
                if source._version != version:
                    raise OpaqueError  # changed in place since then: autograd has a word to say about that
                made = rule(source, gradient.movedim(axis, 0), options | {"shape": shape})
                return Factors(made.right, made.left) if flipped and isinstance(made, Factors) else made

            self.taps.append(Tap(index, edge, form))


def _level() -> tuple[Any, int]:
    return _functorch.maybe_current_level(), torch.autograd.forward_ad._current_level  # pyright: ignore[reportPrivateUsage]


def _columns(x: Tensor) -> Tensor:
    """`[m, *, i]` as `[m, positions, 1, i]`."""
    return x.reshape(len(x), x.shape[1:-1].numel(), 1, x.shape[-1])


def _pixels(x: Tensor, dims: int, groups: int) -> Tensor:
    """`[m, *, channels, *s]` as `[m, positions, groups, channels per group]`."""
    last = x.movedim(-1 - dims, -1)
    return last.reshape(len(x), last.shape[1:-1].numel(), groups, last.shape[-1] // groups)


def _patches(x: Tensor, kernel: tuple[int, ...], positions: torch.Size, options: dict[str, Any]) -> Tensor:
    """What the kernel sees at each position: `[m, *, channels, *s]` as `[m, positions, groups, channels * kernel]`."""
    dims = len(kernel)
    stride, dilation = (_each(options.get(name, 1), dims) for name in ("stride", "dilation"))
    x = nn.functional.pad(x, _padding(options.get("padding", 0), kernel, dilation))
    first = x.ndim - dims
    for d in range(dims):
        windows = x.unfold(first + d, (kernel[d] - 1) * dilation[d] + 1, stride[d])
        x = windows[..., :: dilation[d]].narrow(first + d, 0, positions[d])
    x = x.movedim(first - 1, first - 1 + dims)
    rows, groups = x.shape[: first - 1 + dims], options.get("groups", 1)
    return x.reshape(len(x), rows[1:].numel(), groups, x.shape[first - 1 + dims :].numel() // groups)


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


def _is_plain_lookup(given: dict[str, Any]) -> bool:
    return given.get("max_norm") is None and not given.get("scale_grad_by_freq")


def _is_transpose(func: Any, args: Any) -> bool:
    if func in (torch.transpose, Tensor.transpose):
        return args[0].ndim == 2 and len(args) == 3 and args[1] % 2 != args[2] % 2
    return func in _TRANSPOSES and args[0].ndim == 2


_LINEAR = Layer(
    ("input", "weight", "bias"),
    {
        "weight": lambda x, gradient, _options: Factors(_columns(gradient), _columns(x)),
        "bias": lambda _x, gradient, _options: _sums(_columns(gradient)),
    },
    _is_flat,
    flips=True,
)
_MATMUL = Layer(
    ("input", "weight"),
    {"weight": lambda x, gradient, _options: Factors(_columns(x), _columns(gradient))},
    _is_flat,
    flips=True,
)
_EMBEDDING = Layer(
    ("input", "weight", "padding_idx", "max_norm", "norm_type", "scale_grad_by_freq", "sparse"),
    {"weight": _lookup},
    _is_plain_lookup,
)
_TABLE: dict[Any, Layer] = {
    nn.functional.linear: _LINEAR,
    torch.matmul: _MATMUL,
    Tensor.matmul: _MATMUL,
    Tensor.__matmul__: _MATMUL,
    nn.functional.embedding: _EMBEDDING,
    nn.functional.conv1d: _conv(1),
    nn.functional.conv2d: _conv(2),
    nn.functional.conv3d: _conv(3),
    nn.functional.conv_transpose1d: _conv_transpose(1),
    nn.functional.conv_transpose2d: _conv_transpose(2),
    nn.functional.conv_transpose3d: _conv_transpose(3),
}
_TRANSPOSES = (torch.t, Tensor.t, Tensor.T.__get__, Tensor.mT.__get__)  # pyright: ignore
_BACKWARD = (torch.autograd.grad, torch.autograd.backward, Tensor.backward)
