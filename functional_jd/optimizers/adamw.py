"""Adam with decoupled weight decay."""

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from functional_jd.core.arguments import refuse
from functional_jd.core.float64 import widest
from functional_jd.core.foreach import clone_each
from functional_jd.core.record_display import displayed_as, outline
from functional_jd.core.rows import at_least_float32
from functional_jd.core.tree import any_sharded, floating_leaves, tree_map, tree_names
from functional_jd.core.types import Direction, Params, Tree
from functional_jd.optimizers.base import (
    LearningRate,
    Optimizer,
    check_betas,
    check_settings,
    copy_with_strides,
    current_rate,
    in_dtype_of,
    no_steps,
    on_shards,
)
from functional_jd.torch_compat.torch_internals import NO_TRANSFORM, dispatch_modes, private, transform_level

fused_adamw: Any = private("_fused_adamw_", "adamw", otherwise=False)
"""The in-place kernel behind `torch.optim.AdamW(fused=True)`. Without it, the formulas serve."""

_TENSORS = ("lr", "eps", "weight_decay")
# From this number of leaves on, what is compiled holds the kernel as one operator: compiling the formulas takes a third
# of a second for each leaf, but the formulas of 8 leaves run 50 us faster. A step of 68 leaves takes 159 s, not 223.
_MANY = 16
# The types of devices without the kernel: not the CPU, and not torch's accelerators.
_WITHOUT_KERNEL = {"meta", "xla", "lazy", "ipu", "maia", "ve", "vulkan"}


@displayed_as(outline)
class AdamwState(NamedTuple):
    """The state of `adamw`.

    Attributes:
        steps: int64 `[]`, the number of steps taken.
        first: pytree like params, the running average of the direction; float32 for float16.
        second: pytree like params, the running average of its square; float32 for float16.
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
        An `Optimizer` with `AdamwState`. The first step from an average of zero has finite and right derivatives.

    Source:
        Loshchilov and Hutter (2019), Decoupled weight decay regularization, algorithm 2, in PyTorch's form.

    Differences:
        From `torch.optim.AdamW`: float16 and bfloat16 params step in float32 and round once, as `fused=True` does.
        Moments and weight decay move a parameter that no loss reaches in a batch, as its direction is 0, not None.
        Without derivatives, eager calls and those compiled for many leaves take torch's fused kernel; all others the
        formulas, equal up to rounding.

    Example:
        >>> warm_up = lambda steps: 1e-3 * torch.clamp((steps + 1) / 100, max=1.0)  # steps that were taken, int64
        >>> optimizer = adamw(lr=warm_up)
    """
    check_settings(tensors=_TENSORS, lr=lr, eps=eps, weight_decay=weight_decay)
    are_numbers = not (isinstance(eps, Tensor) or isinstance(weight_decay, Tensor))  # which the fused kernel reads
    b1, b2 = check_betas(betas)

    def init(params: Params) -> AdamwState:
        zeros = lambda p: torch.zeros_like(p, dtype=torch.float32 if p.dtype == torch.float16 else None)
        return AdamwState(no_steps(params), tree_map(zeros, params), tree_map(zeros, params))

    def step(
        moving: Tensor | None, direction: Direction, state: AdamwState, params: Params
    ) -> tuple[Params, AdamwState]:
        leaves, structure = floating_leaves(params)
        if any_sharded(leaves):
            return on_shards(step, moving, direction, state, params)
        directions, first, second = map(structure.flatten_up_to, (direction, state.first, state.second))
        rate = current_rate(lr, state.steps)
        fits, alike = state.steps.ndim == 0, True
        for k, (p, d, m, v) in enumerate(zip(leaves, directions, first, second, strict=True)):
            fits = fits and p.shape == d.shape == m.shape == v.shape
            alike = alike and p.dtype == v.dtype
            if v.dtype == torch.float16:
                cure = "Squares below 6e-8 vanish: start again with init(params)."
                refuse(f"the average of {tree_names(params)[k]!r}", "in float32", v, cure, ValueError)
        if not fits:
            # The fused kernel would read and write beyond the end of the smaller one.
            raise ValueError(
                "adamw: direction and averages must have the shapes of the parameters, found others. Start again with "
                "init(params)."
            )
        scalars = [state.steps, rate] if isinstance(rate, Tensor) else [state.steps]
        exact = rate.is_cpu or all(p.dtype.itemsize <= 4 for p in leaves) if isinstance(rate, Tensor) else True
        fused = fused_adamw and are_numbers and (len(leaves) >= _MANY or not torch.compiler.is_compiling())
        # The kernel of an accelerator takes a rate in float32.
        if exact and fused and alike and _undisturbed([*leaves, *directions, *first, *second, *scalars]):
            new = _fused((leaves, directions, first, second), state.steps, moving, rate, (b1, b2, weight_decay, eps))
            params, first, second = [structure.unflatten(list(column)) for column in new]
            return params, AdamwState(state.steps + (1 if moving is None else moving), first, second)
        steps = state.steps + 1
        # In float64, since 1 - 0.999 loses four digits; on scalars this costs nothing.
        count = steps.to(widest(steps.device))
        step_size, correction = rate / (1 - b1**count), (1 - b2**count).sqrt()
        decay = weight_decay.to(widest(weight_decay.device)) if isinstance(weight_decay, Tensor) else weight_decay

        def moved(p: Tensor, d: Tensor, m: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            d = at_least_float32(d.to(p.dtype))
            m = torch.lerp(at_least_float32(m), d, 1 - b1)
            v = (at_least_float32(v) * b2).addcmul(d, d, value=1 - b2)
            decayed = at_least_float32(p) * in_dtype_of(1 - rate * decay, m)
            root = _root(v) / in_dtype_of(correction, v) + in_dtype_of(eps, v)
            return decayed - in_dtype_of(step_size, m) * (m / root), m, v

        old = zip(leaves, first, second, strict=True)
        rows = zip(map(moved, leaves, directions, first, second), old, strict=True)
        chosen = [[_kept(moving, x.to(y.dtype), y) for x, y in zip(new, old, strict=True)] for new, old in rows]
        params, first, second = (structure.unflatten(list(column)) for column in zip(*chosen, strict=True))
        return params, AdamwState(_kept(moving, steps, state.steps), first, second)

    return Optimizer(init, lambda direction, state, params: step(None, direction, state, params), step)


def _fused(
    columns: Sequence[list[Tensor]], steps: Tensor, moving: Tensor | None, rate: Any, settings: Any
) -> Iterable[Sequence[Tensor]]:
    """The formulas of `adamw` in one kernel for the leaves of each device and dtype: a fifth of the time."""
    groups: dict[Any, list[int]] = {}
    for place, leaf in enumerate(columns[0]):
        groups.setdefault((leaf.device, leaf.dtype), []).append(place)
    in_graph = torch.compiler.is_compiling() or bool(dispatch_modes())
    kernel: Any = fused_adamw_op if in_graph else _moved
    moved: list[Any] = [()] * len(columns[0])
    for (device, _), places in groups.items():
        lr = rate
        if isinstance(rate, Tensor) and device.type != "cpu":  # a number, if no device has to be waited for
            lr = rate.item() if rate.is_cpu and not in_graph else rate.to(device, torch.float32)
        group: list[list[Tensor]] = []
        for column in columns:
            group.append(list(map(column.__getitem__, places)))
        new = kernel(*group, steps, moving, *((0.0, lr) if isinstance(lr, Tensor) else (lr, None)), *settings)
        for k, place in enumerate(places):
            moved[place] = new[k :: len(places)]
    return zip(*moved, strict=True)


def _moved(
    leaves: list[Tensor], directions: list[Tensor], first: list[Tensor], second: list[Tensor], *numbers: Any
) -> list[Tensor]:
    """The next leaves, first and second averages, in one list: the kernel in place on copies.

    Torch's public function around it, `torch.optim.adamw.adamw`, takes 1.3 to 2 times as long for 4 to 60 leaves.
    """
    n, old = len(leaves), [*leaves, *first, *second]
    moved = list(map(torch.clone, old)) if leaves[0].is_cpu else clone_each(old)
    for index in range(n, 3 * n):  # the kernel trusts that what belongs to a leaf lies in memory as the leaf does
        if moved[index].stride() != moved[index % n].stride():
            moved[index] = copy_with_strides(moved[index], moved[index % n])
    _move(moved[:n], directions, moved[n : 2 * n], moved[2 * n :], *numbers)
    return moved


def _move(
    leaves: list[Tensor], directions: list[Tensor], first: list[Tensor], second: list[Tensor], *numbers: Any
) -> None:
    """The kernel, which moves leaves and averages where they are."""
    steps, moving, lr, rate, beta1, beta2, weight_decay, eps = numbers
    device, given = leaves[0].device, list(directions)
    for index, d in enumerate(given):
        d = d if d.dtype is leaves[0].dtype else d.to(leaves[0].dtype)
        given[index] = d if d.stride() == leaves[index].stride() else copy_with_strides(d, leaves[index])
    # Exact, whatever the default dtype is, and in one launch.
    taken = torch.add(steps, 1, out=steps.new_empty((), dtype=torch.float32)).to(device)
    kept = None if moving is None else torch.logical_not(moving, out=moving.new_empty((), dtype=torch.float32))
    fused_adamw(
        leaves, given, first, second, [], [taken] * len(leaves),
        lr=lr if rate is None else rate, beta1=beta1, beta2=beta2, weight_decay=weight_decay, eps=eps,
        amsgrad=False, maximize=False, found_inf=None if kept is None else kept.to(device),
    )  # fmt: skip


# One operator for graphs: the compiler would write kernels for each leaf, and cannot write a kernel in place.
_LISTS = "Tensor[] leaves, Tensor[] directions, Tensor[] first, Tensor[] second"
_NUMBERS = (
    "Tensor steps, Tensor? moving, float lr, Tensor? rate, float beta1, float beta2, float weight_decay, float eps"
)
fused_adamw_op = torch.library.custom_op(
    "functional_jd::fused_adamw", _moved, mutates_args=(), schema=f"({_LISTS}, {_NUMBERS}) -> Tensor[]"
)
# For a captured graph that donates its state, which takes it where nothing else reads the old one.
torch.library.custom_op(
    "functional_jd::fused_adamw_in_place", _move, mutates_args=("leaves", "first", "second"),
    schema=f"(Tensor(a!)[] leaves, Tensor[] directions, Tensor(b!)[] first, Tensor(c!)[] second, {_NUMBERS}) -> ()",
)  # fmt: skip


@fused_adamw_op.register_fake
def _(leaves: list[Tensor], *_: Any) -> list[Tensor]:
    return [torch.empty_like(leaf) for _ in range(3) for leaf in leaves]


def _undisturbed(values: list[Tensor]) -> bool:
    """Whether no transform and no derivative is asked for, on a device that has fused kernels."""
    if transform_level() != NO_TRANSFORM:
        return False
    recorded = torch.is_grad_enabled()
    for x in values:
        if (recorded and x.requires_grad) or not (x.is_cpu or x.device.type not in _WITHOUT_KERNEL):
            return False
    return True


def _kept(moving: Tensor | None, new: Tensor, old: Tensor) -> Tensor:
    return new if moving is None else torch.where(moving, new, old)


def _root(square: Tensor) -> Tensor:
    """The square root, with derivative zero at zero instead of infinity: infinity times zero is NaN."""
    zero = square == 0
    return square.masked_fill(zero, 1).sqrt().masked_fill(zero, 0)
