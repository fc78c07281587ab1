"""Evaluate once, with the vector-Jacobian product: plain autograd where no transform is active, else torch.func."""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple, TypeAlias, cast

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from functional_jd.core.tree import detach_tree, tree_flatten
from functional_jd.engines.plan import Plan
from functional_jd.torch_compat.autograd_graph import gradients, largest_between, scalars_of_stack, to_dense, words
from functional_jd.torch_compat.callers import here
from functional_jd.torch_compat.repaired_ops import SeparateNormAffine
from functional_jd.torch_compat.torch_internals import traceable, traced_grad, under_transform

Differentiated: TypeAlias = Callable[[list[Tensor]], tuple[list[Tensor], Any]]

Cotangent: TypeAlias = list[Tensor | None]
"""One per output; `None` where the cotangent is zero, so that plain autograd never walks that output's graph."""


Sizes: TypeAlias = tuple[int, list[int], bool]
"""What the choice between ways of many rows needs: the number of elements of the largest gradient between the layers,
that of each input, and whether there are convolutions."""


class Vjp(NamedTuple):
    """A function at a point.

    `pullback(cotangent, among=slice(None), last=False)` returns the gradients, one per input of the slice; `None` where
    an input is certainly not reached. The last call frees the graph. The caller switches autocast off.
    """

    outputs: list[Tensor]  # what the function returned first
    extra: Any  # what it returned second
    pullback: Callable[..., list[Tensor | None]]
    inputs: tuple[Tensor, ...] = ()  # the leaves of plain autograd's graph; empty if torch.func recorded it
    sizes: Sizes | None = None  # on an accelerator while torch.compile traces, which shows no graph; else None


def vjp(
    f: Differentiated,
    inputs: list[Tensor],
    plan: Plan,
    *,
    scalars: bool = False,
    example: bool = False,
    ends: Sequence[Any] = (),
) -> Vjp:
    """Evaluate `f(inputs) -> (outputs, extra)` once, and return it with its vector-Jacobian product.

    Args:
        f: a function of a list of tensors.
        inputs: floating-point tensors.
        plan: whether the gradients may be differentiated, and the function in whose name errors are raised.
        scalars: whether scalars that `torch.stack` joined become outputs of their own, where plain autograd records
            them: the cotangent of one then walks its graph only, and not those of the others.
        example: whether a `torch.vmap` over examples may have been entered since the plan was made.
        ends: a list that `f` fills with tensors or edges of plain autograd's graph: their gradients come before those
            of the inputs.
    """
    check_mode()
    if (plan.differentiable or example) and under_transform():
        return _by_func(f, inputs, plan.differentiable)
    return _by_autograd(f, inputs, plan, scalars and not plan.differentiable, ends)


def check_mode() -> None:
    """Raise in `torch.inference_mode`, where torch 2.11 returns zeros."""
    if not torch.compiler.is_compiling() and torch.is_inference_mode_enabled():
        found = "expected a call outside of torch.inference_mode, where torch records no derivatives, found one inside"
        raise ValueError(f"{here()}: {found}. Use torch.no_grad() around it.")


def _by_func(f: Differentiated, inputs: list[Tensor], differentiable: bool) -> Vjp:
    # torch.func.vjp returns tensors only: the structure of `extra` and its other leaves leave by this list.
    aside: list[Any] = []
    inside: list[list[Tensor]] = []
    made: list[tuple[bool, torch.Size, torch.dtype]] = []
    sized = torch.compiler.is_compiling() and not all(x.is_cpu for x in inputs)

    def tensors_only(points: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        if torch.compiler.is_compiling():  # while it traces, the inputs themselves do not say that they require grad
            points = [x.view_as(x) for x in points]
        with SeparateNormAffine() if differentiable else nullcontext(), _Made(made) if sized else nullcontext():
            outputs, extra = f(points)
        leaves, structure = tree_flatten(extra)
        aside[:] = [structure, [None if isinstance(x, Tensor) else x for x in leaves]]
        inside[:] = [outputs, points]
        return outputs, [x for x in leaves if isinstance(x, Tensor)]

    outputs, pull, tensors = cast(tuple[Any, ...], torch.func.vjp(tensors_only, inputs, has_aux=True))
    structure, others = aside
    rest = iter(tensors)
    extra = structure.unflatten([next(rest) if x is None else x for x in others])

    def pullback(cotangent: Cotangent, among: slice = slice(None), last: bool = False) -> list[Tensor | None]:  # noqa: ARG001
        if among != slice(None) and torch.compiler.is_compiling():  # traces only what is asked for
            pairs = [(y, c) for y, c in zip(inside[0], cotangent, strict=True) if c is not None]
            given = [y for y, _ in pairs], inside[1][among], [c for _, c in pairs]
            return list(traced_grad(*given, retain_graph=True, create_graph=True))
        filled = [torch.zeros_like(y) if c is None else c for y, c in zip(outputs, cotangent, strict=True)]
        return to_dense(pull(filled)[0][among])

    return Vjp(outputs, extra, pullback, sizes=_sizes(made, inputs) if sized else None)


class _Made(TorchFunctionMode):
    """Notes which ops are convolutions, and the shapes of all results, which the gradients have too."""

    def __init__(self, made: list[tuple[bool, torch.Size, torch.dtype]]):
        super().__init__()
        self.made = made

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        func = traceable(func)
        found = func(*args, **(kwargs or {}))
        if isinstance(found, Tensor) and found.requires_grad:
            self.made.append((func in _CONVOLUTIONS, found.shape, found.dtype))
        return found


_CONVOLUTIONS = {
    getattr(torch.nn.functional, f"conv{form}{dims}d") for form in ("", "_transpose") for dims in (1, 2, 3)
}


def _sizes(made: list[tuple[bool, torch.Size, torch.dtype]], inputs: list[Tensor]) -> Sizes:
    between = largest_between([part for _, *part in made], inputs)
    return between, [words(x.shape, x.dtype) for x in inputs], any(convolution for convolution, *_ in made)


def _by_autograd(f: Differentiated, inputs: list[Tensor], plan: Plan, scalars: bool, ends: Sequence[Any]) -> Vjp:
    differentiable = plan.differentiable
    # Aliases, not the tensors themselves: the gradient stops here, wherever else the caller uses them.
    with torch.enable_grad():
        points = [x.view_as(x) if differentiable and x.requires_grad else x.detach().requires_grad_() for x in inputs]
        with SeparateNormAffine() if differentiable else nullcontext():
            outputs, extra = f(points)
    for x in points:  # the losses may have frozen one and left it so: what they computed before has a gradient
        if not x.requires_grad:
            x.requires_grad = True
    values: list[Tensor] = []
    sources: list[Any] = []
    for y in outputs:
        for value, source in scalars_of_stack(y) if scalars else ((y, y),):
            values.append(value)
            sources.append(source if source is not value or value.requires_grad else None)
    # Where the inputs are not differentiable, all points are leaves.
    leaves = [x for x in points if x.is_leaf] if differentiable else points
    targets = [*ends, *points]

    def pullback(
        cotangent: Cotangent,
        among: slice = slice(None),
        last: bool = False,
        _alive: Any = outputs,  # torch 2.11 does not keep the nodes of custom functions for edges
    ) -> list[Tensor | None]:
        # The cotangent itself may require grad, when nothing else does.
        outs, given, create_graph = [], [], differentiable
        for y, c in zip(sources, cotangent, strict=True):
            if c is not None and y is not None:
                outs.append(y)
                given.append(c)
                create_graph = create_graph or (c.requires_grad and torch.is_grad_enabled())
        wanted = targets[among]
        if not outs or not wanted:
            return [None] * len(wanted)
        found = gradients(outs, wanted, given, create_graph or not last, create_graph)
        for x in leaves:
            if x.grad is not None:
                raise ValueError(
                    f"{here()}: losses and their custom functions must leave .grad, found a call of Tensor.backward or "
                    "torch.autograd.backward. The gradients of its parameters would be lost. Take the result of "
                    "torch.autograd.grad, in a custom function with the parameters as inputs, or the form of a "
                    "reversible model that does not recompute."
                )
        return found

    return Vjp(values, extra if differentiable else detach_tree(extra), pullback, tuple(points))
