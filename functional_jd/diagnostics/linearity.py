"""Whether backward passes are linear, as weights and loss scales need it."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from functional_jd.aggregation.views import loss_vector
from functional_jd.core.arguments import check_flag
from functional_jd.core.tree import tree_leaves, tree_map
from functional_jd.core.types import Params


def linear_backward(
    losses: Callable[..., Any], params: Params, *batch: Any, factor: float = 2.0, has_aux: bool = False
) -> Tensor:
    """Find the losses whose gradient is not linear in the factor of the loss.

    A custom backward pass that normalises, clips or rounds its gradient is not: weights and loss scales get lost in it.
    The losses are evaluated once, and differentiated twice each, outside of transforms.

    Args:
        losses: `losses(params, *batch)`, as for `jacobian_fn`.
        params: where to look.
        batch: the batch, and buffers before it if the losses take some.
        factor: what a loss is multiplied by. Pass the loss scale to find a backward pass that clips.
        has_aux: whether the losses return `(losses, aux)`.

    Returns:
        bool `[m]`, in the order of `objective_names(losses)`: whether the gradient of `factor * loss_i` is `factor`
        times that of `loss_i`, up to half of the digits.

    Example:
        >>> diagnostics.linear_backward(lambda p: {"a": p.square().sum(), "b": p.exp().sum()}, torch.ones(2))
        tensor([True, True])
    """
    check_flag("has_aux", has_aux)
    starts = tree_map(lambda p: p.detach().requires_grad_(), params)
    leaves: list[Tensor] = tree_leaves(starts)
    with torch.enable_grad():
        found = losses(starts, *batch)
        values = loss_vector(found[0] if has_aux else found)

    def gradients(value: Tensor, cotangent: float) -> list[Tensor]:
        given = torch.full_like(value, cotangent)
        return [*torch.autograd.grad(value, leaves, given, retain_graph=True, materialize_grads=True)]

    def apart(one: Tensor, many: Tensor) -> Tensor:
        bound = torch.finfo(one.dtype).eps ** 0.5 * many.abs().max()
        return ((many - factor * one).abs() <= bound).all() | ~many.isfinite().all()

    close = [[apart(*pair) for pair in zip(gradients(v, 1.0), gradients(v, factor), strict=True)] for v in values]
    return torch.stack([torch.stack([x.to(values.device) for x in own]).all() for own in close])
