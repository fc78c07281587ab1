"""Loss scaling: what `torch.amp.GradScaler` does, as a value and five pure functions.

    scaled = scale(state, losses)  ──▶ backward in float16 ──▶ jacobian
    jacobian, finite = unscale(state, jacobian)
    params = select(finite, moved, params)
    state = update_scale(state, finite)

A state holds one scale `[]` for all objectives, or one per objective `[m]`: gradients of 1e-9 and 1e3 share no power of
two that serves both in float16.
"""

from functools import reduce
from typing import Any, NamedTuple

import torch
from torch import Tensor

from functional_jd.core.multitask import split_heads, with_heads
from functional_jd.core.record_display import displayed_as, one_line
from functional_jd.core.rows import at_least_float32, per_row
from functional_jd.core.torch_internals import under_transform
from functional_jd.core.tree import tree_flatten, tree_map, tree_names, tree_unflatten
from functional_jd.core.types import Tree

# The smallest normal float32: its inverse is finite, also where subnormal numbers are flushed to zero.
_FLOOR = 2.0**-126


_LARGEST = torch.finfo(torch.float32).max


@displayed_as(one_line)
class ScaleState(NamedTuple):
    """The five entries of `GradScaler.state_dict()`, each a tensor `[]`, or `[m]` for one scale per objective.

    Attributes:
        scale: float32; what losses are multiplied by.
        growth_tracker: int32; finite steps since the scale last changed.
        growth_factor: float64; the scale is multiplied by it after `growth_interval` finite steps in a row.
        backoff_factor: float64; the scale is multiplied by it after a step that was not finite.
        growth_interval: int32; 0 or less: the scale never grows.
    """

    scale: Tensor
    growth_tracker: Tensor
    growth_factor: Tensor
    backoff_factor: Tensor
    growth_interval: Tensor


def scale_state(
    init_scale: float = 2.0**16,
    growth_factor: float = 2.0,
    backoff_factor: float = 0.5,
    growth_interval: int = 2000,
    *,
    shape: int | tuple[int, ...] = (),
    device: torch.device | str | None = None,
) -> ScaleState:
    """A fresh loss scale.

    Args:
        init_scale: the first scale, positive and finite in float32.
        growth_factor: finite and at least 1.
        backoff_factor: in (0, 1].
        growth_interval: finite steps until the scale grows; 0 or less: never.
        shape: `()` for one scale, `(m,)` or `m` for one per objective.
        device: where the five tensors lie.

    Returns:
        `ScaleState`, its five tensors of the shape given.

    Raises:
        ValueError: a setting out of its range, or a shape other than `()` and `(m,)`.

    Differs: from GradScaler, as factors of 1 are allowed: a scale that does not grow, or does not back off.
    """
    sizes = (shape,) if isinstance(shape, int) else tuple(shape)
    whole = isinstance(growth_interval, int) and not isinstance(growth_interval, bool)
    checks = (
        # Half of the smallest subnormal float32 would round to zero.
        ("init_scale", init_scale, 2.0**-149 <= init_scale <= _LARGEST, "positive and finite in float32"),
        ("growth_factor", growth_factor, 1.0 <= growth_factor < float("inf"), "finite and at least 1"),
        ("backoff_factor", backoff_factor, 0.0 < backoff_factor <= 1.0, "in (0, 1]"),
        ("growth_interval", growth_interval, whole and abs(growth_interval) < 2**31, "an integer that fits int32"),
        ("shape", shape, len(sizes) < 2 and all(m > 0 for m in sizes), "() for one scale, (m,) for one per objective"),
    )
    for name, found, holds, expected in checks:
        if not holds:
            raise ValueError(
                f"scale_state: {name} must be {expected}, found {found!r}. "
                "GradScaler's defaults are 2.0**16, 2.0, 0.5 and 2000; several replicas are a vmap over states."
            )
    return ScaleState(
        scale=torch.full(sizes, init_scale, dtype=torch.float32, device=device),
        growth_tracker=torch.zeros(sizes, dtype=torch.int32, device=device),
        growth_factor=torch.full(sizes, growth_factor, dtype=torch.float64, device=device),
        backoff_factor=torch.full(sizes, backoff_factor, dtype=torch.float64, device=device),
        growth_interval=torch.full(sizes, growth_interval, dtype=torch.int32, device=device),
    )


def no_scale(*, device: torch.device | str | None = None) -> ScaleState:
    """Scale 1 that `update_scale` never changes, not even its tracker: a step without loss scaling.

    Args:
        device: where the five tensors lie.

    Returns:
        `ScaleState`, five tensors `[]`.
    """
    return scale_state(1.0, 1.0, 1.0, 1, device=device)


def multiplier(state: ScaleState | Tensor, where: str = "multiplier") -> Tensor:
    """The factor that is really applied: the scale, but never so small that its inverse overflows.

    `max(scale, 2**-126)`.

    Args:
        state: a `ScaleState`, or a floating-point tensor `[]` or `[m]`.
        where: for the error.

    Returns:
        float32, `[]` or `[m]`. NaN stays NaN.

    Raises: TypeError: neither.

    Differs: from GradScaler, which goes on with a scale that backed off to 0, and multiplies by its inverse, inf.
    """
    factor: Any = state.scale if isinstance(state, ScaleState) else state
    if not (isinstance(factor, Tensor) and factor.is_floating_point() and factor.ndim < 2):
        raise TypeError(
            f"{where}: expected a ScaleState or a floating-point tensor [] or [m], found {_kind(factor)}. "
            "Make one with scale_state(); several replicas are a vmap over states."
        )
    return factor.float().clamp(min=_FLOOR)


def scale(state: ScaleState | Tensor, tree: Tree) -> Tree:
    """Multiply losses, or rows, by the loss scale.

    `scaled_i = multiplier_i * value_i`, computed in at least float32: 1 in float16 times 65536 is no infinity.

    Args:
        state: a `ScaleState`, or a tensor `[]` or `[m]`.
        tree: for one scale any pytree of floating-point tensors. For `[m]` scales either losses, m elements in all, in
            leaf order; or rows, every leaf `[m, *p]`. Of a `MultitaskJacobian`, `shared` is scaled.

    Returns:
        The same structure; float16 and bfloat16 leaves come out as float32.

    Raises:
        TypeError, ValueError: a leaf is no floating-point tensor; `[m]` scales and neither m losses nor m rows.

    Laws:
        Linear in the tree. `unscale(state, scale(state, tree))` is the tree for scales that are powers of two, while
        nothing overflows or underflows.

    Source: Micikevicius et al., Mixed precision training, ICLR 2018, section 3.2; `torch.amp.GradScaler.scale`.

    Differs: from GradScaler, as a float16 vector comes out in float32, as there only a float16 scalar does.
    """
    rows, heads = split_heads(tree)
    if heads:
        return with_heads(scale(state, rows), tree_map(at_least_float32, heads))
    factor = multiplier(state, "scale")
    leaves, structure = _floating(tree, "scale")
    sizes = [leaf.numel() for leaf in leaves]
    if factor.ndim and sum(sizes) == len(factor):
        factors = [part.reshape(leaf.shape) for part, leaf in zip(factor.split(sizes), leaves, strict=True)]
    else:
        factors = [_by_row(factor, leaf) for leaf in _floating(tree, "scale", factor)[0]]
    return tree_unflatten(
        structure, [at_least_float32(leaf) * part for leaf, part in zip(leaves, factors, strict=True)]
    )


def unscale(state: ScaleState | Tensor, tree: Tree) -> tuple[Tree, Tensor]:
    """Divide by the loss scale, and say what is finite; what is not comes back as zeros.

    `value_i = scaled_i / multiplier_i`: times the inverse, which is taken in float64 and rounded to float32.
    `finite_i` is true when every value of row i (for one scale: every value) is finite *after* dividing. Zeros keep
    eigh, svd and cholesky downstream from ever seeing a NaN.

    Args:
        state: a `ScaleState`, or a tensor `[]` or `[m]`: the one that scaled, before `update_scale`.
        tree: for one scale any pytree of floating-point tensors: a Jacobian, a direction. For `[m]` scales, rows: every
            leaf `[m, *p]`. Of a `MultitaskJacobian`, `shared` is divided; `heads` are unscaled already, and a value in
            them that is not finite belongs to no row, so that it flags them all.

    Returns:
        `(tree, finite)`: the same structure, float16 and bfloat16 leaves as float32, where the small values that
        scaling saved do not underflow; and bool of the scale's shape.

    Raises:
        TypeError, ValueError: a leaf is no floating-point tensor; `[m]` scales and a leaf without m rows.

    Laws:
        Rows are independent: an overflow in one leaves the others' bits alone. The result is always finite. Derivatives
        are those of the division where finite, and zero elsewhere.

    Source: `torch.amp.GradScaler.unscale_`, to the bit where finite.

    Differs: from GradScaler, which checks the scaled values, so that tiny scales give infinite parameters, and refuses
        float16.
    """
    rows, heads = split_heads(tree)
    inverse = multiplier(state, "unscale").double().reciprocal().float()
    leaves, structure = _floating(rows, "unscale", inverse)
    others, other_structure = _floating(heads, "unscale")

    one = inverse.new_ones(())
    finite = _bounded(leaves, inverse)
    if others:
        finite = finite & _bounded(others, one)
    inverse = torch.where(finite, inverse, 0.0)
    rows = tree_unflatten(structure, _times(leaves, inverse, finite))
    if not heads:
        return rows, finite
    anywhere = finite.any()
    heads = _times(others, anywhere.to(one.dtype), anywhere)
    return with_heads(rows, tree_unflatten(other_structure, heads)), finite


def update_scale(state: ScaleState, finite: Tensor) -> ScaleState:
    """Grow the scale after enough finite steps, back off after one that was not.

    Not finite: `scale * backoff_factor`, tracker 0. Finite for the `growth_interval`-th time in a row:
    `scale * growth_factor` unless that is infinite, tracker 0. Otherwise the tracker counts on.

    Args:
        state: `[]`, or `[m]`, where every objective follows its own flag.
        finite: bool `[]` or `[m]`, as `unscale` returns it; one flag `[]` serves all m scales.

    Returns:
        The next `ScaleState`. It has no floor: see `multiplier`.

    Raises:
        TypeError, ValueError: `finite` is no bool tensor, or has another shape.

    Laws:
        Bit-equal to `torch._amp_update_scale_`, elementwise: products are taken in float64 and rounded once.

    Source: `torch.amp.GradScaler.update`.
    """
    _require_flag(finite, "update_scale")
    if finite.shape not in {(), state.scale.shape}:
        raise ValueError(
            f"update_scale: expected one flag per scale {list(state.scale.shape)}, found {list(finite.shape)}. "
            "One scale for all objectives needs finite.all()."
        )
    successes = state.growth_tracker + 1
    due = successes == state.growth_interval
    exact = state.scale.double()
    grown = (exact * state.growth_factor).float()
    smaller = (exact * state.backoff_factor).float()
    return ScaleState(
        scale=torch.where(finite, torch.where(due & (grown.abs() < torch.inf), grown, state.scale), smaller),
        growth_tracker=torch.where(finite & ~due, successes, 0),
        growth_factor=state.growth_factor,
        backoff_factor=state.backoff_factor,
        growth_interval=state.growth_interval,
    )


def select(finite: Tensor, new: Tree, old: Tree) -> Tree:
    """The new tree when everything was finite, the old one otherwise: a skipped step without an `if`.

    Args:
        finite: bool, `[]` or `[m]`; one false is enough for the old tree.
        new: pytree of tensors of any dtype.
        old: pytree of the same structure, shapes and dtypes.

    Returns:
        A pytree like both.

    Raises:
        TypeError, ValueError: `finite` is no bool tensor, a leaf is none; structures, shapes or dtypes differ.

    Laws:
        Nothing of the tree that was not selected leaks: no NaN, and a derivative of exactly zero towards it. (A zero
        that goes on through an infinite derivative in *front* of `select` becomes NaN, as with every `where`.)
    """
    _require_flag(finite, "select")
    (leaves, structure), (others, other_structure) = tree_flatten(new), tree_flatten(old)
    if structure != other_structure:
        raise ValueError(
            f"select: new and old need the same structure, found {structure} and {other_structure}. "
            "A state that is None at first needs its init before the step."
        )
    for index, (leaf, other) in enumerate(zip(leaves, others, strict=True)):
        if not (_is_tensor(leaf) and _is_tensor(other) and leaf.dtype == other.dtype and leaf.shape == other.shape):
            raise TypeError(
                f"select: every leaf must be a tensor, of one shape and dtype in new and old, found {_kind(leaf)} and "
                f"{_kind(other)} in {tree_names(new)[index]!r}. A step must keep the shapes and dtypes of its state."
            )
    everywhere = finite.all() if finite.ndim else finite
    return tree_unflatten(structure, [torch.where(everywhere, *pair) for pair in zip(leaves, others, strict=True)])


def _kind(value: Any) -> str:
    return f"{value.dtype} of shape {list(value.shape)}" if isinstance(value, Tensor) else type(value).__name__


def _floating(tree: Tree, where: str, factor: Tensor | None = None) -> tuple[list[Tensor], Any]:
    """The leaves and structure of a pytree of floating-point tensors; a factor `[m]` asks for m rows in each."""
    leaves, structure = tree_flatten(tree)
    for index, leaf in enumerate(leaves):
        if not (_is_tensor(leaf) and leaf.is_floating_point()):
            raise TypeError(
                f"{where}: every leaf must be a floating-point tensor, found {_kind(leaf)} in "
                f"{tree_names(tree)[index]!r}. Keep counters and settings out of what is scaled."
            )
        if factor is not None and factor.ndim and leaf.shape[:1] != factor.shape:
            raise ValueError(
                f"{where}: m = {len(factor)} scales need rows [m, *p] or, to scale, m losses in all, found "
                f"{_kind(leaf)} in {tree_names(tree)[index]!r}. Did the number of objectives change, or should one "
                "scale serve all?"
            )
    return leaves, structure


def _require_flag(finite: Any, where: str) -> None:
    if not isinstance(finite, Tensor) or finite.dtype != torch.bool:
        raise TypeError(
            f"{where}: finite must be a bool tensor, found {_kind(finite)}. Hand over what unscale returned."
        )


def _is_tensor(value: Any) -> bool:
    return isinstance(value, Tensor)


def _by_row(factor: Tensor, leaf: Tensor) -> Tensor:
    """A factor `[m]` as it stands beside rows; a factor `[]` as it is."""
    return per_row(factor, leaf) if factor.ndim else factor


def _bounded(leaves: list[Tensor], inverse: Tensor) -> Tensor:
    """Whether the leaves (their rows, for `[m]`) times the inverse are finite, and the inverse is.

    Rounding is monotone: a product overflows somewhere exactly when that of the largest magnitude does. And a maximum
    keeps NaN. So one reduction by leaf, which writes nothing, says it all, ten times faster than `isfinite`.
    """
    ends: dict[torch.dtype, list[Tensor]] = {}
    for leaf in leaves:
        if leaf.numel():
            fixed = leaf.detach()
            found = fixed.reshape(len(fixed), -1).aminmax(dim=1) if inverse.ndim else fixed.aminmax()
            ends.setdefault(torch.promote_types(leaf.dtype, torch.float32), []).extend(found)
    flags = [((torch.stack(found).to(dtype) * inverse).abs() < torch.inf).all(0) for dtype, found in ends.items()]
    return reduce(torch.logical_and, flags, inverse.isfinite()) if len(flags) != 1 else flags[0]


def _times(leaves: list[Tensor], factor: Tensor, finite: Tensor) -> list[Tensor]:
    """The leaves times a factor, and zeros where not finite; cleared first, so that no derivative is 0 * inf.

    In place on the cleared copies: a second buffer of a Jacobian's size costs more than all the arithmetic.
    """
    if under_transform() or (torch.is_grad_enabled() and any(x.requires_grad for x in (factor, *leaves))):
        return [at_least_float32(torch.where(_by_row(finite, x), x, 0.0)).mul_(_by_row(factor, x)) for x in leaves]
    # Where the values are all that is asked for, the factor zero clears the rest: six times faster on a CPU than
    # `where`. Adding -0 changes no value, and adding 0 changes -0 only: to the bit, the same zeros.
    signed = torch.where(finite, -0.0, 0.0)
    cleared = [at_least_float32(x.nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)) for x in leaves]
    return [x.mul_(_by_row(factor, x)).add_(_by_row(signed, x)) for x in cleared]
