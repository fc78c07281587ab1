"""What the graph that autograd recorded says about its way back, before anyone walks it."""

from math import prod
from typing import Any

from torch import Tensor


def nodes(outputs: list[Tensor]) -> list[Any]:
    """The nodes that a backward pass from these outputs may visit."""
    # Dicts keep the order, so that what is appended below is visited too.
    found = dict.fromkeys(y.grad_fn for y in outputs if y.grad_fn is not None)
    order: list[Any] = list(found)
    for node in order:
        for following, _ in node.next_functions:
            if following is not None and following not in found:
                found[following] = None
                order.append(following)
    return order


def widest(graph: list[Any], inputs: tuple[Tensor, ...]) -> int:
    """The number of elements of the largest gradient on the way to the inputs, these and their transposes left out."""
    ends = {shape for x in inputs for shape in (tuple(x.shape), tuple(x.shape)[::-1])}
    entries = (entry for node in graph for entry in node._input_metadata if not entry.is_nested_tensor)
    return max((prod(entry.shape) for entry in entries if tuple(entry.shape) not in ends), default=0)


def is_linear(graph: list[Any]) -> bool:
    """Whether each gradient is surely a differentiable, linear function of the cotangents, in at least float32.

    Torch's own nodes, which end in a number, differentiate their backward pass or say that they cannot. A function
    somebody wrote may hide it behind `detach`, and would be taken for a constant.
    """
    return all(
        (node.name()[-1].isdigit() or node.name() in _UNNUMBERED)
        and all(entry.dtype.itemsize >= 4 for entry in node._input_metadata)
        for node in graph
    )


_UNNUMBERED = ("torch::autograd::AccumulateGrad", "torch::autograd::CopySlices")
