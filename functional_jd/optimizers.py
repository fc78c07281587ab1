"""Optimizers as pairs of pure functions: `sgd`, `adamw`, and adapters for `torch.optim` and optax-style libraries."""

import inspect
from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch.optim.adamw import adamw as torch_adamw

from functional_jd.transforms import transformed, within_functorch
from functional_jd.tree import floating_leaves, tree_leaves, tree_map, tree_unflatten
from functional_jd.types import Direction, Params, Tree

LearningRate: TypeAlias = float | Tensor | Callable[[Tensor], Any]
"""A number, a tensor `[]`, or a schedule `steps -> lr` of the number of steps taken so far, int64 `[]`."""


class Optimizer(NamedTuple):
    """Two pure functions; the hyper-parameters live in their closures.

    Attributes:
        init: `init(params) -> state`, a pytree of tensors whose structure never changes.
        update: `update(direction, state, params) -> (params, state)`: one step against the direction.
    """

    init: Callable[[Params], Tree]
    update: Callable[[Direction, Tree, Params], tuple[Params, Tree]]


class SgdState(NamedTuple):
    """What `sgd` remembers.

    Attributes:
        steps: int64 `[]`, the number of steps taken.
        velocity: pytree like params; `()` without momentum.
    """

    steps: Tensor
    velocity: Tree


class TorchState(NamedTuple):
    """What `from_torch` remembers.

    Attributes:
        started: bool `[]`, whether a step was taken.
        entries: one dict of tensors per leaf of params, as `torch.optim.Optimizer.state` holds it.
    """

    started: Tensor
    entries: Tree


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
        rate, velocity, direction = _rate(lr, state.steps), state.velocity, _rounded(direction, params)
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

    def update(direction: Direction, state: AdamwState, params: Params) -> tuple[Params, AdamwState]:
        rate = _rate(lr, state.steps)
        if _undisturbed(rate, direction, state, params):
            return _fused(direction, state, params, rate, betas, eps, weight_decay)
        direction, steps = _rounded(direction, params), state.steps + 1
        # In float64, since 1 - 0.999 loses four digits; on scalars this costs nothing.
        step_size = rate / (1 - b1 ** steps.double())
        correction = (1 - b2 ** steps.double()).sqrt()
        first = tree_map(lambda m, d: torch.lerp(_wide(m), _wide(d), 1 - b1), state.first, direction)
        second = tree_map(
            lambda v, d: (_wide(v) * b2).addcmul(_wide(d), _wide(d), value=1 - b2), state.second, direction
        )

        def moved(p: Tensor, m: Tensor, v: Tensor) -> Tensor:
            decayed = _wide(p) * _like(1 - rate * weight_decay, m)
            return (decayed - _like(step_size, m) * (m / (_root(v) / _like(correction, v) + eps))).to(p.dtype)

        def narrow(tree: Tree) -> Tree:
            return tree_map(lambda p, x: x.to(p.dtype), params, tree)

        return tree_map(moved, params, first, second), AdamwState(steps, narrow(first), narrow(second))

    return Optimizer(init, update)


def _fused(
    direction: Direction, state: AdamwState, params: Params, rate: Any, betas: Any, eps: float, weight_decay: float
) -> tuple[Params, AdamwState]:
    """The formulas of `adamw` in one kernel, in place on copies: a fifth of the time."""
    params = tree_map(torch.clone, params)
    direction = _rounded(direction, params)
    direction = tree_map(lambda d, p: d if d.stride() == p.stride() else _copied(d, p), direction, params)
    first, second = (tree_map(_copied, tree, params) for tree in (state.first, state.second))
    ps, ds, ms, vs = (tree_leaves(tree) for tree in (params, direction, first, second))
    steps = [state.steps.to(p.device, torch.float32) for p in ps]
    rate = rate.float() if isinstance(rate, Tensor) and rate.is_cuda else rate  # what the kernel there reads
    rest: Any = {"beta1": betas[0], "beta2": betas[1], "lr": rate, "weight_decay": weight_decay, "eps": eps}
    with torch.no_grad():
        torch_adamw(ps, ds, ms, vs, [], steps, fused=True, amsgrad=False, maximize=False, **rest)
    return params, AdamwState(state.steps + 1, first, second)


def from_torch(cls: type[torch.optim.Optimizer], **hyper: Any) -> Optimizer:
    """Any class of `torch.optim` as a pair of pure functions, step by step what the class does.

    Torch makes the state in the first step, which may differ from all others (momentum with dampening). So that the
    structure never changes and nothing is read back from the device, `update` takes both a first and a later step on
    copies and picks one by `where`: it costs two steps of the class. `sgd` and `adamw` cost one.

    Args:
        cls: a class such as `torch.optim.Adam`; all its tensors that change must be in its `state`.
        hyper: its keyword arguments, for all leaves alike. On an accelerator, `capturable=True` keeps the step count
            there, for the classes that know the word.

    Returns:
        An `Optimizer` with `TorchState`. What it returns does not require grad.

    Raises:
        TypeError: the class needs a closure (LBFGS), or it keeps something other than tensors, or changes its groups.
        ValueError: called under a `torch.func` transform.

    Laws:
        Pure. Refuses vmap, grad and jvp, since `torch.optim` works in place; compiles with a graph break.

    Example:
        >>> optimizer = from_torch(torch.optim.Adam, lr=1e-3)
    """
    name = cls.__name__
    closure = inspect.signature(cls.step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise TypeError(
            f"from_torch: expected a class that steps along a given direction, found {name}, which evaluates the "
            "losses in its step. Take one without a closure, such as torch.optim.Adam."
        )

    def init(params: Params) -> TorchState:
        leaves, _ = floating_leaves(params, "from_torch")
        optimizer = _loaded(cls, hyper, leaves, [torch.zeros_like(leaf) for leaf in leaves], [{} for _ in leaves])
        before = [_settings(group) for group in optimizer.param_groups]
        optimizer.step()
        entries = _entries(optimizer)
        strangers = {key for entry in entries for key, value in entry.items() if not isinstance(value, Tensor)}
        if before != [_settings(group) for group in optimizer.param_groups]:
            strangers.add("param_groups")
        if strangers or len(optimizer.state) > len(leaves):
            raise TypeError(
                f"from_torch: all that {name} remembers must be tensors in its state, one dict per parameter, found "
                f"other things in {sorted(strangers) or 'its state'}. Take another class, or write init and update."
            )
        return TorchState(torch.zeros((), dtype=torch.bool, device=leaves[0].device), tuple(entries))

    def update(direction: Direction, state: TorchState, params: Params) -> tuple[Params, TorchState]:
        leaves, structure = floating_leaves(params, "from_torch")
        towards = tree_leaves(_rounded(direction, params))
        outcomes: list[Any] = []
        for entries in ([{} for _ in leaves], state.entries):
            optimizer = _loaded(cls, hyper, leaves, towards, entries)
            optimizer.step()
            outcomes.append((optimizer.param_groups[0]["params"], tuple(_entries(optimizer))))

        def pick(first: Tensor, later: Tensor) -> Tensor:
            return torch.where(state.started.to(later.device), later, first)

        moved, entries = tree_map(pick, *outcomes)
        return tree_unflatten(structure, moved), TorchState(torch.ones_like(state.started), entries)

    eager: Any = torch.compiler.disable(update, reason="torch.optim makes its state while it runs")
    return Optimizer(init, eager)


def from_transformation(transformation: Any) -> Optimizer:
    """Any optax-style pair of pure functions, such as TorchOpt's, as an `Optimizer`.

    `updates, state = transformation.update(direction, state, params=params)`, `params + updates`.

    Args:
        transformation: has `init(params) -> state` and `update(updates, state, params) -> (updates, state)`; where
            `update` knows the word `inplace`, it is False. An update that is `None` leaves its parameter.

    Returns:
        An `Optimizer` with the state of the transformation.

    Raises:
        TypeError: there is no `init` or no `update`.

    Laws:
        Pure, and composes with vmap, grad, jvp and compile, as far as the transformation does.

    Example:
        >>> optimizer = from_transformation(torchopt.adam(lr=1e-3))
    """
    if not (callable(getattr(transformation, "init", None)) and callable(getattr(transformation, "update", None))):
        raise TypeError(
            "from_transformation: expected an object with functions init and update, found "
            f"{type(transformation).__name__}. Classes of torch.optim go into from_torch."
        )
    keywords = inspect.signature(transformation.update).parameters
    options = {"inplace": False} if "inplace" in keywords else {}

    def update(direction: Direction, state: Tree, params: Params) -> tuple[Params, Tree]:
        updates, state = transformation.update(direction, state, params=params, **options)
        return tree_map(lambda p, u: p if u is None else (p + u).to(p.dtype), params, updates), state

    return Optimizer(transformation.init, update)


def _loaded(cls: Any, hyper: dict[str, Any], params: list[Tensor], direction: list[Tensor], entries: Any) -> Any:
    """An instance of the class that holds copies of everything."""
    if within_functorch():
        raise ValueError(
            "from_torch: expected no transform, since torch.optim works in place, found one of torch.func (vmap, grad, "
            "jvp, ...). Take sgd, adamw or from_transformation, which compose with all of them."
        )
    copies = [leaf.detach().clone() for leaf in params]
    optimizer = cls(copies, **hyper)
    for copy, towards, entry in zip(copies, direction, entries, strict=True):
        copy.grad = _copied(towards.detach(), copy)
        optimizer.state[copy] = {key: _copied(value.detach(), copy) for key, value in entry.items()}
    return optimizer


def _entries(optimizer: Any) -> list[dict[str, Any]]:
    return [dict(optimizer.state[leaf]) for leaf in optimizer.param_groups[0]["params"]]


def _settings(group: dict[str, Any]) -> dict[str, Any]:
    return {key: repr(value) for key, value in group.items() if key != "params"}


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


def _undisturbed(*trees: Tree) -> bool:
    """Whether nothing but the values is asked for, on a device that has fused kernels."""
    if transformed():
        return False
    leaves: list[Any] = [leaf for leaf in tree_leaves(trees) if not isinstance(leaf, float | int)]
    return all(leaf.device.type in ("cpu", "cuda") for leaf in leaves) and not (
        torch.is_grad_enabled() and any(leaf.requires_grad for leaf in leaves)
    )


def _like(factor: Any, leaf: Tensor) -> Any:
    """A factor that does not promote the leaf, not even a leaf `[]`."""
    return factor.to(leaf.device, leaf.dtype) if isinstance(factor, Tensor) else factor


def _rounded(direction: Direction, params: Params) -> Direction:
    """The direction in the dtypes of params, so that they and the state keep theirs."""
    return tree_map(lambda p, d: d.to(p.dtype), params, direction)


def _copied(leaf: Tensor, like: Tensor) -> Tensor:
    """A copy that lies in memory as `like` does, where the shapes agree: fused kernels trust in that."""
    if leaf.shape != like.shape:
        return leaf.clone()
    return torch.empty_like(like, dtype=leaf.dtype, device=leaf.device).copy_(leaf)


def _wide(leaf: Tensor) -> Tensor:
    return leaf.to(torch.promote_types(leaf.dtype, torch.float32))


def _against(leaf: Tensor, direction: Tensor, rate: Any) -> Tensor:
    if not isinstance(rate, Tensor):
        return leaf.add(direction, alpha=-rate)
    wide = _wide(leaf)
    return (wide - _like(rate, wide) * _wide(direction)).to(leaf.dtype)


def _root(square: Tensor) -> Tensor:
    """The square root, with derivative zero at zero instead of infinity: infinity times zero is NaN."""
    zero = square == 0
    return square.masked_fill(zero, 1).sqrt().masked_fill(zero, 0)
