"""Adam with decoupled weight decay."""

from collections.abc import Iterable
from numbers import Real
from typing import Any, NamedTuple

import torch
from torch import Tensor

from functional_jd.core.float64 import widest
from functional_jd.core.record_display import displayed_as, outline
from functional_jd.core.rows import at_least_float32
from functional_jd.core.tree import Structure, any_sharded, floating_leaves, leaves_like, tree_map, tree_unflatten
from functional_jd.core.types import Direction, Params, Tree
from functional_jd.optimizers.base import (
    LearningRate,
    Optimizer,
    check_settings,
    copy_with_strides,
    current_rate,
    in_dtype_of,
    no_steps,
    on_shards,
    refuse_tensor,
)
from functional_jd.torch_compat.torch_internals import (
    clone_each,
    dispatch_modes,
    fused_adamw,
    fused_adamw_operator,
    fused_devices,
    under_functional_transform,
)

_TENSORS = ("lr", "eps", "weight_decay")
# From so many leaves on, a graph holds the kernel as one operator: compiling the formulas takes a third of a second for
# each leaf, but of 8 leaves they run 50 us faster. Of 68 leaves compiling a whole step took 223 s, and takes 159.
_MANY = 16


@displayed_as(outline)
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


def adamw(
    lr: LearningRate = 1e-3,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float | Tensor = 1e-8,
    weight_decay: float | Tensor = 1e-2,
) -> Optimizer:
    """Adam with decoupled weight decay, step by step what `torch.optim.AdamW` does.

    `m = b1 m + (1 - b1) d`, `v = b2 v + (1 - b2) d^2`, and with `k` steps taken, this one included,
    `params (1 - lr weight_decay) - lr m / (1 - b1^k) / (sqrt(v / (1 - b2^k)) + eps)`.

    Args:
        lr: a number, a tensor `[]`, or a schedule of the number of steps taken so far.
        betas: how much of the running averages of the direction and of its square stays: two numbers.
        eps: added to the root, in the unit of the direction; a number or a tensor `[]`.
        weight_decay: the share of params that goes in a step, in units of lr; a number or a tensor `[]`.

    Returns:
        An `Optimizer` with `AdamwState`; params and averages keep their dtypes.

    Raises:
        TypeError: a hyper-parameter that is no number.
        ValueError: a negative, infinite or NaN hyper-parameter, or a beta outside [0, 1).

    Laws:
        Pure; composes with vmap (also over lr), grad, jvp and compile; a step not taken leaves the schedule and the
        bias corrections where they were. The root of an average that is exactly zero has derivative zero, so that
        derivatives through steps are finite and right there: the first step from an average of zero is smooth.

    Source:
        Loshchilov and Hutter (2019), Decoupled weight decay regularization, algorithm 2, in PyTorch's form.

    Differs:
        From `torch.optim.AdamW`: float16 and bfloat16 params step in float32 and round once, as `fused=True` does.
        Without it, eps rounds to zero in float16, and an entry that never had a gradient becomes NaN.
        A parameter that no loss reaches in a batch has the direction 0, so that moments and weight decay move it on;
        there, where its `.grad` is None, it stays.
        Without derivatives, eager calls and those compiled for many leaves take that fused kernel; all others the
        formulas, equal up to rounding.

    Example:
        >>> warm_up = lambda steps: 1e-3 * torch.clamp((steps + 1) / 100, max=1.0)  # steps that were taken, int64
        >>> optimizer = adamw(lr=warm_up)
    """
    check_settings("adamw", tensors=_TENSORS, lr=lr, eps=eps, weight_decay=weight_decay)
    are_numbers = not (isinstance(eps, Tensor) or isinstance(weight_decay, Tensor))  # which the fused kernel reads
    b1, b2 = _pair(betas)
    for name, beta in (("betas[0]", b1), ("betas[1]", b2)):
        if not 0 <= beta < 1:
            raise ValueError(f"adamw: {name} must lie in [0, 1), found {beta}. Usual values are (0.9, 0.999).")

    def init(params: Params) -> AdamwState:
        steps = no_steps(params, "adamw")
        return AdamwState(steps, tree_map(torch.zeros_like, params), tree_map(torch.zeros_like, params))

    def step(
        moving: Tensor | None, direction: Direction, state: AdamwState, params: Params
    ) -> tuple[Params, AdamwState]:
        leaves, structure = floating_leaves(params, "adamw")
        if any_sharded(leaves):
            return on_shards(step, "adamw", moving, direction, state, params)
        directions, first, second = (
            leaves_like(structure, direction),
            leaves_like(structure, state.first),
            leaves_like(structure, state.second),
        )
        rate = current_rate(lr, state.steps)
        fits = state.steps.ndim == 0
        for p, d, m, v in zip(leaves, directions, first, second, strict=True):
            fits = fits and p.shape == d.shape == m.shape == v.shape
        if not fits:
            # The fused kernel would read and write beyond the end of the smaller one.
            raise ValueError(
                "adamw: expected a direction and averages of the shapes of the parameters, found others. Start the "
                "state anew with init(params)."
            )
        scalars = [state.steps, rate] if isinstance(rate, Tensor) else [state.steps]
        exact = rate.is_cpu or all(p.dtype.itemsize <= 4 for p in leaves) if isinstance(rate, Tensor) else True
        compiling = torch.compiler.is_compiling()
        fused = fused_adamw and are_numbers and (len(leaves) >= _MANY or not compiling)
        # The kernel of an accelerator takes a rate in float32.
        if exact and fused and _undisturbed([*leaves, *directions, *first, *second, *scalars]):
            columns = zip(leaves, directions, first, second, strict=True)
            settings = {"beta1": b1, "beta2": b2, "weight_decay": weight_decay, "eps": eps}
            if not (compiling or dispatch_modes()):
                return _fused(columns, structure, state.steps, rate, moving, settings)
            # What `make_fx` traces changes nothing in place, so that torch's `scan` takes it.
            if fused_adamw_operator and all(x.is_contiguous() for x in (*leaves, *first, *second)):
                return _one_operator(columns, structure, state.steps, rate, moving, settings)
        steps = state.steps + 1
        # In float64, since 1 - 0.999 loses four digits; on scalars this costs nothing.
        count = steps.to(widest(steps.device))
        step_size = rate / (1 - b1**count)
        correction = (1 - b2**count).sqrt()

        def moved(p: Tensor, d: Tensor, m: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            d = at_least_float32(d.to(p.dtype))
            m = torch.lerp(at_least_float32(m), d, 1 - b1)
            v = (at_least_float32(v) * b2).addcmul(d, d, value=1 - b2)
            decayed = at_least_float32(p) * in_dtype_of(1 - rate * weight_decay, m)
            return (
                decayed
                - in_dtype_of(step_size, m) * (m / (_root(v) / in_dtype_of(correction, v) + in_dtype_of(eps, v))),
                m,
                v,
            )

        old = zip(leaves, first, second, strict=True)
        rows = zip(map(moved, leaves, directions, first, second), old, strict=True)
        chosen = [[_kept(moving, x.to(old[0].dtype), y) for x, y in zip(new, old, strict=True)] for new, old in rows]
        params, first, second = (tree_unflatten(structure, list(column)) for column in zip(*chosen, strict=True))
        return params, AdamwState(_kept(moving, steps, state.steps), first, second)

    return Optimizer(init, lambda direction, state, params: step(None, direction, state, params), step)


def _grouped(columns: Iterable[tuple[Tensor, ...]]) -> dict[Any, list[tuple[Any, ...]]]:
    """The rows that one call of the fused kernel takes, each with its place."""
    groups: dict[Any, list[tuple[Any, ...]]] = {}
    for place, (leaf, *others) in enumerate(columns):
        groups.setdefault((leaf.device, leaf.dtype), []).append((place, leaf, *others))
    return groups


def _one_operator(
    columns: Iterable[tuple[Tensor, ...]], structure: Structure, steps: Tensor, rate: Any, moving: Any, settings: Any
) -> tuple[Params, AdamwState]:
    """`_fused` in a graph, where the compiler would write kernels for every leaf.

    The operator trusts that what belongs together lies alike in memory, and the compiler lays out as it likes: in one
    dimension there is one way only.
    """
    moved: dict[int, list[Tensor]] = {}
    for (device, dtype), members in _grouped(columns).items():
        flat = [[x.reshape(-1) for x in column] for column in list(zip(*members, strict=True))[1:]]
        flat[1] = [d.to(dtype) for d in flat[1]]
        count = [(steps + 1).to(device, torch.float32)] * len(members)
        lr = rate if not isinstance(rate, Tensor) or device.type == "cpu" else rate.to(device, torch.float32)
        how = {"lr": lr, "amsgrad": False, "maximize": False, **settings}
        how["found_inf"] = None if moving is None else (~moving).to(device, torch.float32)
        params, _, first, second, *_ = fused_adamw_operator(*flat, [], count, **how)
        for (place, leaf, *_), *new in zip(members, params, first, second, strict=True):
            moved[place] = [x.view(leaf.shape) for x in new]
    params, first, second = (
        tree_unflatten(structure, list(column)) for column in zip(*[moved[i] for i in range(len(moved))], strict=True)
    )
    return params, AdamwState(steps + (1 if moving is None else moving), first, second)


def _fused(
    columns: Iterable[tuple[Tensor, ...]], structure: Structure, steps: Tensor, rate: Any, moving: Any, settings: Any
) -> tuple[Params, AdamwState]:
    """The formulas of `adamw` in one kernel, in place on copies: a fifth of the time.

    The kernel that `torch.optim` calls too, with its flag for overflow, which keeps everything as it was.
    """
    moved: dict[int, tuple[Tensor, Tensor, Tensor]] = {}
    for (device, dtype), members in _grouped(columns).items():
        places, leaves, directions, first, second = zip(*members, strict=True)
        n = len(places)
        copies = clone_each([*leaves, *first, *second])
        given = list(directions)
        for index, d in enumerate(given):
            strides = copies[index].stride()
            d = d if d.dtype is dtype else d.to(dtype)
            given[index] = d if d.stride() == strides else copy_with_strides(d, copies[index])
            for average in (n + index, 2 * n + index):
                if copies[average].stride() != strides:
                    copies[average] = copy_with_strides(copies[average], copies[index])
        params, first, second = copies[:n], copies[n : 2 * n], copies[2 * n :]
        # Exact, whatever the default dtype is, and in one launch.
        taken = torch.add(steps, 1, out=steps.new_empty((), dtype=torch.float32))
        count = [taken.to(device)] * n
        lr = rate if not isinstance(rate, Tensor) or device.type == "cpu" else _rate_on(rate, device)
        kept = None if moving is None else torch.logical_not(moving, out=moving.new_empty((), dtype=torch.float32))
        kept = kept if kept is None else kept.to(device)
        how = {"lr": lr, "amsgrad": False, "maximize": False, "found_inf": kept}
        fused_adamw(params, given, first, second, [], count, **how, **settings)
        moved.update(zip(places, zip(params, first, second, strict=True), strict=True))
    params, first, second = map(list, zip(*[moved[place] for place in range(len(moved))], strict=True))
    state = AdamwState(
        steps + (1 if moving is None else moving), tree_unflatten(structure, first), tree_unflatten(structure, second)
    )
    return tree_unflatten(structure, params), state


def _rate_on(rate: Tensor, device: torch.device) -> Any:
    """The learning rate as the kernel of an accelerator takes it: a number, if no device has to be waited for."""
    return rate.item() if rate.is_cpu else rate.to(device, torch.float32)


def _undisturbed(values: list[Tensor]) -> bool:
    """Whether nothing but the values is asked for, on a device that has fused kernels."""
    if under_functional_transform():
        return False
    recorded = torch.is_grad_enabled()
    for x in values:  # noqa: SIM110, a generator is called anew for each
        if (recorded and x.requires_grad) or not (x.is_cpu or x.device.type in fused_devices()):
            return False
    return True


def _pair(betas: Any) -> tuple[float, float]:
    pair: Any = tuple(betas) if isinstance(betas, tuple | list) else ()
    for index, beta in enumerate(pair):
        if isinstance(beta, Tensor):
            refuse_tensor("adamw", f"betas[{index}]", beta, _TENSORS)
    if len(pair) != 2 or not all(isinstance(beta, Real) for beta in pair):
        raise TypeError(f"adamw: betas must be a pair of numbers, found {betas!r}. Usual values are (0.9, 0.999).")
    return pair


def _kept(moving: Tensor | None, new: Tensor, old: Tensor) -> Tensor:
    return new if moving is None else torch.where(moving, new, old)


def _root(square: Tensor) -> Tensor:
    """The square root, with derivative zero at zero instead of infinity: infinity times zero is NaN."""
    zero = square == 0
    return square.masked_fill(zero, 1).sqrt().masked_fill(zero, 0)
