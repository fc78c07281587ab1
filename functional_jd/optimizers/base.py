"""The protocol of optimizers, and the parts that `sgd` and `adamw` share."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from functional_jd.core.arguments import BELOW_1, NOT_NEGATIVE, check_number, here, refuse
from functional_jd.core.float64 import widest
from functional_jd.core.record_display import displayed_as, outline
from functional_jd.core.sharding import same_layout
from functional_jd.core.tree import floating_leaves, shards_of, tree_map, tree_names, tree_sharded_as
from functional_jd.core.types import Direction, Losses, Params, Tree

LearningRate: TypeAlias = float | Tensor | Callable[[Tensor], Any]
"""A number, a tensor `[]`, or a schedule `steps -> lr` of the number of steps taken so far, int64 `[]`."""


@displayed_as(outline)
class Optimizer(NamedTuple):
    """Two pure functions; the hyper-parameters live in their closures.

    The optimizers of this package are pure and compose with vmap (also over tensors among the settings), grad, jvp and
    compile. A skipped step leaves state, schedule and key where they were. Params keep their dtypes.

    Attributes:
        init: `init(params) -> state`, a pytree of tensors whose structure never changes.
        update: `update(direction, state, params) -> (params, state)`: one step against the direction.
        guarded_update: `guarded_update(moving, direction, state, params) -> (params, state)`, or None: the update where
            `moving`, bool `[]`, is true; else params and state as they were, whatever the direction. A step then need
            not choose afterwards, which reads and writes everything once more.
        search: `search(losses_at, direction, state, params) -> (params, state)`, or None: the update of an optimizer
            that compares losses, such as `line_search`. `losses_at(params) -> losses` are those of the step, on its
            batch and its buffers. A step calls it instead of `update`.
        sensitivity: the norm of a row that the noise of updates hides; None: they add none.
    """

    init: Callable[[Params], Tree]
    update: Callable[[Direction, Tree, Params], tuple[Params, Tree]]
    guarded_update: Callable[[Tensor, Direction, Tree, Params], tuple[Params, Tree]] | None = None
    search: Callable[[Callable[[Params], Losses], Direction, Tree, Params], tuple[Params, Tree]] | None = None
    sensitivity: float | Tensor | None = None


def check_optimizer(optimizer: Any, name: str = "optimizer", cure: str = "") -> None:
    """Refuse all but an optimizer, such as a builder that was not called."""
    if not isinstance(optimizer, Optimizer):
        cure = f"Call its builder: {cure or 'adamw(lr=1e-3), or from_torch(torch.optim.AdamW, lr=1e-3).'}"
        refuse(name, "a pair (init, update)", optimizer, cure)


def check_inner(optimizer: Any, name: str = "optimizer", cure: str = "") -> None:
    """Raise for an optimizer that must stand around all others, as it compares losses or adds noise."""
    check_optimizer(optimizer, name, cure)
    if optimizer.search is not None or optimizer.sensitivity is not None:
        found = "that adds noise (noised)" if optimizer.search is None else "that compares losses (line_search)"
        raise ValueError(f"{here()}: {name} must not compare losses or add noise, found one {found}. Unwrap it.")


def check_settings(*, tensors: Sequence[str] = ("lr",), **values: Any) -> None:
    """Refuse numbers that are negative, infinite or NaN. Those named in `tensors` may be tensors, which are not read.

    Raises:
        TypeError: `lr` is not a number, a tensor or a schedule; another setting is not a number.
        ValueError: a number is out of range.
    """
    for name, value in values.items():
        cure = f"Pass for instance {name}=0.1."
        if isinstance(value, Tensor):
            cure = cure if name in tensors else f"Tensors may stand for {', '.join(tensors)} only."
        elif isinstance(value, Iterable | torch.nn.Module) and not isinstance(value, str):
            cure += " The parameters are given to train_state."
        if name != "lr" or isinstance(value, torch.nn.Module | type) or not callable(value):
            expected = "a number, a tensor or a schedule" if name == "lr" else "a number"
            check_number(name, value, NOT_NEGATIVE, cure, expected, name in tensors)


def check_betas(betas: Any) -> tuple[float, float]:
    """Two shares that moving averages keep."""
    if not isinstance(betas, tuple | list) or len(betas) != 2:  # pyright: ignore[reportUnknownArgumentType]
        refuse("betas", "a pair of numbers", betas, "Usual values are (0.9, 0.999).")
    for index, beta in enumerate(betas):  # pyright: ignore[reportUnknownArgumentType, reportUnknownVariableType]
        check_number(f"betas[{index}]", beta, BELOW_1, "Usual values are (0.9, 0.999).", "a number in [0, 1)")
    return betas[0], betas[1]


def on_shards(update: Callable[..., tuple[Params, Tree]], *given: Any) -> tuple[Params, Tree]:
    """An update of single entries, `update(*first, direction, state, params)`, of sharded params: it is called with
    this rank's shards, and the result has the layouts of params and state.
    """
    *first, direction, state, params = given
    leaves, structure = floating_leaves(params)
    for index, (p, d) in enumerate(zip(leaves, structure.flatten_up_to(direction), strict=True)):
        if not same_layout(p, d):
            raise ValueError(
                f"{here()}: expected a direction that is sharded as the parameters are, found another layout in "
                f"{tree_names(params)[index]!r}. Redistribute it: d.redistribute(p.device_mesh, p.placements)."
            )
    new = update(*first, *map(shards_of, (direction, state, params)))
    return tree_sharded_as(new[0], params), tree_sharded_as(new[1], state)


def no_steps(params: Params) -> Tensor:
    return torch.zeros((), dtype=torch.int64, device=floating_leaves(params)[0][0].device)


def current_rate(lr: LearningRate, steps: Tensor) -> Any:
    """A number, or float64: with a float32 rate, `1 - lr weight_decay` would round float64 params."""
    rate = lr(steps) if callable(lr) else lr
    if callable(lr) and (isinstance(rate, Tensor) or not torch.compiler.is_compiling()):  # which hides NumPy's numbers
        check_number("lr(steps)", rate, NOT_NEGATIVE, "A schedule returns one rate.", tensors=True)
    return rate.to(widest(rate.device)) if isinstance(rate, Tensor) else rate


def in_dtype_of(factor: Any, leaf: Tensor) -> Any:
    """A factor that does not promote the leaf, not even a leaf `[]`. It goes to a device without a wait."""
    return factor.to(leaf.device, leaf.dtype, not leaf.is_cpu) if isinstance(factor, Tensor) else factor


def in_dtypes_of(direction: Direction, params: Params) -> Direction:
    """The direction in the dtypes of params, so that their dtypes stay."""
    return tree_map(lambda p, d: d.to(p.dtype), params, direction)


def copy_with_strides(leaf: Tensor, like: Tensor) -> Tensor:
    """A copy that lies in memory as `like` does, where the shapes agree: fused kernels trust in that."""
    if leaf.shape != like.shape or leaf.stride() == like.stride():
        return leaf.clone()
    return torch.empty_like(like, dtype=leaf.dtype, device=leaf.device).copy_(leaf)
