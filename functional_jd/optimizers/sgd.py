"""Stochastic gradient descent with momentum."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from functional_jd.core.arguments import check_flag
from functional_jd.core.record_display import displayed_as, outline
from functional_jd.core.rows import at_least_float32
from functional_jd.core.tree import any_sharded, tree_leaves, tree_map
from functional_jd.core.types import Direction, Params, Tree
from functional_jd.optimizers.base import (
    LearningRate,
    Optimizer,
    check_settings,
    current_rate,
    in_dtype_of,
    in_dtypes_of,
    no_steps,
    on_shards,
)


@displayed_as(outline)
class SgdState(NamedTuple):
    """The state of `sgd`.

    Attributes:
        steps: int64 `[]`, the number of steps taken.
        velocity: pytree like params; `()` without momentum.
    """

    steps: Tensor
    velocity: Tree


def sgd(lr: LearningRate, momentum: float = 0.0, nesterov: bool = False, weight_decay: float = 0.0) -> Optimizer:
    """Gradient descent with momentum; every step equals that of `torch.optim.SGD`.

    `d = direction + weight_decay params`, `v = momentum v + d`, `params - lr v`; with Nesterov
    `params - lr (d + momentum v)`.

    Args:
        lr: a number, a tensor `[]`, or a schedule of the number of steps taken so far.
        momentum: the factor m of the velocity.
        nesterov: whether to use Nesterov momentum.
        weight_decay: the factor of the L2 penalty, half the squared norm of params.

    Returns:
        An `Optimizer` with `SgdState`.

    Source:
        Sutskever et al. (2013), On the importance of initialization and momentum in deep learning, in PyTorch's form.

    Differences:
        From `torch.optim.SGD`: no dampening (`from_torch` has it). A tensor lr is not rounded to the dtype of params.
        Momentum and weight decay move a parameter that no loss reaches in a batch, as its direction is 0, not None.
    """
    check_settings(momentum=momentum, weight_decay=weight_decay, lr=lr)
    check_flag("nesterov", nesterov)
    if nesterov and not momentum:
        raise ValueError("sgd: nesterov needs momentum > 0, found 0. Pass a momentum such as 0.9, or nesterov=False.")

    def init(params: Params) -> SgdState:
        return SgdState(no_steps(params), tree_map(torch.zeros_like, params) if momentum else ())

    def update(direction: Direction, state: SgdState, params: Params) -> tuple[Params, SgdState]:
        if any_sharded(tree_leaves(params)):
            return on_shards(update, direction, state, params)
        rate, velocity, direction = current_rate(lr, state.steps), state.velocity, in_dtypes_of(direction, params)
        if weight_decay:
            direction = tree_map(lambda d, p: d.add(p, alpha=weight_decay), direction, params)
        if momentum:
            velocity = tree_map(lambda v, d: (v * momentum).add(d), velocity, direction)
            direction = tree_map(lambda d, v: d.add(v, alpha=momentum), direction, velocity) if nesterov else velocity
        moved = tree_map(lambda p, d: _descended(p, d, rate), params, direction)
        return moved, SgdState(state.steps + 1, velocity if momentum else ())

    return Optimizer(init, update)


def _descended(leaf: Tensor, direction: Tensor, rate: Any) -> Tensor:
    """`leaf - rate direction`, in the dtype of the leaf."""
    if not isinstance(rate, Tensor):
        return leaf.add(direction, alpha=-rate)
    wide = at_least_float32(leaf)
    return (wide - in_dtype_of(rate, wide) * at_least_float32(direction)).to(leaf.dtype)
