"""Loss scaling: `torch.amp.GradScaler` as a record and pure functions.

    scaled = scale(state, losses)  ──▶ backward in float16 ──▶ jacobian
    jacobian, finite = unscale(state, jacobian)
    params = select(finite, new_params, params)
    state = update_scale(state, finite)

A state holds one scale `[]` for all objectives, or one per objective `[m]`.
"""

from functools import reduce
from typing import Any

import torch
from torch import Tensor

from functional_jd.core.arguments import check_type, described, here
from functional_jd.core.foreach import times, where_each
from functional_jd.core.heads import split_heads, with_heads
from functional_jd.core.rows import at_least_float32, joined, per_row
from functional_jd.core.sharding import agreed, is_sharded, same_layout, shard_of, sharded_as
from functional_jd.core.tree import all_finite, any_sharded, check_layouts, tree_flatten, tree_map, tree_names
from functional_jd.core.types import Tree
from functional_jd.precision.scale_state import ScaleState
from functional_jd.torch_compat.torch_internals import under_transform

FLOOR = 2.0**-14
"""The scale below which `update_scale` does not back off: the smallest normal float16.

Much lower, float16 would hold no gradient, and steps would move nothing. 30 doublings lead to the default.
"""

# The smallest normal float32. Its inverse is finite, also if subnormal numbers are flushed to zero.
_SMALLEST = 2.0**-126
# The bits of the exponent of a float32.
_EXPONENT = 0x7F800000


def multiplier(state: ScaleState | Tensor) -> Tensor:
    """Return the factor that is applied, float32: `max(scale, 2**-126)`, so that its inverse is finite; NaN stays NaN.

    Raises TypeError unless it gets a `ScaleState` or a floating-point tensor `[]` or `[m]`.
    """
    factor: Any = state.scale if isinstance(state, ScaleState) else state
    if not (isinstance(factor, Tensor) and factor.is_floating_point() and factor.ndim < 2):
        raise TypeError(
            f"{here()}: expected a ScaleState or a floating-point tensor [] or [m], found {described(factor)}. "
            "Create one with scale_state(); for several models use vmap over states."
        )
    return factor.float().clamp(min=_SMALLEST)


def inverse_of(factor: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """The inverse of a float32 factor, rounded to a dtype. For float32, only a derivative needs float64."""
    if dtype == torch.float64 or factor.requires_grad or under_transform():
        return factor.double().reciprocal().to(dtype)
    return factor.reciprocal()


def scale(state: ScaleState | Tensor, tree: Tree) -> Tree:
    """Multiply losses or rows by the loss scale.

    `scaled_i = multiplier_i * value_i`, computed in at least float32, so that 1 in float16 times 65536 is finite.

    Args:
        state: a `ScaleState`, or a tensor `[]` or `[m]`.
        tree: for one scale, any pytree of floating-point tensors. For `[m]` scales, either losses with m elements in
            leaf order, or rows with leaves `[m, *p]`. With a `MultitaskJacobian`, `shared` is scaled.

    Returns:
        The same structure; float16 and bfloat16 leaves become float32.

    Guarantees:
        For scales that are powers of two, `unscale(state, scale(state, tree))` equals the tree, within its range.

    Source: Micikevicius et al., Mixed precision training, ICLR 2018, section 3.2; `torch.amp.GradScaler.scale`.
    """
    rows, heads = split_heads(tree)
    if heads:
        return with_heads(scale(state, rows), tree_map(at_least_float32, heads))
    factor = multiplier(state)
    leaves, structure = _floating(tree)
    sizes = [leaf.numel() for leaf in leaves]
    if factor.ndim and sum(sizes) == len(factor):
        factors = [part.reshape(leaf.shape) for part, leaf in zip(factor.split(sizes), leaves, strict=True)]
    else:
        factors = [per_row(factor, leaf) for leaf in _floating(tree, factor)[0]]
    pairs = zip(leaves, factors, strict=True)
    return structure.unflatten([sharded_as(at_least_float32(shard_of(leaf)) * part, leaf) for leaf, part in pairs])


def unscale(state: ScaleState | Tensor, tree: Tree) -> tuple[Tree, Tensor]:
    """Divide by the loss scale, and test for finiteness; non-finite rows are returned as zeros.

    `value_i = scaled_i / multiplier_i`, computed with the inverse, rounded to float32.
    `finite_i` is true if every value of row i (for one scale: every value) is finite *after* dividing.

    Args:
        state: the `ScaleState`, or tensor `[]` or `[m]`, that was used for scaling, before `update_scale`.
        tree: for one scale, any pytree of floating-point tensors, such as a Jacobian or a direction. For `[m]` scales,
            rows with leaves `[m, *p]`. With a `MultitaskJacobian`, `shared` is divided; `heads` are unscaled already: a
            non-finite value in them makes every `finite_i` false. Sparse leaves come back dense.

    Returns:
        `(tree, finite)`: the same structure, with float16 and bfloat16 leaves as float32, where small values do not
        underflow; and a bool tensor of the shape of the scale.

    Guarantees:
        Rows are independent: an overflow in one does not change the bits of the others. The result is always finite.
        Derivatives are those of the division where finite, and zero elsewhere.

    Source: `torch.amp.GradScaler.unscale_`, bit for bit where finite.

    Example:
        >>> state = scale_state(1024.0, shape=(2,))
        >>> rows, finite = unscale(state, torch.tensor([[1024.0, 512.0], [torch.inf, 0.0]]))
        >>> rows, finite
        (tensor([[1.0000, 0.5000],
                [0.0000, 0.0000]]), tensor([ True, False]))
    """
    rows, heads = split_heads(tree)
    inverse = inverse_of(multiplier(state))
    leaves, structure = _floating(rows, inverse)
    others, other_structure = _floating(heads)
    shards, other_shards = _dense(leaves), _dense(others)

    one, finite = inverse.new_ones(()), _products_are_finite(shards, inverse)
    if others:
        finite = finite & _products_are_finite(other_shards, one)
    finite = agreed(finite, leaves + others)
    inverse = torch.where(finite, inverse, 0.0)
    products = _products_or_zeros(shards, inverse, finite)
    rows = structure.unflatten(list(map(sharded_as, products, leaves)))
    if not heads:
        return rows, finite
    anywhere = finite.any()
    products = _products_or_zeros(other_shards, anywhere.to(one.dtype), anywhere)
    return with_heads(rows, other_structure.unflatten(list(map(sharded_as, products, others)))), finite


def divided(factor: Tensor, tree: Tree) -> tuple[Tree, Tensor]:
    """`unscale` by one scale, in a third of the launches: what is not finite is not zeroed."""
    leaves, structure = tree_flatten(tree)
    if under_transform() or any_sharded(leaves) or not leaves or any(x.requires_grad for x in (factor, *leaves)):
        return unscale(factor, tree)
    dtype = reduce(torch.promote_types, (x.dtype for x in leaves), torch.float32)
    quotients = times(list(map(at_least_float32, leaves)), inverse_of(factor, dtype))
    return structure.unflatten(quotients), all_finite(quotients)


def zeros_unless(finite: Tensor, tree: Tree) -> Tree:
    """The pytree, or zeros."""
    return _rows_unless(finite.all(), tree, 0)


def nan_rows_unless(finite: Tensor, jacobian: Tree) -> Tree:
    """The Jacobian, with NaN in the rows whose flag is false; one flag serves all."""
    rows, heads = split_heads(jacobian)
    return with_heads(_rows_unless(finite, rows, torch.nan), heads)


def _rows_unless(finite: Tensor, tree: Tree, other: float) -> Tree:
    return tree_map(lambda x: sharded_as(torch.where(per_row(finite, x), shard_of(x), other), x), tree)


def update_scale(state: ScaleState, finite: Tensor, *, losses_finite: Tensor | None = None) -> ScaleState:
    """Increase the scale after `growth_interval` finite steps, and decrease it after a non-finite step.

    Not finite: `scale * backoff_factor`, but at least 2**-14, tracker 0. Finite for the `growth_interval`-th time in a
    row: `scale * growth_factor` unless that is infinite, tracker 0. Otherwise the tracker increases by 1. Loss not
    finite: nothing changes.

    Args:
        state: `[]`, or `[m]`, in which every scale follows its own flag.
        finite: bool `[]` or `[m]`, as `unscale` returns it; one flag applies to all m scales.
        losses_finite: bool `[]` or `[m]`, whether the losses themselves are finite. If they are not, no scale would
            have saved the step: scale and tracker stay. `None`: they are finite.

    Returns:
        The next `ScaleState`.

    Guarantees:
        Bit-equal to the update of `torch.amp.GradScaler` down to the floor, elementwise: products are computed in
        float64 and rounded once. A scale that starts below 2**-14 grows from there, and does not back off.

    Differences: from GradScaler, which has no floor: after 170 non-finite steps its scale and all gradients are zero.

    Example:
        >>> state = scale_state(1024.0, shape=(2,))
        >>> update_scale(state, torch.tensor([True, False])).scale
        tensor([1024.,  512.])
    """
    check_type("state", state, ScaleState, "Create one with scale_state().")
    _require_flag(finite, state.scale)
    growth, backoff, interval = state.growth_factor, state.backoff_factor, state.growth_interval
    if isinstance(growth, tuple) or isinstance(backoff, tuple) or isinstance(interval, tuple):
        return state
    if losses_finite is not None:
        _require_flag(losses_finite, state.scale, "losses_finite")
    successes = state.growth_tracker + (1 if losses_finite is None else losses_finite)
    unchanged = finite > (successes == interval)
    if losses_finite is not None:
        unchanged = losses_finite <= unchanged  # also if the loss is not finite
    current = torch.add(state.scale, state.scale == 0, alpha=FLOOR)
    product = (current * torch.where(finite, growth, backoff)).float()  # in float64, as the factors are
    bounded = product.maximum(current.clamp(max=FLOOR))
    new = torch.where((product < torch.inf) > unchanged, bounded, current)
    return ScaleState(new, successes * unchanged, growth, backoff, interval)


def unscaled_rows(rows: list[Any], scale: Tensor) -> list[Any]:
    """Rows divided by the loss scale `[]` or `[m]`, in at least float32, one by one in the list, for less memory."""
    present = [index for index, row in enumerate(rows) if row is not None]
    if under_transform() or not present or rows[present[0]].is_cpu or scale.requires_grad:
        for index in present:
            row = at_least_float32(rows[index])
            rows[index] = row / (per_row(scale, row) if scale.ndim else scale)
        return rows
    # Elsewhere launches cost more than copies: small rows are joined.
    shapes = [rows[index].shape for index in present]
    matrices = joined([at_least_float32(rows[index]) for index in present])
    numbers = scale[:, None] if scale.ndim else scale
    parts: list[Tensor] = []
    for matrix, widths in matrices:
        copied = len(widths) > 1 and matrix._base is None and not matrix.requires_grad  # a view may be another row, too
        parts += (matrix.div_(numbers) if copied else matrix / numbers).split(widths, 1)
    for index, shape, part in zip(present, shapes, parts, strict=True):
        rows[index] = part.reshape(shape)
    return rows


def common_scale(weights: Tensor, scales: Tensor) -> Tensor:
    """The largest power of two S `[]` with `|weights_i| S <= scale_i` for all i, which divides exactly."""
    largest = common_inverse(weights / scales).reciprocal()
    if under_transform():  # torch 2.11 has no batching rule for views with another dtype
        return largest / (2 * torch.frexp(largest).mantissa)
    return (largest.view(torch.int32) & _EXPONENT).view(torch.float32)


def common_inverse(weights: Tensor) -> Tensor:
    """The inverse of the scale for all, from weights divided by their scales. It has no derivative, as it cancels."""
    return torch.linalg.vector_norm(weights.detach(), torch.inf).float().clamp(_SMALLEST, 1 / _SMALLEST)


def select(finite: Tensor, new: Tree, old: Tree) -> Tree:
    """Return the new tree if everything is finite, else the old one; skips a step without an `if`.

    Args:
        finite: bool, `[]` or `[m]`; a single false selects the old tree.
        new: pytree of tensors of any dtype.
        old: pytree of the same structure, shapes and dtypes.

    Returns:
        A pytree like both.

    Guarantees:
        The tree that is not selected has no effect: a NaN in it does not propagate, and its derivative is exactly zero.
        (This zero times an infinite derivative *before* `select` is NaN, as with every `where`.)

    Example:
        >>> precision.select(torch.tensor(False), {"w": torch.ones(2)}, {"w": torch.zeros(2)})
        {'w': tensor([0., 0.])}
    """
    _require_flag(finite)
    leaves, structure = tree_flatten(new)
    try:
        others = structure.flatten_up_to(old)
    except ValueError as error:
        raise ValueError(
            f"{here()}: new and old must have the same structure, found two. {error} "
            "If a state is None before the first step, initialise it first."
        ) from error
    for index, (leaf, other) in enumerate(zip(leaves, others, strict=True)):
        tensors = isinstance(leaf, Tensor) and isinstance(other, Tensor)
        alike = tensors and leaf.dtype == other.dtype and leaf.shape == other.shape
        if not (alike and (type(leaf) is type(other) is Tensor or same_layout(leaf, other))):
            raise TypeError(
                f"{here()}: every leaf must be a tensor, with the same shape and dtype in new and old, found "
                f"{_described(leaf)} and {_described(other)} in {tree_names(new)[index]!r}. "
                "A step must keep the shapes and dtypes of its state."
            )
    all_finite = finite.all() if finite.ndim else finite
    chosen = where_each(all_finite, list(map(shard_of, leaves)), list(map(shard_of, others)))
    return structure.unflatten(list(map(sharded_as, chosen, leaves)))


def _described(value: Any) -> str:
    return f"{described(value)} placed {list(value.placements)}" if is_sharded(value) else described(value)


def _floating(tree: Tree, factor: Tensor | None = None) -> tuple[list[Tensor], Any]:
    """Return the leaves and structure of a pytree of floating-point tensors; with factors `[m]`, leaves have m rows."""
    leaves, structure = tree_flatten(tree)
    for index, leaf in enumerate(leaves):
        if not (isinstance(leaf, Tensor) and leaf.is_floating_point()):
            raise TypeError(
                f"{here()}: every leaf must be a floating-point tensor, found {_described(leaf)} in "
                f"{tree_names(tree)[index]!r}. Remove counters and settings from the tree."
            )
        if factor is not None and factor.ndim and leaf.shape[:1] != factor.shape:
            raise ValueError(
                f"{here()}: m = {len(factor)} scales need rows [m, *p] or, for scale, m losses in all, found "
                f"{_described(leaf)} in {tree_names(tree)[index]!r}. Did the number of objectives change? "
                "scale_state() creates one scale for all objectives."
            )
    check_layouts(leaves, tree)
    return leaves, structure


def _dense(leaves: list[Tensor]) -> list[Tensor]:
    """Return the leaves, the sparse ones dense, as they have no extrema; of sharded leaves, the shards."""
    return [leaf if leaf.layout == torch.strided else leaf.to_dense() for leaf in map(shard_of, leaves)]


def _require_flag(finite: Any, scale: Tensor | None = None, name: str = "finite") -> None:
    if not isinstance(finite, Tensor) or finite.dtype != torch.bool:
        raise TypeError(
            f"{here()}: {name} must be a bool tensor, found {_described(finite)}. Pass the finite of unscale."
        )
    if scale is not None and finite.shape not in {(), scale.shape}:
        raise ValueError(
            f"{here()}: expected one flag per scale {list(scale.shape)}, found {list(finite.shape)} in {name}. "
            f"For one scale, pass {name}.all()."
        )


def _products_are_finite(leaves: list[Tensor], inverse: Tensor) -> Tensor:
    """Return whether all leaves (for `[m]`: their rows) times the inverse are finite, and the inverse is.

    Rounding is monotone, and extrema propagate NaN. One reduction per leaf is ten times faster than `isfinite`.
    """
    extrema: dict[torch.dtype, list[Tensor]] = {}
    for leaf in leaves:
        if leaf.numel():
            x = leaf.detach()
            found = x.reshape(len(x), -1).aminmax(dim=1) if inverse.ndim else x.aminmax()
            # Native autocast of one half precision refuses to stack the other.
            extrema.setdefault(leaf.dtype, []).extend(map(at_least_float32, found))
    flags = [((torch.stack(found) * inverse).abs() < torch.inf).all(0) for found in extrema.values()]
    return reduce(torch.logical_and, flags, inverse.isfinite()) if len(flags) != 1 else flags[0]


def _products_or_zeros(leaves: list[Tensor], factor: Tensor, finite: Tensor) -> list[Tensor]:
    """Return the leaves times a factor, or zeros where not finite. Zeroed before the product: no derivative is 0 * inf.
    The product is in place on the zeroed copies, as a second buffer costs more than the arithmetic.
    """
    zeroed = [at_least_float32(torch.where(per_row(finite, x), x, 0.0)) for x in leaves]
    return [z.mul_(per_row(factor, x)) for z, x in zip(zeroed, leaves, strict=True)]
