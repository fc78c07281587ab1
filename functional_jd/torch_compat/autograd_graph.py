"""The graph of plain autograd: its nodes, the scalars that were stacked, sizes of gradients, and backward passes."""

from collections.abc import Container, Iterable, Iterator, Sequence
from functools import cached_property
from math import inf, prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.overrides import TorchFunctionMode

from functional_jd.torch_compat.callers import here
from functional_jd.torch_compat.torch_internals import private

# What `torch.autograd.grad`, which takes its place, calls after it has asked about each tensor.
_run_backward: Any = private("autograd.graph._engine_run_backward", "backward passes", otherwise=False)
_PLAIN = {Tensor, nn.Parameter, GradientEdge}


def graph_nodes(roots: Iterable[Any], ends: Container[Any] = ()) -> Iterator[Any]:
    """The nodes that a backward pass from tensors or nodes may visit, but none behind the ends: the next ones first."""
    found = dict.fromkeys(filter(None, [x.grad_fn if isinstance(x, Tensor) else x for x in roots]))
    order: list[Any] = list(found)
    for node in order:  # and what is appended below
        yield node
        for following, _ in () if node in ends else node.next_functions:
            if following is not None and following not in found:
                found[following] = None
                order.append(following)


def leaves_behind(roots: Iterable[Any], ends: Container[Any] = ()) -> dict[int, Tensor]:
    """The leaf tensors that a backward pass from these tensors or nodes reaches, by id."""
    return {id(x): x for node in graph_nodes(roots, ends) if (x := getattr(node, "variable", None)) is not None}


def scalars_of_stack(y: Tensor) -> list[tuple[Tensor, Any]]:
    """Pairs of a value and its output for `torch.autograd.grad`: each scalar that was stacked, or else the tensor."""
    node: Any = y.grad_fn
    if node is None or node.name() != "StackBackward0" or y.ndim != 1:
        return [(y, y)]
    handle: Any = y.register_hook(lambda _: None)
    hooks = len(handle.hooks_dict_ref())  # with those of the user, which gradients that do not pass `y` would miss
    handle.remove()
    # A part without a gradient, or one that was cast as it was stacked, has no edge that stands for it. Where torch
    # does not say so, the losses are differentiated as one vector.
    entries = [getattr(part, "_input_metadata", ())[index : index + 1] for part, index in node.next_functions]
    if hooks > 1 or not all(x and x[0].dtype == y.dtype for x in entries):
        return [(y, y)]
    return [(value, GradientEdge(*edge)) for value, edge in zip(y.detach().unbind(), node.next_functions, strict=True)]


def refuse_reentrant(roots: Iterable[Any], inputs: Iterable[Tensor] = ()) -> None:
    """Raise for a reentrant checkpoint between them: `torch.autograd.grad` may leave out the parameters inside."""
    ends = {get_gradient_edge(x).node for x in inputs}
    if any(x.name() == "CheckpointFunctionBackward" and x not in ends for x in graph_nodes(roots, ends)):
        raise ValueError(f"{here()}: checkpoints must have use_reentrant=False, found True, which may hide parameters.")


def largest_gradient(nodes: Iterable[Any], inputs: Sequence[Tensor], enough: float = inf) -> int:
    """The `words` of the largest gradient that these nodes receive, or the first of more than `enough`."""
    # Where torch does not tell, rows go all together.
    entries = (x for node in nodes for x in getattr(node, "_input_metadata", ()))
    return largest_between(((x.shape, x.dtype) for x in entries if not x.is_nested_tensor), inputs, enough)


def largest_between(parts: Iterable[Any], inputs: Iterable[Tensor], enough: float = inf) -> int:
    """The most `words` of a shape with its dtype, or the first above `enough`; inputs and their transposes left out."""
    ends = {shape for x in inputs for shape in (tuple(x.shape), tuple(x.shape)[::-1])}
    largest = 0
    for size in (words(*part) for part in parts if tuple(part[0]) not in ends):
        largest = max(largest, size)
        if largest > enough:
            break
    return largest


def words(shape: Sequence[int], dtype: torch.dtype) -> int:
    """The size of a tensor in numbers of float32: a cache holds two of half precision for one of them."""
    return prod(shape) * dtype.itemsize // 4


def gradients(
    outputs: list[Any], inputs: list[Any], cotangents: list[Tensor], retain_graph: bool, create_graph: bool
) -> list[Tensor | None]:
    """`torch.autograd.grad` of cotangents that fit, dense, with None for inputs that are not reached. Its questions
    about each tensor are left out, unless a subclass of tensors intercepts the call. A mode that did so, as that of
    `torch.set_default_device`, would hide what runs again from `OwnParameters`.
    """
    how = retain_graph, create_graph
    if not (_run_backward and _PLAIN.issuperset(map(type, (*outputs, *inputs)))):
        return to_dense(torch.autograd.grad(outputs, inputs, cotangents, *how, allow_unused=True))
    with OwnParameters(outputs):
        found = _run_backward(tuple(outputs), tuple(cotangents), *how, tuple(inputs), True, accumulate_grad=False)
    return to_dense(found)


def to_dense(gradients: Iterable[Tensor | None]) -> list[Tensor | None]:
    """Gradients without sparse ones, which embeddings may return: rows are dense."""
    dense = list(gradients)
    for index, g in enumerate(dense):
        if g is not None and g.is_sparse:
            dense[index] = g.to_dense()
    return dense


class OwnParameters(TorchFunctionMode):
    """Raises if a backward pass uses a parameter that the forward pass did not use: a module's own, which
    `torch.func.functional_call` puts back when it returns, in a checkpoint or a custom function.
    """

    def __init__(self, outputs: list[Any]):
        super().__init__()
        self.outputs = outputs

    @cached_property
    def used(self) -> dict[int, Tensor]:
        return leaves_behind([y.node if isinstance(y, GradientEdge) else y for y in self.outputs])

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for x in () if torch.compiler.is_compiling() else (*args, *(kwargs or {}).values()):
            if type(x) is nn.Parameter and x.requires_grad and id(x) not in self.used:
                raise ValueError(
                    f"{here()}: what runs again in the backward pass must use the parameters of the forward pass, "
                    f"found a module's own parameter of shape {list(x.shape)}. Call the module by functional(module), "
                    "or torch.func.functional_call inside the checkpoint."
                )
        return func(*args, **(kwargs or {}))
