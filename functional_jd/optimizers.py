"""Optimizers as pairs of pure functions: `sgd` and `adamw`."""

from collections.abc import Callable
from itertools import chain
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from functional_jd.rows import wide
from functional_jd.summary import outline, shown
from functional_jd.transforms import transformed
from functional_jd.tree import Structure, floating_leaves, leaves_like, tree_map, tree_unflatten
from functional_jd.types import Direction, Params, Tree

LearningRate: TypeAlias = float | Tensor | Callable[[Tensor], Any]
"""A number, a tensor `[]`, or a schedule `steps -> lr` of the number of steps taken so far, int64 `[]`."""


@shown(outline)
class Optimizer(NamedTuple):
    """Two pure functions; the hyper-parameters live in their closures.

    Attributes:
        init: `init(params) -> state`, a pytree of tensors whose structure never changes.
        update: `update(direction, state, params) -> (params, state)`: one step against the direction. It may know the
            keyword `moving=None`, bool `[]`, as that of `adamw` does: where that is false, it returns what it was
            given, whatever the direction. `step` leaves the choice to it: cheaper than to choose afterwards.
    """

    init: Callable[[Params], Tree]
    update: Callable[[Direction, Tree, Params], tuple[Params, Tree]]


@shown(outline)
class SgdState(NamedTuple):
    """What `sgd` remembers.

    Attributes:
        steps: int64 `[]`, the number of steps taken.
        velocity: pytree like params; `()` without momentum.
    """

    steps: Tensor
    velocity: Tree


@shown(outline)
class AdamwState(NamedTuple):
    """What `adamw` remembers.

    Attributes:
        steps: int64 `[]`, the number of steps taken.
        first: pytree like params, the running average of the direction.
        second: pytree like params, the running average of its square.
    """

    steps: Tensor
    first: Tree
    second: Tree


def sgd(lr: LearningRate, momentum: float = 0.0, nesterov: bool = False, weight_decay: float = 0.0) -> Optimizer:
    """Gradient descent with momentum, step by step what `torch.optim.SGD` does.

    `d = direction + weight_decay params`, `v = momentum v + d`, `params - lr v`; with Nesterov
    `params - lr (d + momentum v)`.

    Args:
        lr: a number, a tensor `[]`, or a schedule of the number of steps taken so far.
        momentum: how much of the last velocity stays.
        nesterov: look ahead along the velocity.
        weight_decay: weight of half the squared norm of params, added to the losses.

    Returns:
        An `Optimizer` with `SgdState`; params keep their dtypes.

    Raises:
        ValueError: a negative hyper-parameter, or `nesterov` without momentum.

    Laws:
        Pure; composes with vmap (also over lr), grad, jvp and compile; a step not taken leaves the schedule
        where it was.

    Source:
        Sutskever et al. (2013), On the importance of initialization and momentum in deep learning, in PyTorch's form.

    Differs:
        From `torch.optim.SGD`: no dampening (`from_torch` has it). A tensor lr is not rounded to the params' dtype.
    """
    _check("sgd", momentum=momentum, weight_decay=weight_decay, lr=lr)
    if nesterov and not momentum:
        raise ValueError("sgd: nesterov needs momentum > 0, found 0. Give a momentum such as 0.9, or no nesterov.")

    def init(params: Params) -> SgdState:
        return SgdState(_no_steps(params, "sgd"), tree_map(torch.zeros_like, params) if momentum else ())

    def update(direction: Direction, state: SgdState, params: Params) -> tuple[Params, SgdState]:
        rate, velocity, direction = _rate(lr, state.steps), state.velocity, rounded(direction, params)
        if weight_decay:
            direction = tree_map(lambda d, p: d.add(p, alpha=weight_decay), direction, params)
        if momentum:
            velocity = tree_map(lambda v, d: (v * momentum).add(d), velocity, direction)
            direction = tree_map(lambda d, v: d.add(v, alpha=momentum), direction, velocity) if nesterov else velocity
        return tree_map(lambda p, d: _against(p, d, rate), params, direction), SgdState(state.steps + 1, velocity)

    return Optimizer(init, update)


def adamw(
    lr: LearningRate = 1e-3,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 1e-2,
) -> Optimizer:
    """Adam with decoupled weight decay, step by step what `torch.optim.AdamW` does.

    `m = b1 m + (1 - b1) d`, `v = b2 v + (1 - b2) d^2`, and with `k` steps taken, this one included,
    `params (1 - lr weight_decay) - lr m / (1 - b1^k) / (sqrt(v / (1 - b2^k)) + eps)`.

    Args:
        lr: a number, a tensor `[]`, or a schedule of the number of steps taken so far.
        betas: how much of the running averages of the direction and of its square stays.
        eps: added to the root, in the unit of the direction.
        weight_decay: the share of params that goes in a step, in units of lr.

    Returns:
        An `Optimizer` with `AdamwState`; params and averages keep their dtypes.

    Raises:
        ValueError: a negative hyper-parameter, or a beta outside [0, 1).

    Laws:
        Pure; composes with vmap (also over lr), grad, jvp and compile; a step not taken leaves the schedule and the
        bias corrections where they were. The root of an average that is exactly zero has derivative zero, so that
        derivatives through steps are finite and right there: the first step from an average of zero is smooth.

    Source:
        Loshchilov and Hutter (2019), Decoupled weight decay regularization, algorithm 2, in PyTorch's form.

    Differs:
        From `torch.optim.AdamW`: float16 and bfloat16 params step in float32 and round once, as `fused=True` does.
        Without it, eps rounds to zero in float16, and an entry that never had a gradient becomes NaN.
        Eager calls without derivatives take that fused kernel; all others the formulas, equal up to rounding.
    """
    b1, b2 = betas
    _check("adamw", eps=eps, weight_decay=weight_decay, lr=lr)
    for name, beta in (("betas[0]", b1), ("betas[1]", b2)):
        if not 0 <= beta < 1:
            raise ValueError(f"adamw: {name} must lie in [0, 1), found {beta}. Usual values are (0.9, 0.999).")

    def init(params: Params) -> AdamwState:
        steps = _no_steps(params, "adamw")
        return AdamwState(steps, tree_map(torch.zeros_like, params), tree_map(torch.zeros_like, params))

    def update(
        direction: Direction, state: AdamwState, params: Params, *, moving: Tensor | None = None
    ) -> tuple[Params, AdamwState]:
        rate = _rate(lr, state.steps)
        leaves, structure = floating_leaves(params, "adamw")
        columns = [leaves, *(leaves_like(structure, tree) for tree in (direction, state.first, state.second))]
        if _undisturbed([*chain(*columns), state.steps, rate]):
            settings = {"beta1": b1, "beta2": b2, "weight_decay": weight_decay, "eps": eps}
            return _fused(columns, structure, state.steps, rate, moving, settings)
        steps = state.steps + 1
        # In float64, since 1 - 0.999 loses four digits; on scalars this costs nothing.
        step_size = rate / (1 - b1 ** steps.double())
        correction = (1 - b2 ** steps.double()).sqrt()

        def moved(p: Tensor, d: Tensor, m: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            d = wide(d.to(p.dtype))
            m = torch.lerp(wide(m), d, 1 - b1)
            v = (wide(v) * b2).addcmul(d, d, value=1 - b2)
            decayed = wide(p) * _like(1 - rate * weight_decay, m)
            return decayed - _like(step_size, m) * (m / (_root(v) / _like(correction, v) + eps)), m, v

        rows = [(moved(p, *rest), (p, *rest[1:])) for p, *rest in zip(*columns, strict=True)]
        chosen = [[_kept(moving, x.to(old[0].dtype), y) for x, y in zip(new, old, strict=True)] for new, old in rows]
        params, first, second = (tree_unflatten(structure, list(column)) for column in zip(*chosen, strict=True))
        return params, AdamwState(_kept(moving, steps, state.steps), first, second)

    return Optimizer(init, update)


def _fused(
    columns: list[list[Tensor]], structure: Structure, steps: Tensor, rate: Any, moving: Tensor | None, settings: Any
) -> tuple[Params, AdamwState]:
    """The formulas of `adamw` in one kernel, in place on copies: a fifth of the time.

    The kernel that `torch.optim` calls too, with its flag for overflow, which keeps everything as it was.
    """
    leaves, direction, *averages = columns
    params = [p.clone() for p in leaves]
    direction = [_beside(d.to(p.dtype), p) for d, p in zip(direction, params, strict=True)]
    first, second = ([copied(x, p) for x, p in zip(average, params, strict=True)] for average in averages)
    groups: dict[Any, list[int]] = {}
    for index, p in enumerate(params):
        groups.setdefault((p.device, p.dtype), []).append(index)
    taken = steps + 1
    for (device, _), members in groups.items():
        parts = [[column[i] for i in members] for column in (params, direction, first, second)]
        count = taken.to(device, torch.float32)
        lr = rate.to(device, torch.float32) if isinstance(rate, Tensor) and rate.is_cuda else rate
        kept = None if moving is None else (~moving).to(device, torch.float32)
        with torch.no_grad():
            kernel: Any = torch._fused_adamw_  # pyright: ignore[reportPrivateUsage]
            kernel(*parts, [], [count] * len(members), lr=lr, amsgrad=False, maximize=False, found_inf=kept, **settings)
    state = AdamwState(
        taken if moving is None else steps + moving, tree_unflatten(structure, first), tree_unflatten(structure, second)
    )
    return tree_unflatten(structure, params), state


def _check(where: str, **values: Any) -> None:
    for name, value in values.items():
        if isinstance(value, int | float) and not value >= 0:
            raise ValueError(
                f"{where}: {name} must be a number >= 0, found {value}. A step goes against the direction."
            )


def _no_steps(params: Params, where: str) -> Tensor:
    leaves, _ = floating_leaves(params, where)
    return torch.zeros((), dtype=torch.int64, device=leaves[0].device)


def _rate(lr: LearningRate, steps: Tensor) -> Any:
    """A number, or float64: with a float32 rate, `1 - lr weight_decay` would round float64 params."""
    rate = lr(steps) if callable(lr) else lr
    return rate.double() if isinstance(rate, Tensor) else rate


def _undisturbed(values: list[Any]) -> bool:
    """Whether nothing but the values is asked for, on a device that has fused kernels."""
    if transformed():
        return False
    leaves = [x for x in values if isinstance(x, Tensor)]
    recorded = torch.is_grad_enabled() and any(x.requires_grad for x in leaves)
    return not recorded and all(x.is_cpu or x.is_cuda for x in leaves)


def _like(factor: Any, leaf: Tensor) -> Any:
    """A factor that does not promote the leaf, not even a leaf `[]`."""
    return factor.to(leaf.device, leaf.dtype) if isinstance(factor, Tensor) else factor


def rounded(direction: Direction, params: Params) -> Direction:
    """The direction in the dtypes of params, so that they and the state keep theirs."""
    return tree_map(lambda p, d: d.to(p.dtype), params, direction)


def copied(leaf: Tensor, like: Tensor) -> Tensor:
    """A copy that lies in memory as `like` does, where the shapes agree: fused kernels trust in that."""
    if leaf.shape != like.shape or leaf.stride() == like.stride():
        return leaf.clone()
    return torch.empty_like(like, dtype=leaf.dtype, device=leaf.device).copy_(leaf)


def _beside(leaf: Tensor, like: Tensor) -> Tensor:
    return leaf if leaf.stride() == like.stride() else copied(leaf, like)


def _against(leaf: Tensor, direction: Tensor, rate: Any) -> Tensor:
    if not isinstance(rate, Tensor):
        return leaf.add(direction, alpha=-rate)
    start = wide(leaf)
    return (start - _like(rate, start) * wide(direction)).to(leaf.dtype)


def _kept(moving: Tensor | None, new: Tensor, old: Tensor) -> Tensor:
    return new if moving is None else torch.where(moving, new, old)


def _root(square: Tensor) -> Tensor:
    """The square root, with derivative zero at zero instead of infinity: infinity times zero is NaN."""
    zero = square == 0
    return square.masked_fill(zero, 1).sqrt().masked_fill(zero, 0)
