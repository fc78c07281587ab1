"""Aggregation: a rule maps the Jacobian to one weight per row; `aggregate` returns the weighted sum of the rows."""

from collections.abc import Callable
from functools import partial, reduce
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from functional_jd.aggregation.observation import Observation
from functional_jd.aggregation.views import View, as_view, loss_count
from functional_jd.core.arguments import described, refuse
from functional_jd.core.float64 import has_float64, warn_of_rows
from functional_jd.core.heads import direction_with_heads, rows_of, split_heads
from functional_jd.core.host import is_capturing, run_on_host
from functional_jd.core.record_display import displayed_as, outline
from functional_jd.core.rows import (
    as_matrix,
    at_least_float32,
    inner_products,
    joined,
    magnitudes,
    per_row,
    row_count,
    squared_norms,
    weighted_rows,
)
from functional_jd.core.sharding import shard_of, sharded_as
from functional_jd.core.tree import leaves_like, tree_difference, tree_flatten, tree_leaves, tree_map, tree_unflatten
from functional_jd.core.types import AffineWeights, Direction, Jacobian, Losses, Tree, Weights
from functional_jd.precision.autocast import autocast_disabled
from functional_jd.solvers.search import may_be_differentiated
from functional_jd.torch_compat.slow_path import is_out_of_memory
from functional_jd.torch_compat.torch_internals import under_functorch, under_transform


@displayed_as(outline)
class Aggregator(NamedTuple):
    """An aggregation rule: three functions; its hyper-parameters live in their closures.

    Attributes:
        view: a `View`: `no_gradients`, `losses`, `norms`, `gramian`, `cross_gramian`, `full_jacobian`, or one made of
            these. It tells the engines what the rule needs, and so what a step costs. A function
            `view(jacobian, *others, losses=None)`, which tells nothing, is given the rows.
        init: `init(view) -> state`, a pytree of tensors; `()` for a stateless rule.
        update: `update(view, state) -> (weights, state)`; weights `[m]`, or a pytree like the Jacobian for entrywise
            weights.
        on_host: whether `update` is to run on the host where the view stands on an accelerator: one copy there and one
            back, for what would take more than some 40 launches. Not under transforms.
        sensitivity: the largest norm that a row can add to the direction, whatever the rows; None: no such bound is
            known. `noised` needs one.
    """

    view: View | Callable[..., Any]
    init: Callable[[Any], Tree]
    update: Callable[[Any, Tree], tuple[Weights, Tree]]
    on_host: bool = False
    sensitivity: float | Tensor | None = None


@displayed_as(outline)
class Aggregation(NamedTuple):
    """The result of `aggregate`.

    Attributes:
        direction: pytree like params, in their dtypes: the weighted sum of the rows.
        weights: float64 `[m]`, a dict of those of groups, or a pytree like the Jacobian.
        state: the rule's state for the next call.
    """

    direction: Direction
    weights: Weights
    state: Tree


def aggregate(
    aggregator: Aggregator,
    jacobian: Jacobian,
    state: Tree = None,
    *others: Jacobian,
    losses: Losses = None,
) -> Aggregation:
    """Combine the rows of a Jacobian into one direction with the weights of a rule.

    `direction = sum_i weights_i J_i`, with `weights, state = update(view(J), state)`.

    Args:
        aggregator: the rule.
        jacobian: pytree with leaves `[m, *p]`, float16, bfloat16, float32 or float64; or a `MultitaskJacobian`: the
            rule weights `shared`, and `heads` is returned unchanged.
        state: the state that the last call returned; `None` for the rule's initial state.
        others: Jacobians of the same objectives on independent batches, for the rules that need `cross_gramian`.
        losses: the m values, for the rules that need `losses`.

    Returns:
        `Aggregation(direction, weights, state)`. A non-finite Jacobian gives a non-finite direction, never an
        exception.

    Raises:
        TypeError: `aggregator` is not an `Aggregator`, or a leaf is not a floating-point tensor of rows.
        ValueError: no rows; leaves, Jacobians, weights or losses that disagree on m; a state of another rule, or for
            another m; or the rule needs `others` or `losses` and they are missing.

    Laws:
        Pure; equal for a tree and for its flattened rows; composes with vmap, grad, jvp and compile.

    Example:
        >>> jacobian = torch.tensor([[2.0, 0.0], [-1.0, 1.0]])
        >>> direction, weights, state = aggregate(upgrad(), jacobian)
        >>> direction, jacobian @ direction  # no row conflicts with it
        (tensor([0.5000, 1.0000]), tensor([1.0000, 0.5000]))
    """
    check_rule(aggregator, "aggregate")
    m, *rest = (row_count(rows_of(rows), "aggregate") for rows in (jacobian, *others))
    if any(other != m for other in rest):
        raise ValueError(
            f"aggregate: all Jacobians need the same number of rows, found {' and '.join(map(str, (m, *rest)))}. "
            "Compute them with the same losses on independent batches."
        )
    if losses is not None and (found := loss_count(losses, "aggregate")) != m:
        raise ValueError(
            f"aggregate: expected one loss per row, {m} in all, found {found}. Pass the losses that were returned "
            "with the Jacobian."
        )
    seen = Observation(losses, rows=jacobian, others=others)
    with autocast_disabled():
        weights, state = weigh(aggregator, as_view(aggregator.view), seen, state, apart=True)
        return Aggregation(combined("aggregate", jacobian, weights), weights, state)


def check_rule(aggregator: Any, where: str) -> None:
    """Raise TypeError unless `aggregator` is an `Aggregator`, which an uncalled builder is not."""
    if not isinstance(aggregator, Aggregator):
        raise TypeError(
            f"{where}: aggregator must be a rule, found {type(aggregator).__name__}. Call its builder: upgrad()."
        )


class CannotStartError(ValueError):
    """A rule that continues the state of another one was asked for a state of its own."""


_UNPAIRED = "what the rule's update(view, memory) returns", "a pair, (weights, memory)"


def weigh(
    aggregator: Aggregator,
    view: View,
    seen: Observation,
    state: Tree = None,
    where: str = "aggregate",
    *,
    apart: bool = False,
) -> tuple[Weights, Tree]:
    """The weights and the next state of a rule with this view; `apart`: each with memory of its own, as for users. The
    caller switches autocast off.

    A state of another rule, or for another number of objectives, is refused: if `update` raises or drops it, and in a
    step also if the state does not keep its structure.
    """
    received = view.receive(seen)
    if seen.scaling is None:  # else the driver has asked
        if narrow := narrow_device(seen, received):
            if view.products == "rows":
                warn_of_rows(narrow)
            run = partial(run_on_host, device=narrow, apart=apart)
            aggregator = aggregator._replace(init=partial(run, aggregator.init), update=partial(run, aggregator.update))
        elif aggregator.on_host and goes_to_host(aggregator, (received, state)):
            aggregator = aggregator._replace(update=partial(run_on_host, aggregator.update, apart=apart))
    if state is None:
        found: Any = aggregator.update(received, aggregator.init(received))
        return refuse(where, *_UNPAIRED, found, "See stateless.") if isinstance(found, Tensor) else found
    remembers = not (isinstance(state, tuple) and len(cast("tuple[Any, ...]", state)) == 0)
    if where != "aggregate" and remembers and (leaves := tree_leaves(state)):
        for x in (tree_leaves(received)[0], *leaves):
            if x.shape[:1] == (1,):  # which fits all sizes: `update` would not notice other objectives
                _refuse_other_state(aggregator, received, state, where, None)
                break
    if torch.compiler.is_compiling():
        return aggregator.update(received, state)
    try:
        found: Any = aggregator.update(received, state)
        weights, new = refuse(where, *_UNPAIRED, found, "See stateless.") if isinstance(found, Tensor) else found
    except Exception as error:
        if is_out_of_memory(error):  # `init` would ask for more
            raise
        _refuse_other_state(aggregator, received, state, where, error)
        raise
    # A state that comes back as it was needs no comparison with itself; `aggregate` refuses one that is dropped.
    if new is not state and (tree_difference(state, new) if where != "aggregate" else remembers and new == ()):
        _refuse_other_state(aggregator, received, state, where, None)
    return weights, new


def narrow_device(seen: Observation, received: Any = None) -> torch.device | None:
    """The device of what is observed, if it has no float64: rules run on the host."""
    some: Any = received if seen.rows is None else seen.rows
    some = some if seen.losses is None else seen.losses
    while isinstance(some, (dict, list, tuple)) and some:  # a union is no type to torch.compile
        some = next(iter(cast("dict[Any, Any]", some).values())) if isinstance(some, dict) else some[0]
    known = isinstance(some, Tensor) and (some.is_cpu or has_float64(some.device))
    return some.device if isinstance(some, Tensor) and not known else None


def goes_to_host(aggregator: Aggregator, given: tuple[Any, ...]) -> bool:
    """Whether the rule asks to run on the host, and what it is given stands on an accelerator, under no transform."""
    if isinstance(first := given[0], Tensor) and first.is_cpu:  # as nearly always
        return False
    leaves = tree_leaves(given)
    return not (
        leaves[0].is_cpu
        or torch.compiler.is_compiling()
        or not aggregator.on_host
        or (type(leaves[0]) is not Tensor or leaves[0].is_meta)  # a fake one, which has no values to bring
        or is_capturing(leaves[0])
        or under_functorch()
        or may_be_differentiated(*leaves)
    )


def _refuse_other_state(
    aggregator: Aggregator, received: Any, state: Tree, where: str, error: Exception | None
) -> None:
    try:
        difference = tree_difference(aggregator.init(received), state)
    except CannotStartError:  # such a rule looks at the state itself
        return
    if difference:
        raise ValueError(
            f"{where}: the state must be one of this rule for the same number of objectives: {difference}. Start it "
            "anew with train_state, or by aggregate without a state."
        ) from error


def start(aggregator: Aggregator, jacobian: Jacobian, *others: Jacobian, losses: Losses = None) -> Tree:
    """The initial state of a rule, for loops that keep it from the first call on; `aggregate` makes it of None."""
    with autocast_disabled():
        return initial_state(aggregator, as_view(aggregator.view), Observation(losses, rows=jacobian, others=others))


def initial_state(aggregator: Aggregator, view: View, seen: Observation) -> Tree:
    """The initial state of a rule with this view. The caller switches autocast off."""
    received, narrow = view.receive(seen), narrow_device(seen)
    return run_on_host(aggregator.init, received, device=narrow) if narrow else aggregator.init(received)


def combine(jacobian: Jacobian, weights: Weights) -> Direction:
    """Sum the weighted rows: `direction = sum_i weights_i J_i`.

    Args:
        jacobian: pytree with leaves `[m, *p]`, or a `MultitaskJacobian`.
        weights: `[m]`; or a pytree like the Jacobian with leaves that broadcast to `[m, *p]`, one weight per entry, and
            `[m]` where all rows below a key have one weight each; a leaf may be `AffineWeights(weights, rest)`, where
            `rest` `[*p]`, from earlier rows, is added.

    Returns:
        A pytree with leaves `[*p]` in the Jacobian's dtypes, summed in at least float32. For a `MultitaskJacobian` the
        dict `{"shared": ..., "heads": ...}` that `multitask` losses take as params.

    Laws:
        Linear in the weights, and in the Jacobian except for `rest`. Non-finite values propagate, also with weight 0.
        Weights are rounded to the dtype of the sum: below float64, weights above 3e38 overflow, and those below 1e-38
        vanish. Rules that balance rows of norms 1e-19 and 1e19 give such weights.

    Example:
        >>> aggregation.combine({"w": torch.tensor([[1.0, 2.0], [3.0, 4.0]])}, torch.tensor([1.0, 0.5]))
        {'w': tensor([2.5000, 4.0000])}
    """
    return combined("combine", jacobian, weights)


def combined(where: str, jacobian: Jacobian, weights: Weights) -> Direction:
    """`combine`, whose errors name the function that the user called."""
    rows, heads = split_heads(jacobian)
    return direction_with_heads(_combined(where, rows, weights), heads)


def products_of_rows(
    where: str, rows: Tree, leaves: list[Tensor], structure: Any, needed: str, inverse: Tensor | None = None
) -> tuple[Tensor, Callable[[Weights], Direction]]:
    """The Gramian of rows with these leaves, their squared norms, or the largest of their `"magnitudes"`, and `combine`
    of them as at least float32, from one set of matrices. With an inverse `[]` or `[m]`, `combine` and the magnitudes
    are those of the products with it. The caller of either switches autocast off.
    """
    found = {"gramian": inner_products, "magnitudes": magnitudes}.get(needed, squared_norms)
    add = torch.maximum if needed == "magnitudes" else torch.add
    m = len(leaves[0])
    matrices = joined([leaf if leaf.dtype.itemsize >= 4 else leaf.float() for leaf in leaves])
    missing = inverse
    if inverse is not None and not leaves[0].is_cpu and _are_copies(matrices):  # in one launch for both
        for matrix, _ in matrices:
            matrix.mul_(per_row(inverse, matrix) if inverse.ndim else inverse)
        missing = None
    products = reduce(add, [found(matrix) for matrix, _ in matrices])
    products = products if missing is None else products * missing

    def times_inverse(leaf: Tensor) -> Tensor:
        assert inverse is not None
        return at_least_float32(leaf) * (per_row(inverse, leaf) if inverse.ndim else inverse)

    def sums(weights: Tensor) -> list[Tensor]:
        summed: list[Tensor] = []
        cast: dict[torch.dtype, Tensor] = {}
        for matrix, _ in matrices:
            if matrix.dtype not in cast:  # once for all leaves
                cast[matrix.dtype] = weights.to(matrix.device, matrix.dtype)
            own = cast[matrix.dtype]
            matrix = matrix if missing is None else times_inverse(matrix)
            summed.append(own @ matrix if matrix.is_cpu else weighted_rows(own, matrix))
        return summed

    def pullback(weights: Weights) -> Direction:
        if not isinstance(weights, Tensor) or weights.ndim > 1:
            return combined(where, rows if inverse is None else tree_map(times_inverse, rows), weights)
        check_row_weights(where, weights, m)
        pairs = zip(sums(weights), matrices, strict=True)
        parts = [part for x, (_, widths) in pairs for part in ([x] if len(widths) == 1 else x.split(widths))]
        pairs = zip(parts, leaves, strict=True)
        return tree_unflatten(structure, [x if leaf.ndim == 2 else x.reshape(leaf.shape[1:]) for x, leaf in pairs])

    return products, pullback


def _are_copies(matrices: list[tuple[Tensor, list[int]]]) -> bool:
    """Whether matrices are of several leaves each, and may be overwritten."""
    return not under_transform() and all(len(widths) > 1 and not x.requires_grad for x, widths in matrices)


def check_row_weights(where: str, weights: Tensor, m: int) -> None:
    """Refuse what is not one number per row."""
    if weights.shape != (m,) or weights.is_complex():
        found = described(weights) if weights.is_complex() else list(weights.shape)
        raise ValueError(
            f"{where}: expected one weight per row, [{m}], found {found}. "
            "Check the number of objectives of the rule and of its preference."
        )


def _combined(where: str, jacobian: Tree, weights: Weights) -> Tree:
    leaves, structure = tree_flatten(jacobian)
    m = row_count(jacobian, where, leaves)
    with autocast_disabled():
        if isinstance(weights, Tensor) and weights.ndim < 2:
            check_row_weights(where, weights, m)
            if all(leaf.dtype.itemsize <= 4 for leaf in leaves):
                weights = weights.to(leaves[0].device, torch.float32)  # once, and not for every leaf
            sums = [sharded_as(_weighted_sum(shard_of(leaf), weights), leaf, -1) for leaf in leaves]
            return tree_unflatten(structure, sums)
        weights = weights_by_leaf(weights, jacobian)
        if not torch.compiler.is_compiling() and not _are_entrywise(weights, jacobian):
            raise ValueError(
                f"{where}: weights must be one tensor [{m}], one number per row, or a pytree of tensors like the "
                f"Jacobian, found {_found(weights)}. Check what the rule returns."
            )
        return tree_map(_entrywise, jacobian, weights)


def weights_by_leaf(weights: Weights, rows: Tree) -> Weights:
    """Weights by leaf, of those that may be `[m]` for all rows below a key."""
    if isinstance(rows, Tensor):
        return weights
    if isinstance(weights, Tensor) and weights.ndim == 1:
        return tree_map(lambda _: weights, rows)
    if isinstance(weights, dict) and isinstance(rows, dict) and weights.keys() == rows.keys():
        return {key: weights_by_leaf(own, rows[key]) for key, own in weights.items()}
    return weights


def _entrywise(leaf: Tensor, weights: Tensor | AffineWeights) -> Tensor:
    if isinstance(weights, AffineWeights):
        return _entrywise_sum(leaf, weights)
    return sharded_as(_entrywise_sum(shard_of(leaf), shard_of(weights)), leaf, -1)


def _are_entrywise(weights: Weights, jacobian: Tree) -> bool:
    """Whether every leaf of the Jacobian has weights."""
    if isinstance(weights, Tensor | AffineWeights) != isinstance(jacobian, Tensor):
        return False
    try:
        by_leaf = leaves_like(tree_flatten(jacobian)[1], weights)
    except ValueError:
        return False
    return all(isinstance(x, Tensor | AffineWeights) for x in by_leaf)


def _found(weights: Weights) -> str:
    return f"a tensor {list(weights.shape)}" if isinstance(weights, Tensor) else described(weights)


def _entrywise_sum(leaf: Tensor, weights: Tensor | AffineWeights) -> Tensor:
    if isinstance(weights, AffineWeights):
        return (_entrywise_sum(at_least_float32(leaf), weights.weights) + weights.rest).to(leaf.dtype)
    if weights.shape[1:].numel() == 1:
        return _weighted_sum(leaf, weights.reshape(len(weights)))
    return (at_least_float32(leaf) * weights).sum(0).to(leaf.dtype)


def _weighted_sum(leaf: Tensor, weights: Tensor) -> Tensor:
    matrix = as_matrix(at_least_float32(leaf))
    return weighted_rows(weights.to(matrix.dtype), matrix).reshape(leaf.shape[1:]).to(leaf.dtype)
