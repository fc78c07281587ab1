"""Helpers of the laws: comparisons of results, pytrees as vectors and matrices, and transformations of Jacobians."""

from collections.abc import Callable, Iterator
from functools import wraps
from typing import Any, TypeAlias

import torch
from scipy.optimize import nnls
from torch import Tensor

from functional_jd.aggregation.aggregate import Aggregation, Aggregator, aggregate, check_rule, start
from functional_jd.aggregation.combine import combine
from functional_jd.aggregation.views import loss_count
from functional_jd.core.rows import as_matrix, per_row, row_count
from functional_jd.core.tree import tree_difference, tree_flatten, tree_leaves, tree_map
from functional_jd.core.types import AffineWeights, Jacobian, Losses, Tree
from functional_jd.torch_compat.callers import here
from functional_jd.torch_compat.watching import StateJournal, Watch

TOLERANCE = 2.0**-26

Case: TypeAlias = tuple[Jacobian, tuple[Jacobian, ...], Losses]
"""A Jacobian, the other Jacobians, and the losses."""

Law: TypeAlias = Callable[..., None]
"""`law(rule, jacobian, *others, losses=None)`; others and losses are for rules that use them."""


def also_later(law: Law) -> Law:
    """A law that a rule with memory must obey in a later step too, after a first one with the rows of the law."""

    @wraps(law)
    def run(rule: Aggregator, jacobian: Jacobian, *others: Jacobian, losses: Losses = None) -> None:
        law(rule, jacobian, *others, losses=losses)
        if tree_leaves(start(rule, jacobian, *others, losses=losses)):
            later = rule._replace(init=lambda view: rule.update(view, rule.init(view))[1])
            try:
                law(later, jacobian, *others, losses=losses)
            except AssertionError as error:
                raise AssertionError(f"in a later step: {error}") from None

    return run


def states_of(rule: Aggregator, jacobian: Jacobian, others: tuple[Jacobian, ...], losses: Losses) -> list[Tree]:
    """The first state; of a rule with memory, the one after a step with other rows too."""
    *_, (rows, other_rows, numbers) = variants(jacobian, others, losses)
    later = aggregate(rule, rows, None, *other_rows, losses=None if numbers == () else numbers).state
    return [None, later] if tree_leaves(later) else [None]


def check_case(rule: Any, jacobian: Jacobian, others: tuple[Jacobian, ...], losses: Losses) -> None:
    """Refuse other things than a rule, Jacobians of the same parameters and objectives, and their losses."""
    check_rule(rule)
    m = row_count(jacobian)
    for other in others:
        row_count(other)
        if difference := tree_difference(jacobian, other):
            raise ValueError(
                f"{here()}: expected Jacobians of the same parameters and objectives: {difference}. Draw them like the "
                "first."
            )
    if losses is not None and (found := loss_count(losses)) != m:
        raise ValueError(f"{here()}: expected one loss per row, {m} in all, found {found}. Pass m numbers.")


def flat(tree: Tree) -> Tensor:
    return torch.cat([leaf.reshape(-1).double() for leaf in tree_leaves(tree)])


def matrix(jacobian: Jacobian) -> Tensor:
    return torch.cat([as_matrix(leaf).double() for leaf in tree_leaves(jacobian)], dim=1)


def reach_of(jacobian: Jacobian, weights: Tree) -> Tensor:
    """`sum_i |weights_i J_i|`, for every entry of the direction. Weights of zero with a `rest` count as 1/m."""
    sizes = weights.abs() if is_per_row(weights) else tree_map(lambda _, weight: _size(weight), jacobian, weights)
    return flat(combine(tree_map(lambda leaf: leaf.double().abs(), jacobian), sizes))


def _size(weight: Tensor | AffineWeights) -> Tensor | AffineWeights:
    if isinstance(weight, Tensor):
        return weight.abs()
    known = weight.weights.abs()
    return AffineWeights(torch.where(known > 0, known, 1 / len(known)), weight.rest.abs())


def is_per_row(weights: Tree) -> bool:
    """Whether weights are one tensor `[m]`, and not a pytree like the Jacobian."""
    return isinstance(weights, Tensor) and weights.ndim == 1


def has_rest(jacobian: Jacobian, weights: Tree) -> bool:
    """Whether the direction is more than a weighted sum of the rows: a leaf of the weights is `AffineWeights`."""
    if is_per_row(weights):
        return False
    return any(isinstance(weight, AffineWeights) for weight in tree_flatten(jacobian)[1].flatten_up_to(weights))


def distance_from_hull(rows: Tensor, point: Tensor) -> float:
    """How far a finite point is from the convex combinations of the rows, about, by non-negative least squares."""
    system = torch.cat([rows.mT, torch.ones(1, len(rows), dtype=torch.float64)])
    return nnls(system.numpy(), [*point.tolist(), 1.0])[1]


def check_close(
    found: Aggregation,
    expected: Aggregation,
    jacobian: Jacobian,
    message: str,
    relative: float = TOLERANCE,
    absolute: float = 0.0,
) -> None:
    error = (flat(found.direction) - flat(expected.direction)).abs().max()
    reach = reach_of(jacobian, expected.weights).max()
    allowed = relative * reach + 2.0**-40 * matrix(jacobian).abs().max() + absolute
    assert error <= allowed, f"{message}: off by {error:.3g}, with a reach of {reach:.3g}"


def check_same(found: Tree, expected: Tree, message: str) -> None:
    assert structure_of(found) == structure_of(expected), message
    for x, y in zip(tree_leaves(found), tree_leaves(expected), strict=True):
        assert ((x == y) | (x.isnan() & y.isnan())).all(), message


def runs(rule: Aggregator, jacobian: Jacobian, *others: Jacobian, losses: Losses = None) -> None:
    """A law that rules break by raising: without results in eager mode, a rule has none when it is compiled."""
    state = aggregate(rule, jacobian, None, *others, losses=losses).state
    aggregate(rule, jacobian, state, *others, losses=losses)


def watched(rule: Aggregator) -> Aggregator:
    """The rule, which must not change its view, its state or its closure."""

    def update(view: Any, state: Any) -> Any:
        before = tree_map(torch.clone, view)
        found = rule.update(view, state)
        check_same(view, before, "an argument has changed: the rule writes into what it sees")
        _check_closure(rule.update, view, state)
        return found

    def init(view: Any) -> Any:
        _check_closure(rule.init, view)
        return rule.init(view)

    return rule._replace(init=init, update=update)


def _check_closure(f: Callable[..., Any], *arguments: Any) -> None:
    """Two calls write into tensors of their own, and not both into one: that would be of the closure, or global."""
    calls = [StateJournal(), StateJournal()]
    for call in calls:
        given = tree_map(torch.clone, arguments)
        with torch.random.fork_rng(devices=[]), Watch(call):
            f(*given)
    tensors = [[x for x, _, old in call.before.values() if old is not None] for call in calls]
    memory = {x.untyped_storage().data_ptr() for x in tensors[0]}
    for x in tensors[1]:
        if x.untyped_storage().data_ptr() in memory:
            raise AssertionError(f"the rule writes into a tensor {list(x.shape)} that is not part of its view or state")


def structure_of(tree: Tree) -> Any:
    """Return the structure of a pytree, and the shapes and dtypes of its leaves."""
    leaves, structure = tree_flatten(tree)
    other_types = {type(leaf).__name__ for leaf in leaves if not isinstance(leaf, Tensor)}
    assert not other_types, f"expected tensors only, found {other_types}"
    return structure, [(leaf.shape, leaf.dtype) for leaf in leaves]


def element(batch: Tree, i: int) -> Tree:
    return tree_map(lambda leaf: leaf[i], batch)


def reordered(order: Tensor, jacobian: Jacobian) -> Jacobian:
    return tree_map(lambda leaf: leaf[order.to(leaf.device)], jacobian)


def rescaled(jacobian: Jacobian, c: float | Tensor) -> Jacobian:
    factors = torch.as_tensor(c, dtype=torch.float64).reshape(-1)
    return tree_map(lambda leaf: leaf * per_row(factors.to(leaf), leaf), jacobian)


def with_moderate_norms(jacobian: Jacobian) -> Jacobian:
    """Scale rows by powers of two, so that the largest entry of each is between 2^-8 and 2^8, or zero."""
    exponents = torch.frexp(matrix(jacobian).abs().amax(1)).exponent
    return rescaled(jacobian, 2.0 ** (exponents.clamp(-7, 8) - exponents).double())


def lowered(matrices: tuple[Jacobian, ...], dtype: torch.dtype) -> list[Jacobian]:
    """Jacobians with moderate norms, rounded to a dtype."""
    return [tree_map(lambda leaf: leaf.to(dtype), with_moderate_norms(rows)) for rows in matrices]


def split_columns(leaf: Tensor) -> Tree:
    """Split the columns of a leaf into a dict of a matrix, a list and a 0-dimensional parameter."""
    x = as_matrix(leaf)
    half = x.shape[1] // 2
    return {"b": [x[:, half:-1], x[:, -1]], "a": x[:, :half].unsqueeze(1)}  # keys not sorted, on purpose


def rotated(leaf: Tensor) -> Tensor:
    """Multiply groups of four columns by an orthogonal matrix with entries 1/2 and -1/2."""
    n = leaf.shape[1:].numel()
    x = torch.nn.functional.pad(leaf.reshape(len(leaf), n), (0, -n % 4))
    signs = torch.tensor([[1, 1, 1, 1], [1, -1, 1, -1], [1, 1, -1, -1], [1, -1, -1, 1]])
    return (x.reshape(len(leaf), -1, 4) @ (signs / 2).to(leaf)).reshape(len(leaf), -1)


def with_first_entry(leaf: Tensor, value: float, row: int) -> Tensor:
    """Replace the first entry of a row."""
    changed = leaf.clone()
    changed[row].view(-1)[0] = value
    return changed


def variants(jacobian: Jacobian, others: tuple[Jacobian, ...], losses: Losses) -> list[Case]:
    """Return three cases of the same shapes; `losses=None` becomes an empty tuple, which transforms accept."""
    changes = (lambda x: x.contiguous(), lambda x: x.flip(0), lambda x: 2 * x.roll(1, 0))
    return [tree_map(change, (jacobian, others, () if losses is None else losses)) for change in changes]


def unit_rows_if_direction_is_zero(
    rule: Aggregator, jacobian: Jacobian, others: tuple[Jacobian, ...], losses: Losses
) -> Iterator[Tensor]:
    """The unit rows, in each state in which the direction is zero."""
    matrices = [with_moderate_norms(rows) for rows in (jacobian, *others)]
    for state in states_of(rule, matrices[0], tuple(matrices[1:]), losses):
        result = aggregate(rule, matrices[0], state, *matrices[1:], losses=losses)
        if (flat(result.direction).abs() <= 2.0**-40 * reach_of(matrices[0], result.weights)).all():
            yield torch.nn.functional.normalize(matrix(matrices[0]), dim=1)
