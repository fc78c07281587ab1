"""Backward passes through graphs of plain autograd, and what they run again."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge
from torch.overrides import TorchFunctionMode, has_torch_function

from functional_jd.torch_compat.autograd_graph import nodes_from
from functional_jd.torch_compat.callers import here
from functional_jd.torch_compat.slow_path import cure_of
from functional_jd.torch_compat.torch_internals import private

# What `torch.autograd.grad`, which takes its place, calls after it has asked about each tensor.
_run_backward: Any = private("autograd.graph._engine_run_backward", "backward passes", otherwise=False)


def gradients(
    outputs: list[Any],
    inputs: list[Any],
    cotangents: list[Tensor],
    retain_graph: bool = False,
    create_graph: bool = False,
) -> list[Tensor | None]:
    """`torch.autograd.grad` of cotangents that fit, dense, with None for inputs that are not reached.

    Its questions about each tensor, which of many inputs take as long as a head, are left out where no mode and no
    subclass of tensors is to see the call. What runs again is watched by `OwnParameters`.
    """
    try:
        if has_torch_function((*outputs, *inputs)) or not _run_backward:
            how = retain_graph, create_graph
            return to_dense(torch.autograd.grad(outputs, inputs, cotangents, *how, allow_unused=True))
        how = retain_graph, create_graph, tuple(inputs), True
        with OwnParameters(outputs):
            found = _run_backward(tuple(outputs), tuple(cotangents), *how, accumulate_grad=False)
        return to_dense(found)
    except AttributeError as error:
        if cure := cure_of(str(error)):
            error.add_note(f"{here()}:{cure}")
        raise


def to_dense(gradients: Iterable[Tensor | None]) -> list[Tensor | None]:
    """Gradients without sparse ones, which embeddings may return: rows are dense."""
    dense = list(gradients)
    for index, g in enumerate(dense):
        if g is not None and g.is_sparse:
            dense[index] = g.to_dense()
    return dense


class OwnParameters(TorchFunctionMode):
    """Raises if a backward pass runs something with a parameter that the forward pass did not use.

    `torch.func.functional_call` puts a module's own parameters back when it returns. A checkpoint inside the module, or
    a custom function that calls it, then differentiates at those. The mode sees what a backward pass runs in Python,
    which is mostly nothing.

    Args:
        outputs: the tensors, or edges, from which the backward pass starts.
    """

    def __init__(self, outputs: list[Any]):
        super().__init__()
        self.outputs = outputs
        self.used: set[int] | None = None

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not torch.compiler.is_compiling():
            for x in (*args, *kwargs.values()):
                if type(x) is nn.Parameter:
                    self.check(x)
        return func(*args, **kwargs)

    def check(self, x: Tensor) -> None:
        """Raise ValueError if it requires grad and is no leaf of the graph."""
        if self.used is None:
            roots = [y.node if isinstance(y, GradientEdge) else y.grad_fn for y in self.outputs]
            leaves = (getattr(node, "variable", None) for node in nodes_from(roots))
            self.used = {id(leaf) for leaf in leaves if leaf is not None}
        if x.requires_grad and id(x) not in self.used:
            raise ValueError(
                f"{here()}: what runs again in the backward pass must use the parameters of the forward pass, "
                f"found a module's own parameter of shape {list(x.shape)}. Call the module by functional(module), or "
                "torch.func.functional_call inside the checkpoint."
            )
