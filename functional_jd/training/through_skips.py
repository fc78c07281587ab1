"""A skipped step is the identity to derivatives too: zero times the infinite derivatives of a step stays zero.

`token, inputs = opened(inputs)`: their cotangents are zero, unless the closing passes a flag. `new = closed(token,
moved, step(inputs))` passes `moved` to the opening, as a cotangent. Then `select` takes old values from before it.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from functional_jd.core.tree import any_sharded, tree_flatten, tree_leaves
from functional_jd.core.types import Tree
from functional_jd.torch_compat.torch_internals import differentiates, innermost, under_functorch, zero_of_members


def opened(tree: Tree) -> tuple[Tensor | None, Tree]:
    """Open a step: a token for `closed`, and its inputs with the same values. The token is None if nothing
    differentiates, if inputs are sharded, and under torch.compile: derivatives through skips are NaN there.
    """
    if torch.compiler.is_compiling() or any_sharded(tree_leaves(tree)):
        return None, tree
    leaves, structure = tree_flatten(tree)
    inputs = list(filter(_is_real, leaves))
    transformed = under_functorch() and differentiates()
    if not (transformed or (torch.is_grad_enabled() and any(innermost(x).requires_grad for x in inputs))):
        return None, tree
    token, *copies = _Open.apply(zero_of_members(inputs[0].device), *inputs)  # pyright: ignore
    rest = iter(copies)
    return token, structure.unflatten([next(rest) if _is_real(x) else x for x in leaves])


def closed(token: Tensor, moved: Tensor, tree: Tree) -> Tree:
    """Results with the same values. Cotangents pass if the step `moved`, or if that of a report is not zero."""
    leaves, structure = tree_flatten(tree)
    rest = iter(_Close.apply(token, moved, True, *filter(_is_real, leaves)))  # pyright: ignore
    return structure.unflatten([next(rest) if _is_real(x) else x for x in leaves])


def _is_real(x: Any) -> bool:
    return isinstance(x, Tensor) and x.is_floating_point()


class _Open(Function):  # zero [], *inputs -> token [], *inputs
    generate_vmap_rule = True

    @staticmethod
    def forward(zero: Any, *inputs: Any) -> Any:  # pyright: ignore
        return zero.clone(), *(torch.where(zero.to(x.device) == 0, x, x) for x in inputs)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:  # noqa: ARG004
        ctx.save_for_backward(inputs[0])  # not used, but torch's rule for vmap wants both or none
        ctx.save_for_forward(inputs[0])

    @staticmethod
    def backward(ctx: Any, flag: Any, *cotangents: Any) -> Any:  # noqa: ARG004  # pyright: ignore
        return None, *(torch.where(flag.to(g.device) != 0, g, 0) for g in cotangents)

    @staticmethod
    def jvp(ctx: Any, *grad_inputs: Any) -> Any:
        return _Open.apply(*ctx.saved_tensors, *grad_inputs[1:])  # the token's tangent is the token of the tangents


class _Close(Function):  # token [], moved [], whether these may be reports, *results -> *results
    generate_vmap_rule = True

    @staticmethod
    def forward(token: Any, moved: Any, reports: bool, *results: Any) -> Any:  # noqa: ARG004  # pyright: ignore
        return tuple(x.clone() for x in results)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:  # noqa: ARG004
        token, moved, ctx.reports, *_ = inputs
        ctx.save_for_backward(token, moved)
        ctx.save_for_forward(token, moved)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> Any:
        token, moved = ctx.saved_tensors
        for g in grad_outputs if ctx.reports else ():
            moved = moved | (g != 0).any().to(moved.device)
        return moved.to(token), None, None, *_Close.apply(token, moved, False, *grad_outputs)  # pyright: ignore

    @staticmethod
    def jvp(ctx: Any, of_tangents: Any, _: Any, __: Any, *tangents: Any) -> Any:  # pyright: ignore
        return _Close.apply(ctx.saved_tensors[0] + of_tangents, ctx.saved_tensors[1], ctx.reports, *tangents)
