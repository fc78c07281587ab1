"""A skipped step is the identity to derivatives too: what is zero times the infinite derivatives of a step stays zero.

    opening, inputs = opened(inputs)           # backward: zero where the closing handed no flag over
    new = step with the inputs
    new = closed(opening, moved, new)          # backward: hands `moved` to the opening, as a cotangent
    select(moved, new, old)                    # the old values from before the opening

A cotangent carries the flag, as a flag beside the functions would stay at the level of the vmap that set it.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from functional_jd.core.tree import any_sharded, tree_flatten, tree_unflatten
from functional_jd.core.types import Tree
from functional_jd.torch_compat.torch_internals import under_functional_transform, under_functorch
from functional_jd.torch_compat.vmap_levels import differentiates, innermost, zero_of_members


def opened(tree: Tree) -> tuple[Tensor | None, Tree]:
    """Open a step: a token, for `closed`, and the inputs of the step, with the same values.

    The token is None, and the inputs are what they were, where no derivatives in reverse mode are asked for by a
    transform or a tensor, where inputs are sharded, and in a transform that torch.compile traces: there it
    differentiates what a function does, and leaves out its `backward`.
    """
    traced = torch.compiler.is_compiling()
    if traced and under_functional_transform():
        return None, tree
    leaves, structure = tree_flatten(tree)
    places = [index for index, x in enumerate(leaves) if _is_real(x)]
    inputs = [leaves[index] for index in places]
    if any_sharded(inputs):
        return None, tree
    inside = not traced and under_functorch()
    needed = torch.is_grad_enabled() and any((innermost(x) if inside else x).requires_grad for x in inputs)
    if not (needed or (inside and differentiates())):
        return None, tree
    if traced:
        token, *copies = _TracedOpen.apply(torch.zeros((), device=inputs[0].device), *inputs)  # pyright: ignore
    else:
        token, *copies = _Open.apply(zero_of_members(inputs[0].device), *inputs)  # pyright: ignore
    for index, copy in zip(places, copies, strict=True):
        leaves[index] = copy
    return token, tree_unflatten(structure, leaves)


def closed(token: Tensor | None, moved: Tensor, tree: Tree, *, reported: bool = False) -> Tree:
    """Close a step: its results, with the same values, whose cotangents reach the inputs where `moved`; those of what
    is `reported`, also where they are not zero.
    """
    if token is None:
        return tree
    leaves, structure = tree_flatten(tree)
    places = [index for index, x in enumerate(leaves) if _is_real(x)]
    if not places:
        return tree
    if torch.compiler.is_compiling():
        function: Any = _TracedReport if reported else _TracedClose
    else:
        function = _Report if reported else _Close
    results = function.apply(token, moved, *(leaves[index] for index in places))
    for index, result in zip(places, results, strict=True):
        leaves[index] = result
    return tree_unflatten(structure, leaves)


def _is_real(x: Any) -> bool:
    return isinstance(x, Tensor) and x.is_floating_point()


class _Open(Function):
    """`zero [], *inputs -> zero [], *inputs`. The first result is the token."""

    generate_vmap_rule = True

    @staticmethod
    def forward(zero: Any, *inputs: Any) -> Any:  # pyright: ignore
        return zero.clone(), *(torch.where(zero.to(x.device) == 0, x, x) for x in inputs)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:  # noqa: ARG004
        ctx.save_for_backward(inputs[0])  # not used, but torch's rule for vmap wants both or none
        ctx.save_for_forward(inputs[0])

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> Any:  # noqa: ARG004
        flag, *cotangents = grad_outputs
        return None, *(torch.where(flag.to(g.device) != 0, g, 0) for g in cotangents)

    @staticmethod
    def jvp(ctx: Any, *grad_inputs: Any) -> Any:
        return _Open.apply(*ctx.saved_tensors, *grad_inputs[1:])  # the token's tangent is the token of the tangents


class _Close(Function):
    """`token [], moved [], *results -> *results`."""

    generate_vmap_rule = True

    @staticmethod
    def forward(token: Any, moved: Any, *results: Any) -> Any:  # noqa: ARG004  # pyright: ignore
        return tuple(x.clone() for x in results)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:  # noqa: ARG004
        ctx.save_for_backward(*inputs[:2])
        ctx.save_for_forward(*inputs[:2])

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> Any:
        token, moved = ctx.saved_tensors
        return moved.to(token), None, *_Close.apply(token, moved, *grad_outputs)  # pyright: ignore

    @staticmethod
    def jvp(ctx: Any, *grad_inputs: Any) -> Any:
        (token, moved), (of_tangents, _, *tangents) = ctx.saved_tensors, grad_inputs
        return _Close.apply(token + of_tangents, moved, *tangents)


class _Report(_Close):
    """The same, for results that are differentiated whether the step was taken or not. Where it was not and their
    derivatives are not asked for, as behind `torch.where(moved, ...)`, the inputs receive none.
    """

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> Any:
        token, moved = ctx.saved_tensors
        for g in grad_outputs:
            moved = moved | (g != 0).any().to(moved.device)
        return moved.to(token), None, *_Close.apply(token, moved, *grad_outputs)  # pyright: ignore

    @staticmethod
    def jvp(ctx: Any, *grad_inputs: Any) -> Any:
        (token, moved), (of_tangents, _, *tangents) = ctx.saved_tensors, grad_inputs
        return _Report.apply(token + of_tangents, moved, *tangents)


class _TracedOpen(Function):
    """`_Open` for torch.compile, which traces no function with a `jvp`."""

    @staticmethod
    def forward(ctx: Any, zero: Any, *inputs: Any) -> Any:  # noqa: ARG004  # pyright: ignore
        return zero.clone(), *(x.clone() for x in inputs)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> Any:  # noqa: ARG004
        flag, *cotangents = grad_outputs
        return None, *(torch.where(flag.to(g.device) != 0, g, 0) for g in cotangents)


class _TracedClose(Function):
    """`_Close` for torch.compile."""

    @staticmethod
    def forward(ctx: Any, token: Any, moved: Any, *results: Any) -> Any:  # pyright: ignore
        ctx.save_for_backward(token, moved)
        return tuple(x.clone() for x in results)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> Any:
        token, moved = ctx.saved_tensors
        return moved.to(token), None, *grad_outputs


class _TracedReport(_TracedClose):
    """`_Report` for torch.compile."""

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> Any:
        token, moved = ctx.saved_tensors
        for g in grad_outputs:
            moved = moved | (g != 0).any().to(moved.device)
        return moved.to(token), None, *grad_outputs
