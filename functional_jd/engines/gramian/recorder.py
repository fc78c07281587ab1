"""Records the layers that a parameter goes through, recognised by the parameter that they receive."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.overrides import TorchFunctionMode, handle_torch_function, has_torch_function

from functional_jd.core.torch_internals import (
    is_batched,
    torch_function_disabled,
    transform_level,
    transparent,
    unwrap_batched,
    version,
    without_view,
)
from functional_jd.core.tree import tree_leaves
from functional_jd.engines.gramian.factors import Factors
from functional_jd.engines.gramian.layers import LAYERS, Form, Layer
from functional_jd.engines.gramian.parameter_views import FLAT, VIEWS, ParameterView, view_of


class LayerUse(NamedTuple):
    """One recognised use of a leaf.

    Attributes:
        leaf: which one.
        edge: where the gradient of what came out passes by; in `tapped.py` the number of the op.
        form: from the gradients there, to the `Factors` of the rows or to the rows `[m, *p]` themselves.
    """

    leaf: int
    edge: GradientEdge | int
    form: Callable[[Tensor], Factors | Tensor]


class UnrecordedDerivativeError(Exception):
    """Something happened to the losses that taps would not see."""


class LayerRecorder(TorchFunctionMode):
    """Sees every op that receives a leaf. Where the table knows the op, a constant takes the leaf's place and what
    comes out is tapped: so the gradient that still arrives at the leaf is that of all uses nobody recognised,
    those included that no mode sees, such as a custom autograd function.

    Args:
        leaves: the tensors that the function receives.
        constants: the same values, for autograd leaves of their own.
        taps: a list to fill.
        examples: whether `torch.vmap` hides a dimension of examples.
    """

    def __init__(self, leaves: list[Tensor], constants: list[Tensor], taps: list[LayerUse], *, examples: bool):
        super().__init__()
        self.known: dict[
            int, tuple[ParameterView, Tensor, int]
        ] = {}  # with its tensor: an id would be free again without it
        for index, (leaf, constant) in enumerate(zip(leaves, constants, strict=True)):
            self.know(leaf, ParameterView(index, constant))
        self.taps, self.examples = taps, examples
        self.level = transform_level()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func not in _WATCHED:
            return func(*args, **kwargs)
        if func in _BACKWARD:
            # A derivative inside the losses reaches the constants on ways that no tap is on.
            raise UnrecordedDerivativeError
        if func in transparent and any(self.part(x) for x in (*args, *kwargs.values())):
            return self.enter(func, args, kwargs)
        layer = LAYERS.get(func)
        if layer is not None:
            given = dict(zip(layer.names, args, strict=False)) | kwargs
            uses = {name: part for name in layer.forms if (part := self.part(given.get(name)))}
            with torch_function_disabled():
                fits = bool(uses) and self.fits(layer, given, uses)
            if fits:
                taken = given | {name: part.constant for name, part in uses.items()}
                output = func(*[taken[name] for name in layer.names[: len(args)]], **{k: taken[k] for k in kwargs})
                with torch_function_disabled():
                    output = self.apart(output)
                    self.record(layer, given, uses, output)
                return output
        output = func(*args, **kwargs)
        if func in VIEWS and args and (part := self.part(args[0])):
            self.follow(part, func, args, kwargs, output)
        return output

    def apart(self, output: Tensor) -> Tensor:
        return without_view(output)

    def part(self, x: Any) -> ParameterView | None:
        """What part of a leaf this is, unless it was changed in place since."""
        part, seen, before = self.known.get(id(x), (None, None, 0))
        return part if seen is not None and version(seen) == before else None

    def know(self, x: Tensor, part: ParameterView) -> None:
        self.known[id(x)] = (part, x, version(x))

    def follow(self, part: ParameterView, func: Any, args: Any, kwargs: Any, output: Any) -> None:
        """Know the parts of a leaf that an op gave."""
        rest = (args[1:], kwargs)
        if not torch.is_grad_enabled() or transform_level() != self.level:
            return
        if any(isinstance(x, Tensor) for x in tree_leaves(rest)):
            return  # an index, which picks numbers one by one
        views = func(part.constant, *args[1:], **kwargs)
        pairs = [(output, views)] if isinstance(output, Tensor) else zip(output, views, strict=True)
        for seen, view in pairs:
            with torch_function_disabled():
                found = view_of(part, view)
            if found is not None and id(seen) not in self.known:
                self.know(seen, found)

    def enter(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run a function with the mode on, which torch shows as one op; in autocast's dtype, if autocast does so."""

        def op(*args: Any, **kwargs: Any) -> Any:
            relevant = (*args, *kwargs.values())
            if has_torch_function(relevant):  # modes further out have a word to say about that op
                return handle_torch_function(op, relevant, *args, **kwargs)
            with self:
                return transparent[func](*args, **kwargs)

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

    def fits(self, layer: Layer, given: dict[str, Any], uses: dict[str, ParameterView]) -> bool:
        # Within a transform of the losses' own, what comes out is not what the outer gradient passes by.
        return (
            transform_level() == self.level
            # Where no example hides, autograd forms such rows itself, and faster: nothing waits for the sum.
            and (self.examples or layer.reach < FLAT)
            and input_name(uses) not in uses
            and given.keys() <= set(layer.names)
            and (not self.examples or is_batched(given.get(input_name(uses))))
            and not any(is_batched(given.get(name)) for name in layer.keeps)
            and all(part.distance <= (layer.reach if name == "weight" else FLAT) for name, part in uses.items())
            and layer.fits(given)
        )

    def record(self, layer: Layer, given: dict[str, Any], uses: dict[str, ParameterView], output: Tensor) -> None:
        source, axis = given[input_name(uses)], 0
        if self.examples:
            source, hidden = unwrap_batched(source)
            source = source.movedim(hidden, 0).detach()
            output, axis = unwrap_batched(output)
        else:
            source = source.detach()[None]
        if not output.requires_grad:
            return  # torch.no_grad, within the losses
        options = {name: value for name, value in given.items() if not isinstance(value, Tensor)}
        options |= {name: given[name] for name in layer.keeps if name in given}
        before, edge = version(source), get_gradient_edge(output)
        for name, part in uses.items():

            def form(gradient: Tensor, rule: Form = layer.forms[name], part: ParameterView = part) -> Factors | Tensor:
                if version(source) != before:
                    raise UnrecordedDerivativeError  # changed in place since then
                shape = {"shape": part.constant.shape}
                return part.back(rule(source, gradient.movedim(axis, 0), options | shape))

            self.taps.append(LayerUse(part.leaf, edge, form))


def input_name(uses: dict[str, ParameterView]) -> str:
    """The name of the argument that goes in, beside those that are leaves."""
    return "other" if "input" in uses else "input"


_BACKWARD = (torch.autograd.grad, torch.autograd.backward, Tensor.backward)


KNOWN = {*LAYERS, *transparent, *VIEWS}
"""Ops that leave what they receive as it is."""


_WATCHED = {*KNOWN, *_BACKWARD}
