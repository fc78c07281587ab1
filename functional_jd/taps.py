"""Taps: the layers that a parameter goes through, recognised by the parameter that they receive.

A row of a linear layer's Jacobian is `sum_p left_p right_p'` over the positions p where the layer is applied: one of
the two went in, the other is the gradient of what came out. Inner products of such rows need no row to be formed.
"""

from collections.abc import Callable
from types import FunctionType
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.overrides import TorchFunctionMode, handle_torch_function, has_torch_function

from functional_jd.affine import NORMS, PAIRS, plus, slopes
from functional_jd.parts import FLAT, MATRIX, VIEWS, WHOLE, Factors, Part, part_of
from functional_jd.transforms import level
from functional_jd.tree import tree_leaves

_functorch: Any = torch._C._functorch  # pyright: ignore[reportPrivateUsage, reportAttributeAccessIssue]
# Modes further out would see each attribute that is asked for, and take longer than it does.
_unseen: Any = torch._C.DisableTorchFunction  # pyright: ignore[reportPrivateUsage, reportAttributeAccessIssue]


class Tap(NamedTuple):
    """One recognised use of a leaf.

    Attributes:
        leaf: which one.
        edge: where the gradient of what came out passes by; in `tapped.py` the number of the op.
        form: from the gradients there, to the `Factors` of the rows or to the rows `[m, *p]` themselves.
    """

    leaf: int
    edge: GradientEdge | int
    form: Callable[[Tensor], Factors | Tensor]


class OpaqueError(Exception):
    """Something happened to the losses that taps would not see."""


Form: TypeAlias = Callable[[Tensor, Tensor, dict[str, Any]], Factors | Tensor]
"""`form(what went in [m or 1, *x], gradient of what came out [m, *y], all arguments)`."""


class Layer(NamedTuple):
    """How to tap an op.

    Attributes:
        names: of its positional arguments; what goes in is `"input"`, or `"other"` where that is the leaf.
        forms: by the argument that may be a leaf, how to form the factors of its rows, or the rows themselves.
        fits: whether these arguments are as the forms expect them.
        reach: the distance to its leaf at which a weight may be, WHOLE, MATRIX or FLAT; all else may be at any. FLAT
            is for forms that give rows only, which pays where examples are hidden.
        keeps: tensors that the forms look at too.
    """

    names: tuple[str, ...]
    forms: dict[str, Form]
    fits: Callable[[dict[str, Any]], bool]
    reach: int = WHOLE
    keeps: tuple[str, ...] = ()


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
        self.known: dict[int, tuple[Part, Tensor, int]] = {}  # with its tensor: an id would be free again without it
        for index, (leaf, constant) in enumerate(zip(leaves, constants, strict=True)):
            self.know(leaf, Part(index, constant))
        self.taps, self.examples = taps, examples
        self.level = level()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func not in _WATCHED:
            return func(*args, **kwargs)
        if func in _BACKWARD:
            raise OpaqueError  # a derivative within the losses reaches the constants by ways that pass no tap
        if func in _BODIES and any(self.part(x) for x in (*args, *kwargs.values())):
            return self.enter(func, args, kwargs)
        layer = _TABLE.get(func)
        if layer is not None:
            given = dict(zip(layer.names, args, strict=False)) | kwargs
            uses = {name: part for name in layer.forms if (part := self.part(given.get(name)))}
            with _unseen():
                fits = bool(uses) and self.fits(layer, given, uses)
            if fits:
                taken = given | {name: part.constant for name, part in uses.items()}
                output = func(*[taken[name] for name in layer.names[: len(args)]], **{k: taken[k] for k in kwargs})
                with _unseen():
                    output = self.apart(output)
                    self.record(layer, given, uses, output)
                return output
        output = func(*args, **kwargs)
        if func in VIEWS and args and (part := self.part(args[0])):
            self.follow(part, func, args, kwargs, output)
        return output

    def apart(self, output: Tensor) -> Tensor:
        """The same numbers, as no view of others: autograd gives a view that is changed in place another path, on which
        the edge recorded does not lie.
        """
        return torch.ops.aten._unsafe_view(output, output.shape) if _bare(output)._is_view() else output

    def part(self, x: Any) -> Part | None:
        """What part of a leaf this is, unless it was changed in place since."""
        part, seen, version = self.known.get(id(x), (None, None, 0))
        return part if seen is not None and _version(seen) == version else None

    def know(self, x: Tensor, part: Part) -> None:
        self.known[id(x)] = (part, x, _version(x))

    def follow(self, part: Part, func: Any, args: Any, kwargs: Any, output: Any) -> None:
        """Know the parts of a leaf that an op gave."""
        rest = (args[1:], kwargs)
        if not torch.is_grad_enabled() or level() != self.level:
            return
        if any(isinstance(x, Tensor) for x in tree_leaves(rest)):
            return  # an index, which picks numbers one by one
        views = func(part.constant, *args[1:], **kwargs)
        pairs = [(output, views)] if isinstance(output, Tensor) else zip(output, views, strict=True)
        for seen, view in pairs:
            with _unseen():
                found = part_of(part, view)
            if found is not None and id(seen) not in self.known:
                self.know(seen, found)

    def enter(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run a function with the mode on, which torch shows as one op; in autocast's dtype, if autocast does so."""

        def op(*args: Any, **kwargs: Any) -> Any:
            relevant = (*args, *kwargs.values())
            if has_torch_function(relevant):  # modes further out have a word to say about that op
                return handle_torch_function(op, relevant, *args, **kwargs)
            with self:
                return _BODIES[func](*args, **kwargs)

        op.__name__ = func.__name__
        return op(*[self.narrow(x) for x in args], **{name: self.narrow(x) for name, x in kwargs.items()})

    def narrow(self, x: Any) -> Any:
        """A part in autocast's dtype, which is a part too; what is no part waits for others to cast it."""
        part = self.part(x)
        if part is None or not torch.is_autocast_enabled(x.device.type) or x.dtype == torch.float64:
            return x
        cast = x.to(torch.get_autocast_dtype(x.device.type))
        self.follow(part, Tensor.to, (x, cast.dtype), {}, cast)
        return cast

    def fits(self, layer: Layer, given: dict[str, Any], uses: dict[str, Part]) -> bool:
        # Within a transform of the losses' own, what comes out is not what the outer gradient passes by.
        return (
            level() == self.level
            # Where no example hides, autograd forms such rows itself, and faster: nothing waits for the sum.
            and (self.examples or layer.reach < FLAT)
            and source_of(uses) not in uses
            and given.keys() <= set(layer.names)
            and (not self.examples or _is_batched(given.get(source_of(uses))))
            and not any(_is_batched(given.get(name)) for name in layer.keeps)
            and all(part.distance <= (layer.reach if name == "weight" else FLAT) for name, part in uses.items())
            and layer.fits(given)
        )

    def record(self, layer: Layer, given: dict[str, Any], uses: dict[str, Part], output: Tensor) -> None:
        source, axis = given[source_of(uses)], 0
        if self.examples:
            source = _functorch.get_unwrapped(source).movedim(_functorch.maybe_get_bdim(source), 0).detach()
            output, axis = _functorch.get_unwrapped(output), _functorch.maybe_get_bdim(output)
        else:
            source = source.detach()[None]
        if not output.requires_grad:
            return  # torch.no_grad, within the losses
        options = {name: value for name, value in given.items() if not isinstance(value, Tensor)}
        options |= {name: given[name] for name in layer.keeps if name in given}
        version, edge = source._version, get_gradient_edge(output)
        for name, part in uses.items():

            def form(gradient: Tensor, rule: Form = layer.forms[name], part: Part = part) -> Factors | Tensor:
                if source._version != version:
                    raise OpaqueError  # changed in place since then: autograd has a word to say about that
                shape = {"shape": part.constant.shape}
                return part.back(rule(source, gradient.movedim(axis, 0), options | shape))

            self.taps.append(Tap(part.leaf, edge, form))


def _version(x: Tensor) -> int:
    """How often a tensor was changed in place."""
    with _unseen():
        return _bare(x)._version


def _bare(x: Tensor) -> Tensor:
    """The tensor with the dimension that vmap hides: it counts changes in place, and knows what it is a view of."""
    return _functorch.get_unwrapped(x) if _functorch.is_batchedtensor(x) else x


def _is_batched(value: Any) -> bool:
    return isinstance(value, Tensor) and _functorch.is_batchedtensor(value)


def source_of(uses: dict[str, Part]) -> str:
    """The name of the argument that goes in, beside those that are leaves."""
    return "other" if "input" in uses else "input"


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


def _is_pair(given: dict[str, Any]) -> bool:
    pair = given.get("input"), given.get("other")
    return all(isinstance(x, Tensor) and x.is_floating_point() for x in pair)


def _is_plain_lookup(given: dict[str, Any]) -> bool:
    return given.get("max_norm") is None and not given.get("scale_grad_by_freq")


_LINEAR = Layer(
    ("input", "weight", "bias"),
    {
        "weight": lambda x, gradient, _options: Factors(_columns(gradient), _columns(x)),
        "bias": lambda _x, gradient, _options: _sums(_columns(gradient)),
    },
    _is_flat,
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


_TABLE: dict[Any, Layer] = {
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
    **{op: Layer(("input", "other"), dict(forms), _is_pair, FLAT) for op, forms in PAIRS.items()},
    **{op: Layer(names, dict(forms), _is_real, FLAT, _STATISTICS) for op, (names, forms) in NORMS.items()},
}
_BODIES = {
    f: FunctionType(f.__code__, vars(nn.functional) | {"has_torch_function": lambda _: False}, None, f.__defaults__)
    for f in (nn.functional.multi_head_attention_forward,)
}
"""Functions that torch shows as one op, as they go on where it does not."""
_BACKWARD = (torch.autograd.grad, torch.autograd.backward, Tensor.backward)
KNOWN = {*_TABLE, *_BODIES, *VIEWS}
"""Ops that leave what they receive as it is."""
_WATCHED = {*KNOWN, *_BACKWARD}
