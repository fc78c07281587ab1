"""Aggregation: a rule maps the Jacobian to one weight per row; `aggregate` returns the weighted sum of the rows."""

from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple, cast

import torch
from torch import Tensor

from functional_jd.aggregation.combine import combined, weights_to_sum
from functional_jd.aggregation.observation import Observation
from functional_jd.aggregation.views import View, as_view, gramian, loss_count, loss_vector
from functional_jd.core.arguments import Domain, here, refuse
from functional_jd.core.float64 import has_float64
from functional_jd.core.heads import rows_of
from functional_jd.core.host import is_capturing, run_on_host
from functional_jd.core.record_display import displayed_as, outline
from functional_jd.core.rows import per_row, row_count
from functional_jd.core.sharding import agreed, shard_of
from functional_jd.core.tree import any_sharded, tree_difference, tree_leaves, tree_map
from functional_jd.core.types import Direction, Jacobian, Losses, Tree, Weights
from functional_jd.precision.autocast import autocast_disabled
from functional_jd.solvers.lcp import can_be_launched
from functional_jd.solvers.search import may_be_differentiated
from functional_jd.torch_compat.slow_path import is_out_of_memory
from functional_jd.torch_compat.torch_internals import under_functorch


@displayed_as(outline)
class Aggregator(NamedTuple):
    """An aggregation rule: three functions; its hyper-parameters live in their closures.

    Builders raise TypeError or ValueError for hyper-parameters that do not fit. A hyper-parameter of another length
    than the number of objectives, or a view that lacks losses or batches, raises when the rule is called.

    For the rules of this package, unless their page says otherwise: weights are float64 `[m]`. They are differentiable
    with respect to all that the rule receives, its state and its hyper-parameters. A hyper-parameter is a number, or a
    tensor `[]`; one number per objective is a sequence, or a tensor `[m]`, which is copied. Input that is not finite
    gives weights, and a state, that are not finite: keep the previous state, as `step` does. Off the CPU,
    `solver="host"` computes on the host, with one copy there and one back; `"device"` stays; `"auto"` stays where one
    launch can search: on a GPU with Triton, a C compiler and Python's headers, for up to 64 objectives.

    Attributes:
        view: a `View`: `no_gradients`, `losses`, `norms`, `gramian`, `cross_gramian`, `full_jacobian`, or one made of
            these: what the rule needs, and so what a step costs. Any other function `view(jacobian, *others,
            losses=None)` is given the rows.
        init: `init(view) -> state`, a pytree of tensors; `()` for a stateless rule.
        update: `update(view, state) -> (weights, state)`; weights `[m]`, or a pytree like the Jacobian for entrywise
            weights.
        on_host: whether `update` is to run on the host if the view stands on an accelerator: one copy there and one
            back, for more than some 40 launches. Not under transforms. `"auto"`: only where no launch can search.
        sensitivity: the largest norm that a row can add to the direction, whatever the rows, which `noised` needs; else
            None.
        takes: its name and the losses that it can take, if these are not all; `train_state` raises for others. If it
            receives some of the losses only, further a function from these to the places of its own.
    """

    view: View | Callable[..., Any]
    init: Callable[[Any], Tree]
    update: Callable[[Any, Tree], tuple[Weights, Tree]]
    on_host: bool | Literal["auto"] = False
    sensitivity: float | Tensor | None = None
    takes: tuple[str, Domain] | tuple[str, Domain, Callable[[Losses], Sequence[int]]] | None = None


@displayed_as(outline)
class Aggregation(NamedTuple):
    """The result of `aggregate`.

    Attributes:
        direction: pytree like params, in their dtypes: the weighted sum of the rows.
        weights: `[m]`; a dict of those of groups; or a pytree like the Jacobian.
        state: the rule's state for the next call.
    """

    direction: Direction
    weights: Weights
    state: Tree


def aggregate(
    aggregator: Aggregator, jacobian: Jacobian, state: Tree = None, *others: Jacobian, losses: Losses = None
) -> Aggregation:
    """Combine the rows of a Jacobian into one direction with the weights of a rule.

    `direction = sum_i weights_i J_i`, with `weights, state = update(view(J), state)`. Composes with all transforms.

    Args:
        aggregator: the rule.
        jacobian: pytree with floating-point leaves `[m, *p]`; or a `MultitaskJacobian`: the rule weights `shared`, and
            `heads` is returned unchanged.
        state: the state that the last call returned; `None` for the rule's initial state.
        others: Jacobians of the same objectives on independent batches, for the rules that need `cross_gramian`.
        losses: the m values, for the rules that need `losses`.

    Returns:
        `Aggregation(direction, weights, state)`. If the Jacobian is not finite, the direction is not finite either.

    Raises:
        TypeError: `aggregator` is not an `Aggregator`, or a leaf is not a floating-point tensor of rows.
        ValueError: rows, weights, losses or a state that disagree on m, or `others` or `losses` that are missing.

    Example:
        >>> jacobian = torch.tensor([[2.0, 0.0], [-1.0, 1.0]])
        >>> direction, weights, state = aggregate(upgrad(), jacobian)
        >>> direction, jacobian @ direction  # no row conflicts with it
        (tensor([0.5000, 1.0000]), tensor([1.0000, 0.5000]))
    """
    check_rule(aggregator)
    m, *rest = (row_count(rows_of(rows)) for rows in (jacobian, *others))
    if any(other != m for other in rest):
        raise ValueError(
            f"aggregate: all Jacobians need the same number of rows, found {' and '.join(map(str, (m, *rest)))}. "
            "Compute them with the same losses on independent batches."
        )
    if losses is not None and (found := loss_count(losses)) != m:
        raise ValueError(f"aggregate: expected one loss per row, {m} in all, found {found}. Pass the Jacobian's.")
    view, seen = as_view(aggregator.view), Observation(losses, rows=jacobian, others=others)
    leaves = tree_leaves(rows_of(jacobian))

    def update(received: Any, products: Any, state: Tree) -> tuple[Weights, Weights, Tree]:
        weights, state = apply_rule(aggregator, received, state, seen._replace(products=products), fixed=False)
        return *weights_to_sum(weights, products, leaves), state

    with autocast_disabled():
        received, receive = view.receive(seen), gramian.receive
        by_gramian = view.products == "gramian" and view.groups is None
        products = (received if view.receive is receive else receive(seen)) if by_gramian else None
        weights, own, state = where_it_runs(aggregator, seen, update, received, products, state, apart=True)
        return Aggregation(combined(jacobian, own, wide=products is not None), weights, state)


def no_memory(_: Any) -> Tree:
    """The initial state of a rule without memory."""
    return ()


def check_rule(aggregator: Any) -> None:
    """Raise TypeError unless `aggregator` is an `Aggregator`, which an uncalled builder is not."""
    if not isinstance(aggregator, Aggregator):
        refuse("aggregator", "a rule", aggregator, "Call its builder: upgrad().")


def check_within(rule: Any) -> View:
    """The view of a rule in another one, which must be one for all parameters."""
    check_rule(rule)
    view = as_view(rule.view)
    if view.groups is not None:
        raise ValueError(f"{here()}: rule must be for all parameters, found a rule by groups. Take one in each group.")
    return view


def row_weights(weights: Weights) -> Tensor:
    """Weights `[m]` of a rule in another one. Raises ValueError for those of single entries."""
    if isinstance(weights, Tensor) and weights.ndim == 1:
        return weights
    raise ValueError(
        f"{here()}: rule must have one weight per row, found weights of entries or groups. Take it in each group: "
        "grouped({name: rule, ...})."
    )


def _updated(aggregator: Aggregator, received: Any, state: Tree) -> tuple[Weights, Tree]:
    found: Any = aggregator.update(received, state)
    if isinstance(found, Tensor):
        refuse("what the rule's update(view, memory) returns", "a pair, (weights, memory)", found, "See stateless.")
    return found


def apply_rule(
    aggregator: Aggregator, received: Any, state: Tree, seen: Observation | None = None, *, fixed: bool = True
) -> tuple[Weights, Tree]:
    """The weights and the next state of a rule, from the data that its view receives. An objective whose loss
    is exactly 0, with a row of zeros, is absent: what the rule remembers of it stays. The caller switches autocast off.

    Raises ValueError for a state of another rule or for other objectives, if `update` raises or drops it; if it is
    `fixed`, as in a step, also for one that does not come back with its structure, shapes and dtypes.
    """
    if state is None:
        initial = aggregator.init(received)
        weights, new = _updated(aggregator, received, initial)
        return weights, _remembered(initial, new, seen) if tree_leaves(new) else new
    remembers = not (isinstance(state, tuple) and len(cast("tuple[Any, ...]", state)) == 0)
    if fixed and remembers and (leaves := tree_leaves(state)):
        for x in (tree_leaves(received)[0], *leaves):
            if getattr(x, "shape", ())[:1] == (1,):  # which fits all sizes: `update` would not notice other objectives
                _refuse_other_state(aggregator, received, state, None)
                break
    if torch.compiler.is_compiling():
        weights, new = aggregator.update(received, state)
        return weights, _remembered(state, new, seen) if remembers else new
    try:
        weights, new = _updated(aggregator, received, state)
    except Exception as error:
        if is_out_of_memory(error):  # `init` would ask for more
            raise
        _refuse_other_state(aggregator, received, state, error)
        raise
    if new is not state and (difference := tree_difference(state, new) if fixed else remembers and new == ()):
        _refuse_other_state(aggregator, received, state, None)
        if fixed:
            raise ValueError(
                f"{here()}: the memory that the rule's update returns must be like that of its init, {difference}. "
                "Keep its structure, shapes and dtypes."
            )
    return weights, _remembered(state, new, seen) if remembers and new is not state else new


def _remembered(old: Tree, new: Tree, seen: Observation | None) -> Tree:
    """The new memory, with the old one of absent objectives: of numbers with one entry, row or column for each."""
    if seen is None or seen.losses is None:
        return new
    square = isinstance(seen.products, Tensor) and seen.products.ndim == 2  # else `[m, m]` may be rows of m entries
    return tree_map(unless(absent_objectives(seen), square), old, new)


def absent_objectives(seen: Observation) -> Tensor:
    """Which objectives have a loss of exactly 0, and a row of zeros if rows are known: bool `[m]`."""
    absent = loss_vector(seen.losses) == 0
    known = seen.products if seen.rows is None or seen.products is not None else rows_of(seen.rows)
    leaves = [] if known is None else tree_leaves(known)
    for own in leaves:
        absent = absent & (shard_of(own).reshape(len(absent), -1) == 0).all(1).to(absent.device)
    return agreed(absent, leaves) if any_sharded(leaves) else absent


def unless(absent: Tensor, square: bool) -> Callable[[Tensor, Tensor], Tensor]:
    """Chooses the old numbers of absent objectives `[m]`; `square`: `[m, m]` has a row and a column for each."""

    def chosen(before: Tensor, after: Tensor) -> Tensor:
        if not after.is_floating_point() or after.shape[:1] != absent.shape:
            return after
        stays, both = per_row(absent.to(after.device), after), square and after.shape == 2 * absent.shape
        return torch.where(stays | absent.to(after.device) if both else stays, before, after)

    return chosen


def where_it_runs(
    aggregator: Aggregator, seen: Observation, function: Callable[..., Any], *given: Any, apart: bool, auto: bool = True
) -> Any:
    """`function(*given)`, on the host, by a copy each way, if the rule is `on_host` or the device has no float64.
    `apart`: each result with memory of its own, as users need it. `auto`: one launch may take the place of the host,
    which alone makes weights that cancel smaller, as `weights_to_sum` does.
    """
    some: Any = given[0] if seen.rows is None else seen.rows
    some = some if seen.losses is None else seen.losses
    while isinstance(some, (dict, list, tuple)) and some:  # a union is no type to torch.compile
        some = next(iter(cast("dict[Any, Any]", some).values())) if isinstance(some, dict) else some[0]
    known = isinstance(some, Tensor) and (some.is_cpu or has_float64(some.device))
    narrow = some.device if isinstance(some, Tensor) and not known else None
    if narrow is None and not (aggregator.on_host and _goes_to_host(given, auto and aggregator.on_host == "auto")):
        return function(*given)
    return run_on_host(function, *given, device=narrow, apart=apart)


def _goes_to_host(given: tuple[Any, ...], auto: bool) -> bool:
    """Whether what a rule is given stands on an accelerator, under no transform, and no launch can take its place."""
    if isinstance(first := given[0], Tensor) and first.is_cpu:  # as nearly always
        return False
    leaves = tree_leaves(given)
    return not (
        leaves[0].is_cpu
        or torch.compiler.is_compiling()
        or (type(leaves[0]) is not Tensor or leaves[0].is_meta)  # a fake one, which has no values to bring
        or is_capturing(leaves[0])
        or under_functorch()
        or may_be_differentiated(*leaves)
        or (auto and can_be_launched(leaves[0]))
    )


def _refuse_other_state(aggregator: Aggregator, received: Any, state: Tree, error: Exception | None) -> None:
    try:
        difference = tree_difference(aggregator.init(received), state)
    except ValueError:  # a rule that cannot start looks at the state itself
        return
    if difference:
        raise ValueError(
            f"{here()}: the state must be one of this rule for the same number of objectives: {difference}. Start it "
            "again with train_state, or by aggregate without a state. For an objective that a batch does not have, "
            "return 0 * another loss."
        ) from error


def start(aggregator: Aggregator, jacobian: Jacobian, *others: Jacobian, losses: Losses = None) -> Tree:
    """The initial state of a rule, for loops that keep it from the first call on; `aggregate` makes it of None."""
    with autocast_disabled():
        return initial_state(aggregator, as_view(aggregator.view), Observation(losses, rows=jacobian, others=others))


def initial_state(aggregator: Aggregator, view: View, seen: Observation) -> Tree:
    """The initial state of a rule with this view. The caller switches autocast off."""
    return where_it_runs(aggregator, seen, aggregator.init, view.receive(seen), apart=False)
