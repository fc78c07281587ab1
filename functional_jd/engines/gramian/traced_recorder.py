"""The layer recorder under transforms, torch.compile, and where the result may be differentiated.

Neither memory addresses nor versions of tensors are known there, and torch.compile cannot trace a fallback: views of
parameters are recognised by op and shape.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import multi_head_attention_forward

from functional_jd.engines.gramian.layers import Form, Layer
from functional_jd.engines.gramian.parameter_views import FLAT, MATRIX, WHOLE, ParameterView, transposed
from functional_jd.engines.gramian.recorder import KNOWN, Known, LayerRecorder, LayerUse
from functional_jd.engines.row_vjps import Rows
from functional_jd.engines.vjp import Cotangent, Vjp, to_dense, vjp
from functional_jd.precision.autocast import autocast_disabled
from functional_jd.torch_compat.in_place import IN_PLACE_NAMES
from functional_jd.torch_compat.torch_internals import function_name, traceable, traced_grad, transform_level, untraced
from functional_jd.torch_compat.vmap_levels import varies_in_vmap


class TracedUse(NamedTuple):
    """One use of a leaf by a known layer.

    Attributes:
        op: the index of the layer among those recorded.
        part: the view of the leaf that the layer received.
        form: how its rows are formed.
        options: the arguments of the layer that are not tensors.
    """

    op: int
    part: ParameterView
    form: Form
    options: dict[str, Any]


class RecordedVjp(NamedTuple):
    """A function at a point, with its vector-Jacobian product with respect to the outputs of the recorded layers and,
    behind them, the leaves.

    Attributes:
        point: its `extra` is `(extra, inputs of the recorded layers)`.
        seen: the uses.
    """

    point: Vjp
    seen: list[TracedUse]


class TracedRecorder(LayerRecorder):
    """Records the tensors themselves, in lists from outside: torch.compile loses the attributes of a mode."""

    def __init__(
        self,
        leaves: list[Tensor],
        constants: list[Tensor],
        seen: list[TracedUse],
        ends: list[tuple[Tensor, Tensor]],
    ):
        super().__init__(leaves, constants, [], examples=False)
        self.seen, self.ends = seen, ends
        self.copies: list[Tensor] = []

    @untraced
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        func = traceable(func)
        if self.copies and (_is_in_place(func, kwargs) or (func not in KNOWN and self.receives_view(args, kwargs))):
            for x in self.copies:  # any of them, or a view of it, may have been changed
                self.known.pop(id(x), None)
        before = len(self.ends)
        output = super().__torch_function__(func, types, args, kwargs)
        # The losses get a copy, which they may change in place; torch.compile removes it.
        return output.clone() if len(self.ends) > before and output is self.ends[-1][1] else output

    def receives_view(self, args: Any, kwargs: Any) -> bool:
        """Whether an unknown op, which may change its arguments, receives a view of a leaf."""
        copies = {id(x) for x in self.copies}
        given = [*args, *(kwargs or {}).values()]
        listed = [x for value in given if isinstance(value, list | tuple) for x in value]
        return any(_may_be_view(x) and id(x) in copies for x in (*given, *listed))

    def inline(self, func: Any, form: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        if func is multi_head_attention_forward and torch.compiler.is_compiling():
            kwargs = _with_one_mask(args, kwargs)
        return super().inline(func, form, args, kwargs)

    def view_of_leaf(self, x: Any) -> ParameterView | None:
        found = self.known.get(id(x)) if _may_be_view(x) else None
        return None if found is None else found.part

    def remember(self, x: Tensor, part: ParameterView) -> None:
        self.known[id(x)] = Known(part, x, x, 0)

    def follow(self, part: ParameterView, func: Any, args: Any, kwargs: Any, output: Any) -> None:
        way = _distance_and_back(func, args, part.constant, output)
        if way is None or transform_level() != self.level or not output.requires_grad or output is args[0]:
            return
        view = func(part.constant, *args[1:], **kwargs)
        distance, step = way
        self.copies.append(output)
        self.remember(
            output, ParameterView(part.leaf, view, max(part.distance, distance), lambda made: part.back(step(made)))
        )

    def fits(self, layer: Layer, given: dict[str, Any], source: Any, uses: dict[str, ParameterView]) -> bool:
        return not layer.keeps and super().fits(layer, given, source, uses)

    def record(
        self, layer: Layer, given: dict[str, Any], source: Any, uses: dict[str, ParameterView], output: Tensor
    ) -> Tensor:
        if not output.requires_grad:
            return output  # torch.no_grad inside the losses
        options = {name: value for name, value in given.items() if not isinstance(value, Tensor)}
        for name, part in uses.items():
            shape = {"shape": tuple(part.constant.shape)}
            self.seen.append(TracedUse(len(self.ends), part, layer.forms[name], options | shape))
        self.ends.append((source.clone(), output))
        return output


def _with_one_mask(args: Any, kwargs: Any) -> Any:
    """The options of an attention with its mask of keys as part of the other one: torch's check of the former has a
    message that torch.compile cannot trace.
    """
    padding, mask = kwargs.get("key_padding_mask"), kwargs.get("attn_mask")
    if padding is None or len(args) < 5:
        return kwargs
    query, heads = args[0], args[4]
    rows = padding.reshape(-1, 1, 1, padding.shape[-1]).expand(-1, heads, len(query), -1)
    joined = _additive(rows, query.dtype).flatten(0, 1)
    joined = joined if mask is None else joined + _additive(mask, query.dtype)
    return {**kwargs, "key_padding_mask": None, "attn_mask": joined, "is_causal": False}


def _additive(mask: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.zeros_like(mask, dtype=dtype).masked_fill(mask, -torch.inf) if mask.dtype == torch.bool else mask


def _may_be_view(x: Any) -> bool:
    """Asked before the id, on which torch.compile guards: it would compile again for every batch."""
    return isinstance(x, Tensor) and x.requires_grad


def _is_in_place(func: Any, kwargs: Any) -> bool:
    return function_name(func) in IN_PLACE_NAMES or "out" in (kwargs or {})


def _distance_and_back(func: Any, args: Any, base: Tensor, output: Any) -> tuple[int, Callable[[Any], Any]] | None:
    """The distance that an op adds to a view of a leaf, and the way back of its rows."""
    if not isinstance(output, Tensor) or output.device != base.device:
        return None
    if func in _TRANSPOSES and base.ndim == 2 and (len(args) == 1 or (len(args) == 3 and args[1] % 2 != args[2] % 2)):
        return MATRIX, transposed
    if func in _COPIES and output.shape == base.shape and output.is_floating_point():
        return WHOLE, lambda made: made
    if func in _SHAPES:
        return FLAT, lambda rows: rows.reshape(len(rows), *base.shape)
    return None


def recorded_vjp(
    f: Callable[[list[Tensor], LayerRecorder], tuple[list[Tensor], Any]], leaves: list[Tensor]
) -> RecordedVjp:
    """Evaluate `f(points, recorder) -> (outputs, extra)` once, with the vector-Jacobian product with respect to the
    outputs of the recorded layers and, behind them, the points.

    The pullback needs the tensors inside the transform: they leave it by a list, as in `torch.func`.
    """
    seen: list[TracedUse] = []
    ends: list[tuple[Tensor, Tensor]] = []
    inside: list[list[Tensor]] = []

    def recorded(inputs: list[Tensor]) -> tuple[list[Tensor], Any]:
        # Views: while torch.compile traces, the inputs themselves do not say that they require grad.
        points, constants = [x.view_as(x) for x in inputs[: len(leaves)]], inputs[len(leaves) :]
        outputs, extra = f(points, TracedRecorder(points, constants, seen, ends))
        inside[:] = [outputs, [*[output for _, output in ends], *points]]
        return outputs, (extra, [source for source, _ in ends])

    point = vjp(recorded, [*leaves, *leaves], differentiable=True)
    outputs, inputs = inside

    def pullback(cotangent: Cotangent, among: slice = slice(None), last: bool = False) -> Rows:  # noqa: ARG001
        pairs = [(y, c) for y, c in zip(outputs, cotangent, strict=True)]
        # A zero cotangent would turn an infinite derivative into NaN; torch.compile needs the same graph for all.
        if torch.compiler.is_compiling():
            sent = [(y, torch.zeros_like(y) if c is None else c) for y, c in pairs]
        else:
            sent = [(y, c) for y, c in pairs if c is not None]
        with autocast_disabled():
            return _gradients([y for y, _ in sent], inputs, [c for _, c in sent])[among]

    return RecordedVjp(Vjp(point.outputs, point.extra, pullback), seen)


def _gradients(outputs: list[Tensor], inputs: list[Tensor], cotangent: list[Tensor]) -> list[Tensor | None]:
    """`None` where a gradient is certainly zero."""
    if torch.compiler.is_compiling():
        # The only function for gradients that is traced here. It returns zeros in the place of None; they are told
        # apart by this: what does not vary with the cotangent is zero.
        found = traced_grad(outputs, inputs, cotangent, retain_graph=True, create_graph=True)
        depth = transform_level()[0]
        return [g if varies_in_vmap(g, depth) else None for g in found]
    pairs = [(y, c) for y, c in zip(outputs, cotangent, strict=True) if y.requires_grad]
    if not pairs:
        return [None] * len(inputs)
    given: Any = [[y for y, _ in pairs], inputs, [c for _, c in pairs]]
    found = torch.autograd.grad(*given, retain_graph=True, create_graph=True, allow_unused=True)
    return to_dense(found)


def layer_uses(seen: list[TracedUse], sources: list[Tensor]) -> list[LayerUse]:
    """Uses whose edges are indices of layers; sources are the inputs of the layers, `[m or 1, *x]`."""
    return [LayerUse(use.part.leaf, use.op, _form(use, sources[use.op])) for use in seen]


def _form(use: TracedUse, source: Tensor) -> Callable[[Tensor], Any]:
    return lambda gradient: use.part.back(use.form(source, gradient, use.options))


def _of(words: str) -> set[Any]:
    return {getattr(home, word, None) for home in (torch, Tensor) for word in words.split()} - {None}


_TRANSPOSES = _of("t transpose swapaxes swapdims") | {Tensor.T.__get__, Tensor.mT.__get__}  # pyright: ignore

_COPIES = _of("to half bfloat16 float double contiguous")

_SHAPES = _of("view unsqueeze squeeze")  # always views, unlike a reshape
