"""Records the layers that use a parameter, recognised by the parameter that they receive.

A row of a linear layer's Jacobian is `sum_p left_p right_p'` over the positions p at which the layer is applied: one
side is the layer's input, the other the gradient of its output. Inner products of such rows need no rows.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.overrides import handle_torch_function, has_torch_function

from functional_jd.core.tree import tree_leaves
from functional_jd.engines.choose import records_elementwise_layers
from functional_jd.engines.gramian.batched_ops import BATCHED_OPS, on_batch
from functional_jd.engines.gramian.factors import Factors
from functional_jd.engines.gramian.layers import LAYERS, Form, Layer
from functional_jd.engines.gramian.parameter_views import FLAT, MATRIX, VIEWS, ParameterView, same, view_of
from functional_jd.torch_compat.recurrent import RECURRENT, batched_form
from functional_jd.torch_compat.torch_internals import (
    GRAD_FN,
    GRAPH_ATTRIBUTES,
    batch_dim,
    change_count,
    examples_first,
    graph_attribute,
    in_custom_function,
    is_batched,
    is_batched_tensor,
    is_view,
    set_grad_enabled,
    torch_function_disabled,
    transform_level,
    transparent,
    untraced,
    unwrapped,
    without_view,
)
from functional_jd.torch_compat.watching import SEEN, SEEN_WITH, WatchingMode


class LayerUse(NamedTuple):
    """One use of a leaf by a known layer.

    Attributes:
        leaf: the index of the leaf.
        edge: the graph edge of the layer's output, whose gradient is needed; the index of the layer when traced.
        form: `form(gradients of the output)` returns the `Factors` of the rows, or the rows `[m, *p]` themselves.
    """

    leaf: int
    edge: GradientEdge | int
    form: Callable[[Tensor], Factors | Tensor]


class UnrecordedDerivativeError(Exception):
    """The losses use a parameter in a way that the recorder does not see."""


class Known(NamedTuple):
    """A leaf or a view of it, as the losses receive it.

    Attributes:
        part: what it is.
        seen: the tensor: without a reference, its id could be given to another.
        base: the tensor below vmap, which counts changes in place.
        changes: how many there were.
    """

    part: ParameterView
    seen: Tensor
    base: Tensor
    changes: int


class LayerRecorder(WatchingMode):
    """Records every known layer that receives a leaf. The layer gets a constant in the place of the leaf, so that the
    gradient that still arrives at the leaf is that of all other uses, including those that no mode sees, such as
    custom autograd functions.

    Args:
        leaves: the tensors that the function receives.
        constants: tensors with the same values that are leaves of the graph.
        uses: a list that is filled with the uses.
        examples: whether `torch.vmap` hides a dimension of examples.
    """

    def __init__(self, leaves: list[Tensor], constants: list[Tensor], uses: list[LayerUse], *, examples: bool):
        super().__init__()
        self.known: dict[int, Known] = {}
        for index, (leaf, constant) in enumerate(zip(leaves, constants, strict=True)):
            self.remember(leaf, ParameterView(index, constant))
        self.uses, self.examples = uses, examples
        self.reach = FLAT if records_elementwise_layers(examples) else MATRIX
        # Whether a custom function has switched autograd on, which is off when its forward begins.
        self.graph_inside = not set_grad_enabled
        self.level = transform_level()

    @untraced
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        watch, call = self.watch, func
        if watch is not None and (func in SEEN or not kwargs.keys().isdisjoint(SEEN_WITH)):
            call = partial(watch.call, func)
        if func not in _WATCHED:
            return call(*args, **kwargs)
        if func in GRAPH_ATTRIBUTES:
            examples = self.examples and transform_level() == self.level
            found = graph_attribute(func, *args) if examples else func(*args)
            if func == GRAD_FN and found is not None:
                self.refuse_layer_node(found)
            return found
        if func is set_grad_enabled:
            self.graph_inside = self.graph_inside or (args[0] and in_custom_function())
        if func is Tensor.register_hook and self.view_of_leaf(args[0]) is not None:
            raise UnrecordedDerivativeError("the losses register a hook on a parameter, past which layers are recorded")
        if func == _SET_REQUIRES_GRAD and self.examples and self.view_of_leaf(args[0]) is not None:
            # Below vmap it stays as it is, and its gradient arrives.
            raise UnrecordedDerivativeError("the losses set requires_grad of a parameter, which vmap hides")
        if func in _BACKWARD:
            # A derivative inside the losses would miss the uses in which a constant takes the place of the leaf.
            raise UnrecordedDerivativeError(f"the losses call {func.__name__}, which the layer recorder cannot follow")
        form = transparent.get(func)
        if func in RECURRENT and not kwargs:
            form = batched_form(func, args)
        if form is not None and any(self.view_of_leaf(x) for x in _with_lists((*args, *kwargs.values()))):
            return self.inline(func, form, args, kwargs)
        layer, given, source = LAYERS.get(func), kwargs, None
        uses: dict[str, ParameterView] = {}
        if layer is not None:
            given = dict(zip(layer.names, args, strict=False)) | kwargs
            for name in layer.forms:
                part = self.view_of_leaf(given.get(name))
                if part is not None:
                    uses[name] = part
            source = given.get("other" if "input" in uses else "input")
            if uses:
                with torch_function_disabled():
                    uses = uses if self.fits(layer, given, source, uses) else {}
                    if uses and self.examples:
                        source = examples_first(source)
                args, kwargs = list(args), dict(kwargs)
                for name, part in uses.items():  # a constant in the place of each leaf
                    if name in kwargs:
                        kwargs[name] = part.constant
                    else:
                        args[layer.names.index(name)] = part.constant
        if self.examples and func in BATCHED_OPS:  # for all examples at once
            output = on_batch(func, args, kwargs, self.level[0] if transform_level() == self.level else None)
        else:
            output = call(*args, **kwargs)
        if layer is not None and uses:
            with torch_function_disabled():
                output = self.record(layer, given, source, uses, output)
        elif func in VIEWS and args and (part := self.view_of_leaf(args[0])):
            self.follow(part, func, args, kwargs, output)
        return output

    def refuse_layer_node(self, node: Any) -> None:
        """The gradient of a layer's output is taken before its node, whose hooks would not act."""
        if any(isinstance(use.edge, GradientEdge) and use.edge.node is node for use in self.uses):
            raise UnrecordedDerivativeError("the losses ask for the grad_fn of a recorded layer, which may get a hook")

    def view_of_leaf(self, x: Any) -> ParameterView | None:
        """The view of a leaf that this tensor is, unless it was changed in place since, or frozen for a time."""
        known = self.known.get(id(x))
        if known is None:
            return None
        with torch_function_disabled():
            same_values = change_count(known.base) == known.changes
            return known.part if same_values and known.base.requires_grad else None

    def remember(self, x: Tensor, part: ParameterView) -> None:
        base = unwrapped(x) if is_batched_tensor(x) else x
        with torch_function_disabled():
            self.known[id(x)] = Known(part, x, base, change_count(base))

    def follow(self, part: ParameterView, func: Any, args: Any, kwargs: Any, output: Any) -> None:
        """Remember the views of a leaf that an op returned."""
        rest = (args[1:], kwargs)
        if not torch.is_grad_enabled() or transform_level() != self.level:
            return
        if any(isinstance(x, Tensor) for x in tree_leaves(rest)):
            return  # an index tensor: elements are picked one by one
        views = func(part.constant, *args[1:], **kwargs)
        pairs = [(output, views)] if isinstance(output, Tensor) else zip(output, views, strict=True)
        for seen, view in pairs:
            with torch_function_disabled():
                found = view_of(part, view)
            if found is not None and id(seen) not in self.known:
                self.remember(seen, found)

    def inline(self, func: Any, form: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Run a function that torch shows as one op so that this mode sees the ops inside, in autocast's dtype."""

        def op(*args: Any, **kwargs: Any) -> Any:
            relevant = (*args, *kwargs.values())
            if has_torch_function(relevant):  # outer modes see the function as one op first
                return handle_torch_function(op, relevant, *args, **kwargs)
            with self:
                return form(*args, **kwargs)

        op.__name__ = func.__name__
        return op(*[self.cast_view(x) for x in args], **{name: self.cast_view(x) for name, x in kwargs.items()})

    def cast_view(self, x: Any) -> Any:
        """A view of a leaf in autocast's dtype, which is a view too; other tensors are cast by the op tables."""
        if isinstance(x, list):
            return [self.cast_view(part) for part in x]
        part = self.view_of_leaf(x)
        if part is None or not torch.is_autocast_enabled(x.device.type) or x.dtype == torch.float64:
            return x
        cast = x.to(torch.get_autocast_dtype(x.device.type))
        self.follow(part, Tensor.to, (x, cast.dtype), {}, cast)
        return cast

    def fits(self, layer: Layer, given: dict[str, Any], source: Any, uses: dict[str, ParameterView]) -> bool:
        return (
            layer.reach <= self.reach
            and not uses.keys() >= {"input", "other"}
            and given.keys() <= set(layer.names)
            and not (layer.keeps and any(is_batched(given.get(name)) for name in layer.keeps))
            and ("weight" not in uses or uses["weight"].distance <= layer.reach)
            and layer.fits(given)
            and (not self.examples or is_batched(source))
            # Inside a transform of the losses' own, the output is not on the path of the outer gradient.
            and transform_level() == self.level
            # A graph that the forward of a custom function keeps for its backward pass must reach the leaf.
            and not (self.graph_inside and in_custom_function())
        )

    def record(
        self, layer: Layer, given: dict[str, Any], source: Any, uses: dict[str, ParameterView], output: Tensor
    ) -> Tensor:
        """Remember the uses of leaves by a layer, and return its output as the losses get it."""
        inner, axis = (unwrapped(output), batch_dim(output)) if self.examples else (output, 0)
        if is_view(inner):
            output = without_view(output)
            inner, axis = (unwrapped(output), batch_dim(output)) if self.examples else (output, 0)
        source = source.detach() if self.examples else source.detach()[None]
        if not inner.requires_grad:
            return output  # torch.no_grad inside the losses
        options: dict[str, Any] = {}
        for name, value in given.items():
            if name in layer.keeps or not isinstance(value, Tensor):
                options[name] = value
        before, edge = change_count(source), get_gradient_edge(inner)
        for name, part in uses.items():

            def form(gradient: Tensor, rule: Form = layer.forms[name], part: ParameterView = part) -> Factors | Tensor:
                with torch_function_disabled():
                    changed = change_count(source) != before
                if changed:
                    raise UnrecordedDerivativeError("the input of a layer was changed in place after the layer used it")
                shape = {"shape": part.constant.shape}
                made = rule(source, gradient.movedim(axis, 0), options | shape)
                return made if part.back is same else part.back(made)

            self.uses.append(LayerUse(part.leaf, edge, form))
        return output


def _with_lists(values: Sequence[Any]) -> list[Any]:
    """The values, and those in lists among them."""
    return [x for value in values for x in (value if isinstance(value, list) else [value])]


_SET_REQUIRES_GRAD: Any = Tensor.requires_grad.__set__  # pyright: ignore

_BACKWARD = (torch.autograd.grad, torch.autograd.backward, Tensor.backward)

KNOWN = {*LAYERS, *transparent, *RECURRENT, *VIEWS}
"""Ops that do not change what they receive."""

_WATCHED = {
    *KNOWN,
    *BATCHED_OPS,
    *_BACKWARD,
    *GRAPH_ATTRIBUTES,
    Tensor.register_hook,
    set_grad_enabled,
    _SET_REQUIRES_GRAD,
}
