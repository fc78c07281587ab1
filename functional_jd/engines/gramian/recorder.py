"""Records the layers that use a parameter, recognised by the parameter that they receive.

A row of a linear layer's Jacobian is `sum_p left_p right_p'` over the positions p of the layer in its input: one
side is the layer's input, the other the gradient of its output. Inner products of such rows need no rows.
"""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.nn.attention import SDPBackend, sdpa_kernel

from functional_jd.engines.gramian.layers import LAYERS, Factors, Form, Layer
from functional_jd.precision.autocast import tensors_of
from functional_jd.torch_compat.autograd_graph import graph_nodes
from functional_jd.torch_compat.recomputation import RecomputedMode
from functional_jd.torch_compat.torch_internals import (
    GRAD_FN,
    TRANSPARENT,
    add_batch_dim,
    examples_first,
    is_batched,
    traceable,
    transform_level,
    transparent,
    version,
)
from functional_jd.torch_compat.watching import SEEN, SEEN_WITH

F = torch.nn.functional


class UnrecordedDerivativeError(Exception):
    """The losses use a parameter in a way that the recorder does not see."""


class LayerUse(NamedTuple):
    """One use of a parameter by a known layer."""

    leaf: int  # the index of the parameter
    end: int  # the index of the layer among those recorded
    form: Form
    given: dict[str, Any]  # the arguments of the layer that are not tensors, and the shape of its weight
    transposed: bool  # whether the layer received the transpose of the parameter


class Recording(NamedTuple):
    """The recorded layers: lists from outside, as torch.compile loses the attributes of a mode."""

    uses: list[LayerUse]
    ends: list[GradientEdge | Tensor]  # for each layer, the edge of the graph, or the tensor, whose gradient is needed
    sources: list[Tensor]  # for each layer, its inputs `[n, *x]`, or `[m, n, *x]` if each row has its own
    versions: list[int]  # for each layer, how often its inputs had been changed in place; -1 for a copy
    outputs: list[Tensor]  # the ends of the graph of plain autograd, if it is the whole graph


class _Known(NamedTuple):
    """A parameter or its transpose, as the losses receive it, and the same of the constant that takes its place."""

    seen: Tensor
    leaf: int
    constant: Tensor
    transposed: bool = False


class LayerRecorder(RecomputedMode):
    """Records every known layer that receives a parameter. The layer gets a constant instead of the parameter, so that
    the gradient that still arrives at the parameter is that of all other uses, whatever they are.

    Args:
        leaves: the tensors that the function receives.
        constants: tensors with the same values that are leaves of the graph.
        recording: the `Recording` that is filled; None: it is dropped.
        traced: whether it may run under a transform or torch.compile, or the result may be differentiated. Then copies
            of tensors are recorded, as their changes in place are not seen.
        m: the number of examples that `torch.vmap` hides; 0 if it hides none.
    """

    def __init__(
        self, leaves: list[Tensor], *, constants: list[Tensor], recording: Any = None, traced: bool = False, m: int = 0
    ):
        self.leaves, self.constants, self.traced, self.m = leaves, constants, traced, m
        self.recording = recording or Recording([], [], [], [], [])
        self.known = [_Known(leaf, index, constants[index]) for index, leaf in enumerate(leaves)]
        # An id would be a constant of what torch.compile traces.
        self.by_id = {} if torch.compiler.is_compiling() else {id(known.seen): known for known in self.known}
        super().__init__()
        self.level, self.watch = transform_level(), cast(Any, None)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        func = call = traceable(func) if self.traced else func
        if self.watch is not None and (func in SEEN or not kwargs.keys().isdisjoint(SEEN_WITH)):
            call = lambda *args, **kwargs: self.watch.__torch_function__(func, types, args, kwargs)
        if func not in _WATCHED:
            return call(*args, **kwargs)
        if (layer := LAYERS.get(func)) is not None:
            given = dict(zip(layer.names, args, strict=False)) | kwargs
            uses = self.uses_of(layer, given, len(args))
            return self.record(call, layer, given, uses, args, kwargs) if uses else call(*args, **kwargs)
        form = transparent(func, kwargs)
        if form is not None and any(map(self.known_as, tensors_of((*args, *kwargs.values())))):
            with self:
                return form(*args, **kwargs)
        if func is F.scaled_dot_product_attention and self.m and transform_level() == self.level:
            return _attention_of_examples(self.level[0], *args, **kwargs)
        self.note_checkpoints(innermost=True)
        self.refuse(func, args[0] if args else kwargs.get("input"))
        output = call(*args, **kwargs)
        if func in _TRANSPOSES:
            self.follow(func, args, kwargs, output)
        elif func == GRAD_FN and any(isinstance(x, GradientEdge) and x.node is output for x in self.recording.ends):
            raise UnrecordedDerivativeError("the losses read the grad_fn of a recorded layer, which may get a hook")
        return output

    def again(self) -> Callable[[], "LayerRecorder"]:
        """A checkpoint that runs again saves tensors of the same shapes. Its recording is dropped."""
        return partial(LayerRecorder, self.leaves, constants=self.constants, traced=self.traced, m=self.m)

    def known_as(self, x: Any) -> _Known | None:
        """The record of a tensor, unless it is frozen for a time."""
        if not isinstance(x, Tensor):
            return None
        found = self.by_id.get(id(x)) if self.by_id else next((known for known in self.known if known.seen is x), None)
        return found if found is not None and (self.m or x.requires_grad) else None

    def refuse(self, func: Any, x: Any) -> None:
        """Raise where a gradient would be wrong, or would miss the layers that received a constant."""
        if func in _BACKWARD:
            raise UnrecordedDerivativeError(f"the losses call {func.__name__}, which the layer recorder cannot follow")
        if func is Tensor.register_hook and self.known_as(x):
            raise UnrecordedDerivativeError("the losses register a hook on a parameter, past which layers are recorded")
        if func == _SET_REQUIRES_GRAD and self.m and self.known_as(x):
            # Below vmap it stays as it is, and the gradient arrives.
            raise UnrecordedDerivativeError("the losses set requires_grad of a parameter, which vmap hides")
        strided = func in _STRIDED and self.m and is_batched(x, self.level[0])
        if strided and not examples_first(x, self.level[0]).stride(0):
            raise UnrecordedDerivativeError("torch.as_strided receives copies of a parameter, which share memory")

    def follow(self, func: Any, args: Any, kwargs: Any, output: Any) -> None:
        """Recognise the transpose of a matrix."""
        known = self.known_as(args[0])
        if known is None or known.seen.ndim != 2 or transform_level() != self.level or not torch.is_grad_enabled():
            return
        way = [*args[1:], *kwargs.values()]
        if not way or (len(way) == 2 and all(isinstance(d, int) for d in way) and way[0] % 2 != way[1] % 2):
            constant = func(known.constant, *args[1:], **kwargs)
            self.known.append(_Known(output, known.leaf, constant, not known.transposed))
            if self.by_id:
                self.by_id[id(output)] = self.known[-1]

    def uses_of(self, layer: Layer, given: dict[str, Any], n_args: int) -> dict[str, _Known]:
        """The parameters that a layer receives, by argument; none where its rows are left to autograd."""
        found = {name: self.known_as(given.get(name)) for name in layer.forms}
        uses = {name: known for name, known in found.items() if known is not None}
        if not uses or n_args > len(layer.names) or not given.keys() <= set(layer.names):
            return {}
        if "weight" in uses and uses["weight"].transposed and not layer.matrix:
            return {}
        others = [given.get(name) for name in layer.forms if name not in uses]
        # Inside a transform of the losses' own, the output is not on the path of the outer gradient.
        if not layer.fits(given) or transform_level() != self.level:
            return {}
        hidden = partial(is_batched, level=self.level[0])
        return uses if not self.m or (hidden(given["input"]) and not any(map(hidden, others))) else {}

    def record(
        self, call: Any, layer: Layer, given: dict[str, Any], uses: dict[str, _Known], args: Any, kwargs: Any
    ) -> Tensor:
        """Remember the uses of parameters by a layer, and return its output as the losses get it."""
        others = {key: x for key, x in given.items() if not isinstance(x, Tensor)}
        others["shape"] = given["weight"].shape
        self.note_checkpoints(innermost=True)
        source = examples_first(given["input"], self.level[0]) if self.m else given["input"]
        several = source.shape[: source.ndim - layer.dims]
        # Along one dimension: the output is then no view, which changes in place would give another graph.
        flat = source if len(several) == 1 else source.reshape(-1, *source.shape[len(several) :])
        made = given | {"input": flat}
        for name, known in uses.items():
            made[name] = known.constant
        output = call(*map(made.get, layer.names[: len(args)]), **dict(zip(kwargs, map(made.get, kwargs), strict=True)))
        if output.requires_grad:  # else torch.no_grad inside the losses
            recording, end = self.recording, len(self.recording.ends)
            for name, known in uses.items():
                recording.uses.append(LayerUse(known.leaf, end, layer.forms[name], others, known.transposed))
            recording.ends.append(output if self.traced else get_gradient_edge(output))
            flat = flat.clone() if self.traced else flat.detach()
            recording.sources.append(flat.unflatten(0, (self.m, -1)) if self.m else flat)
            recording.versions.append(-1 if self.traced else version(flat))
            # The losses may change what they get in place; torch.compile removes the copy.
            output = output.clone() if self.traced else output
        output = output if len(several) == 1 else output.reshape(*several, *output.shape[1:])
        return add_batch_dim(output, 0, self.level[0]) if self.m else output


def parts_of(recording: Recording, gradients: Sequence[Tensor | None]) -> list[tuple[int, Factors | Tensor]]:
    """The parts of the rows by the recorded layers, per parameter: from the m gradients of each end, `[m, n, *y]`."""
    for source, before in zip(recording.sources, recording.versions, strict=True):
        if before >= 0 and version(source) != before:
            raise UnrecordedDerivativeError("the input of a layer was changed in place after the layer used it")
    # A custom function may have recorded a layer in its forward, to differentiate it by itself in its backward.
    nodes = graph_nodes(recording.outputs) if any(g is None for g in gradients) else []
    if any(isinstance(node, BackwardCFunction) for node in nodes):
        raise UnrecordedDerivativeError("the losses use a custom autograd function, in which a layer may be hidden")
    parts: list[tuple[int, Factors | Tensor]] = []
    for leaf, end, form, given, transposed in recording.uses:
        if (gradient := gradients[end]) is not None:
            made = form(recording.sources[end], gradient, given)
            parts.append((leaf, Factors(*made[::-1]) if transposed and isinstance(made, Factors) else made))
    return parts


def _attention_of_examples(level: int, *args: Any, **kwargs: Any) -> Tensor:
    """The fused attention of all examples at once: torch has no rule that batches its kernel for CPUs.

    Without dropout, which draws for every example, and without a mask that has dimensions other than positions, or that
    torch does not take with `is_causal`.
    """
    given = dict(zip(_ATTENTION, args, strict=False)) | kwargs
    sides, mask = [given[name] for name in _ATTENTION[:3]], given.get("attn_mask")
    masked = mask is not None and (is_batched(mask, level) or mask.ndim > 2 or given.get("is_causal"))
    if not given.get("dropout_p") and not masked and all(is_batched(x, level) for x in sides):
        physical = [examples_first(x, level) for x in sides]
        several = physical[0].shape[:-3]
        if several and all(x.shape[:-3] == several for x in physical):
            flat: Any = dict(zip(_ATTENTION, [x.flatten(0, -4) for x in physical], strict=False))
            return add_batch_dim(F.scaled_dot_product_attention(**given | flat).unflatten(0, several), 0, level)
    with sdpa_kernel(SDPBackend.MATH) if sides[0].is_cpu else nullcontext():
        return F.scaled_dot_product_attention(*args, **kwargs)


_ATTENTION = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa")

_BACKWARD = (torch.autograd.grad, torch.autograd.backward, Tensor.backward)
_SET_REQUIRES_GRAD: Any = Tensor.requires_grad.__set__  # pyright: ignore
_STRIDED = (torch.as_strided, Tensor.as_strided)
_TRANSPOSES = {getattr(home, name) for home in (torch, Tensor) for name in ("t", "transpose", "swapaxes", "swapdims")}
_TRANSPOSES |= {Tensor.T.__get__, Tensor.mT.__get__}  # pyright: ignore

_WATCHED = {
    *LAYERS,
    *TRANSPARENT,
    *_BACKWARD,
    *_TRANSPOSES,
    *_STRIDED,
    F.scaled_dot_product_attention,
    GRAD_FN,
    Tensor.register_hook,
    _SET_REQUIRES_GRAD,
    torch.empty,  # before a checkpoint in a checkpoint
}
