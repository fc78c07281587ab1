"""What the graph of plain autograd tells: its nodes, the scalars that were stacked, and the sizes of gradients."""

from collections.abc import Container, Iterable
from math import prod
from typing import Any

from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge


def graph_nodes(outputs: list[Tensor], inputs: Iterable[Tensor] = ()) -> list[Any]:
    """The nodes that a backward pass from these outputs may visit, without those behind the inputs."""
    ends = {get_gradient_edge(x).node for x in inputs}
    return nodes_from([y.grad_fn for y in outputs if y.grad_fn is not None], ends)


def nodes_from(roots: Iterable[Any], ends: Container[Any] = ()) -> list[Any]:
    """The nodes that a backward pass from these nodes may visit, without those behind the ends."""
    # Dicts keep the order, so that what is appended below is visited too.
    found = dict.fromkeys(roots)
    order: list[Any] = list(found)
    for node in order:
        for following, _ in () if node in ends else node.next_functions:
            if following is not None and following not in found:
                found[following] = None
                order.append(following)
    return order


def scalars_of_stack(y: Tensor) -> list[tuple[Tensor, Any]]:
    """Pairs of a value and what `torch.autograd.grad` takes as its output: of scalars that `torch.stack` joined, each
    by itself; of all else, the tensor.
    """
    node: Any = y.grad_fn
    if node is None or node.name() != "StackBackward0" or y.ndim != 1:
        return [(y, y)]
    handle: Any = y.register_hook(lambda _: None)
    hooks = len(handle.hooks_dict_ref())  # with those of the user, which gradients that do not pass `y` would miss
    handle.remove()
    if hooks > 1:
        return [(y, y)]
    edges = node.next_functions
    # A part without a gradient, or one that was cast as it was stacked, has no edge that stands for it. Where torch
    # does not say so, the losses are differentiated as one vector.
    for part, index in edges:
        entries: Any = getattr(part, "_input_metadata", ())
        if len(entries) <= index or entries[index].dtype != y.dtype:
            return [(y, y)]
    return [(value, GradientEdge(*edge)) for value, edge in zip(y.detach().unbind(), edges, strict=True)]


def largest_gradient(graph: list[Any], inputs: tuple[Tensor, ...]) -> int:
    """The number of elements of the largest gradient on the way to the inputs."""
    # Where torch does not tell, rows go all together.
    entries = (x for node in graph for x in getattr(node, "_input_metadata", ()) if not x.is_nested_tensor)
    return largest_between([x.shape for x in entries], inputs)


def largest_between(shapes: Iterable[Any], inputs: Iterable[Tensor]) -> int:
    """The largest number of elements of these shapes, without those of the inputs and of their transposes."""
    ends = {shape for x in inputs for shape in (tuple(x.shape), tuple(x.shape)[::-1])}
    return max([prod(shape) for shape in shapes if tuple(shape) not in ends], default=0)
