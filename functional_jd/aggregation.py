"""Aggregation: a rule looks at the Jacobian and says how much each row counts; `aggregate` adds the rows up."""

from collections.abc import Callable
from functools import reduce
from typing import Any, NamedTuple

import torch
from torch import Tensor

from functional_jd.precision import full_precision
from functional_jd.rows import as_matrix, crossed, squared, wide
from functional_jd.summary import outline, shown
from functional_jd.tree import row_count, tree_leaves, tree_map
from functional_jd.types import Carried, Direction, Gramian, Jacobian, Losses, MultitaskJacobian, Tree, Weights

View = Any
"""What a rule looks at: a tensor, or for `whole` the Jacobian itself."""


@shown(outline)
class Aggregator(NamedTuple):
    """An aggregation rule: three functions; its hyper-parameters live in their closures.

    Attributes:
        view: `view(jacobian, *others, losses=None)`: `blank`, `losses`, `gramian`, `cross_gramian` or `whole`. It
            tells the engines what the rule looks at, hence what a step costs.
        init: `init(view) -> state`, a pytree of tensors; `()` for a rule that remembers nothing.
        update: `update(view, state) -> (weights, state)`; weights `[m]`, or a pytree like the Jacobian to count entry
            by entry.
    """

    view: Callable[..., View]
    init: Callable[[View], Tree]
    update: Callable[[View, Tree], tuple[Weights, Tree]]


@shown(outline)
class Aggregation(NamedTuple):
    """What `aggregate` returns.

    Attributes:
        direction: pytree like params, in their dtypes: the weighted sum of the rows.
        weights: float64 `[m]`, or a pytree like the Jacobian.
        state: what the rule remembers, for the next call.
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
    """Combine the rows of a Jacobian into one direction, as a rule says.

    `direction = sum_i weights_i J_i`, with `weights, state = update(view(J), state)`.

    Args:
        aggregator: the rule.
        jacobian: pytree with leaves `[m, *p]`, float16, bfloat16, float32 or float64; or a `MultitaskJacobian`, of
            which the rule weighs `shared`, while `heads` pass through.
        state: what the last call returned; `None` starts the rule.
        others: Jacobians of the same objectives on independent batches, for the rules that look at `cross_gramian`.
        losses: the m values, for the rules that look at `losses`.

    Returns:
        `Aggregation(direction, weights, state)`. A non-finite Jacobian gives a non-finite direction, never an
        exception.

    Raises:
        TypeError: a leaf is no floating-point tensor of rows.
        ValueError: no rows; leaves, Jacobians, weights or losses that disagree on m; or `others` or `losses` missing
            that the rule needs.

    Laws:
        Pure; equal for a tree and for its flattened rows; composes with vmap, grad, jvp and compile.
    """
    check_rule(aggregator, "aggregate")
    m = row_count(_rows(jacobian), "aggregate")
    for other in others:
        if row_count(_rows(other), "aggregate") != m:
            raise ValueError(
                f"aggregate: all Jacobians need the same number of rows, found {m} and "
                f"{row_count(_rows(other), 'aggregate')}. Compute them with the same losses on independent batches."
            )
    if losses is not None and (found := sum(leaf.numel() for leaf in tree_leaves(losses))) != m:
        raise ValueError(
            f"aggregate: expected one loss per row, {m} in all, found {found}. Hand over the losses that the Jacobian "
            "came with."
        )
    weights, state = weigh(aggregator, jacobian, state, *others, losses=losses)
    return Aggregation(combine(jacobian, weights), weights, state)


def check_rule(aggregator: Any, where: str) -> None:
    """Refuse what is no rule, such as a builder that was not called."""
    if not isinstance(aggregator, Aggregator):
        raise TypeError(
            f"{where}: aggregator must be a rule, found {type(aggregator).__name__}. Call its builder: upgrad()."
        )


def weigh(
    aggregator: Aggregator, jacobian: Jacobian, state: Tree = None, *others: Jacobian, losses: Losses = None
) -> tuple[Weights, Tree]:
    """The weights that `aggregate` adds up the rows with, and the next state."""
    with full_precision(jacobian):
        view = aggregator.view(jacobian, *others, losses=losses)
        return aggregator.update(view, aggregator.init(view) if state is None else state)


def start(aggregator: Aggregator, jacobian: Jacobian, *others: Jacobian, losses: Losses = None) -> Tree:
    """The state that a rule starts with: what `aggregate` makes of `state=None` before its first update."""
    with full_precision(jacobian):
        return aggregator.init(aggregator.view(jacobian, *others, losses=losses))


def combine(jacobian: Jacobian, weights: Weights) -> Direction:
    """Add up the rows: `direction = sum_i weights_i J_i`.

    Args:
        jacobian: pytree with leaves `[m, *p]`, or a `MultitaskJacobian`.
        weights: `[m]`; or a pytree like the Jacobian with leaves that broadcast to `[m, *p]`, one weight per entry; a
            leaf may be `Carried(weights, rest)`, where `rest` `[*p]`, from earlier rows, is added.

    Returns:
        A pytree with leaves `[*p]` in the Jacobian's dtypes, added up in at least float32. For a `MultitaskJacobian`
        the dict `{"shared": ..., "heads": ...}` that `multitask` losses take as params.

    Laws:
        Linear in the weights; in the Jacobian too, but for what is carried. What is not finite stays so, also with
        weight 0.
    """
    if isinstance(jacobian, MultitaskJacobian):
        return {"shared": combine(jacobian.shared, weights), "heads": jacobian.heads}
    m = row_count(jacobian, "combine")
    with full_precision(jacobian):
        if isinstance(weights, Tensor) and weights.ndim < 2:
            if weights.shape != (m,):
                raise ValueError(
                    f"combine: expected one weight per row, [{m}], found {list(weights.shape)}. "
                    "Does the rule, or its preference, belong to another number of objectives?"
                )
            return tree_map(lambda leaf: _weighted_sum(leaf, weights), jacobian)
        bare = isinstance(weights, Tensor | Carried)
        if bare != isinstance(jacobian, Tensor) or not all(isinstance(x, Tensor) for x in tree_leaves(weights)):
            found = f"a tensor {list(weights.shape)}" if isinstance(weights, Tensor) else type(weights).__name__
            raise ValueError(
                f"combine: weights must be one tensor [{m}], one number per row, or a pytree of tensors like the "
                f"Jacobian, found {found}. What does the rule return?"
            )
        return tree_map(_counted_sum, jacobian, weights)


def blank(jacobian: Jacobian, *others: Jacobian, losses: Losses = None) -> Tensor:
    """The view of a rule that looks at nothing but the number of rows: float64 zeros `[m]`.

    Args:
        jacobian: pytree with leaves `[m, *p]`; of a `MultitaskJacobian`, `shared` counts.
        others: not looked at.
        losses: not looked at.

    Returns:
        float64 `[m]`.
    """
    leaf = tree_leaves(_rows(jacobian))[0]
    return torch.zeros(leaf.shape[0], dtype=torch.float64, device=leaf.device)


def losses(jacobian: Jacobian, *others: Jacobian, losses: Losses = None) -> Tensor:
    """The view of a rule that looks at the losses: float64 `[m]`, in leaf order.

    Args:
        jacobian: not looked at.
        others: not looked at.
        losses: the m values: a tensor, or a pytree of tensors.

    Returns:
        float64 `[m]`.

    Raises:
        ValueError: there are no losses.
    """
    return _values(losses)


def gramian(jacobian: Jacobian, *others: Jacobian, losses: Losses = None) -> Gramian:
    """The inner products of the rows, `G = J J'`: float64 `[m, m]`, symmetric.

    Products and sums are in float64, whatever the dtype of the Jacobian: products of float32 numbers are exact there,
    and neither rows of norm 1e-30 nor of norm 1e30 leave the range.

    Args:
        jacobian: pytree with leaves `[m, *p]`; of a `MultitaskJacobian`, `shared` counts.
        others: not looked at.
        losses: not looked at.

    Returns:
        float64 `[m, m]`.

    Raises:
        TypeError, ValueError: leaves that are no rows, or disagree on m.
    """
    row_count(_rows(jacobian), "gramian")
    with full_precision(jacobian):
        return reduce(torch.add, [squared(as_matrix(leaf)) for leaf in tree_leaves(_rows(jacobian))])


def cross_gramian(jacobian: Jacobian, *others: Jacobian, losses: Losses = None) -> Tensor:
    """The inner products of the rows on two independent batches, `J J2'`: float64 `[m, m]`.

    Args:
        jacobian: pytree with leaves `[m, *p]`; of a `MultitaskJacobian`, `shared` counts.
        others: the first of them is the same for the other batch.
        losses: not looked at.

    Returns:
        float64 `[m, m]`; row i belongs to `jacobian`, column j to the other.

    Raises:
        TypeError, ValueError: no other; leaves that are no rows, or disagree on m.
    """
    if not others:
        raise ValueError(
            "aggregate: this rule compares Jacobians on independent batches, found only one. Hand over another: "
            "aggregate(rule, jacobian, state, other_jacobian)."
        )
    row_count(_rows(jacobian), "cross_gramian")
    with full_precision(jacobian):
        pairs = zip(tree_leaves(_rows(jacobian)), tree_leaves(_rows(others[0])), strict=True)
        return reduce(torch.add, [crossed(as_matrix(left), as_matrix(right)) for left, right in pairs])


def whole(jacobian: Jacobian, *others: Jacobian, losses: Losses = None) -> Jacobian:
    """The view of a rule that looks at the Jacobian itself: the pytree with leaves `[m, *p]`.

    Args:
        jacobian: pytree with leaves `[m, *p]`, or a `MultitaskJacobian`.
        others: not looked at.
        losses: not looked at.

    Returns:
        The Jacobian; of a `MultitaskJacobian`, `shared`.
    """
    return _rows(jacobian)


def jacobian_and_losses(jacobian: Jacobian, *others: Jacobian, losses: Losses = None) -> tuple[Jacobian, Tensor]:
    """The view of a rule that looks at `whole` and at `losses`."""
    return whole(jacobian), _values(losses)


def stateless(view: Callable[..., View], weigh: Callable[[View], Weights]) -> Aggregator:
    """A rule that remembers nothing: `weigh(view) -> weights`.

    Args:
        view: what it looks at: `blank`, `losses`, `gramian`, `cross_gramian` or `whole`.
        weigh: `weigh(view) -> weights`, pure: `[m]`, or a pytree like the Jacobian to count entry by entry.

    Returns:
        An `Aggregator` whose state is `()`.

    Example:
        >>> def shy(temperature=1.0):
        ...     return stateless(gramian, lambda G: torch.softmax(-G.diagonal() / temperature, dim=0))
    """
    return Aggregator(view, lambda _: (), lambda seen, state: (weigh(seen), state))


def scalarized(s: Callable[[Tensor], Tensor]) -> Aggregator:
    """The rule that descends one number made of the losses: any differentiable scalarization.

    `weights_i = ds / dlosses_i`, so `direction = d s(losses(params)) / d params`

    Args:
        s: `s(losses [m]) -> scalar`, pure and differentiable. It sees the losses in float64.

    Returns:
        A rule that looks at the losses and remembers nothing.

    Raises:
        TypeError: `s` is not callable.
        ValueError: when called, `s` gives no scalar.

    Laws:
        The direction is the gradient of `s` after the losses; for `multitask` losses on the trunk. Where `s` is not
        differentiable or not defined, so is the direction: infinite or NaN, never an exception.

    Example:
        >>> def worst():
        ...     return scalarized(torch.amax)
    """
    if not callable(s):
        raise TypeError(f"scalarized: s must be a function, found {type(s).__name__}. Pass s(losses) itself.")

    def scalar(values: Tensor) -> Tensor:
        number = s(values)
        if not isinstance(number, Tensor) or number.ndim:
            found = f"shape {list(number.shape)}" if isinstance(number, Tensor) else type(number).__name__
            raise ValueError(
                f"scalarized: s must give one scalar tensor, found {found}. Reduce it, for instance with .sum()."
            )
        return number

    return stateless(losses, torch.func.grad(scalar))


def _values(losses: Losses) -> Tensor:
    if losses is None:
        raise ValueError(
            "aggregate: this rule looks at the losses, found none. "
            "Hand them over: aggregate(rule, jacobian, losses=losses)."
        )
    return torch.cat([leaf.reshape(-1).double() for leaf in tree_leaves(losses)])


def _rows(jacobian: Jacobian) -> Tree:
    return jacobian.shared if isinstance(jacobian, MultitaskJacobian) else jacobian


def _counted_sum(leaf: Tensor, weights: Tensor | Carried) -> Tensor:
    if isinstance(weights, Carried):
        return (_counted_sum(wide(leaf), weights.weights) + weights.rest).to(leaf.dtype)
    if weights.shape[1:].numel() == 1:
        return _weighted_sum(leaf, weights.reshape(len(weights)))
    return (wide(leaf) * weights).sum(0).to(leaf.dtype)


def _weighted_sum(leaf: Tensor, weights: Tensor) -> Tensor:
    matrix = as_matrix(wide(leaf))
    return (weights.to(matrix.dtype) @ matrix).reshape(leaf.shape[1:]).to(leaf.dtype)
