"""Views: the inputs of rules, which tell the engines what a step costs."""

from functools import reduce
from typing import Any

import torch
from torch import Tensor

from functional_jd.aggregation.moving_average import row_norms
from functional_jd.core.arguments import described
from functional_jd.core.heads import rows_of
from functional_jd.core.rows import as_matrix, cross_inner_products, inner_products, joined
from functional_jd.core.safe import sqrt_or_zero
from functional_jd.core.sharding import any_sharded, shard_of, sum_over_shards
from functional_jd.core.tree import row_count, tree_leaves, tree_names
from functional_jd.core.types import Gramian, Jacobian, Losses
from functional_jd.precision.autocast import autocast_disabled

View = Any
"""The input of a rule: a tensor, or for `full_jacobian` the Jacobian itself."""


def no_gradients(jacobian: Jacobian, *others: Jacobian, losses: Losses = None) -> Tensor:
    """The view of a rule that needs the number of rows only: float64 zeros `[m]`.

    Args:
        jacobian: pytree with leaves `[m, *p]`; only `shared` of a `MultitaskJacobian` is used.
        others: ignored.
        losses: ignored.

    Returns:
        float64 `[m]`.
    """
    rows = rows_of(jacobian)
    m = row_count(rows, "no_gradients")
    leaf = tree_leaves(rows)[0]
    return torch.zeros(m, dtype=torch.float64, device=leaf.device)


def losses(jacobian: Jacobian, *others: Jacobian, losses: Losses = None) -> Tensor:
    """The view of a rule that needs the losses: float64 `[m]`, in leaf order.

    Args:
        jacobian: ignored.
        others: ignored.
        losses: the m values: a tensor, or a pytree of tensors.

    Returns:
        float64 `[m]`.

    Raises:
        ValueError: `losses` is `None`.
    """
    return loss_vector(losses)


def gramian(jacobian: Jacobian, *others: Jacobian, losses: Losses = None) -> Gramian:
    """The inner products of the rows, `G = J J'`: float64 `[m, m]`, symmetric.

    Products and sums are in float64, whatever the dtype of the Jacobian: products of float32 numbers are then exact,
    and rows of norm 1e-30 or 1e30 neither underflow nor overflow.

    Args:
        jacobian: pytree with leaves `[m, *p]`; only `shared` of a `MultitaskJacobian` is used.
        others: ignored.
        losses: ignored.

    Returns:
        float64 `[m, m]`.

    Raises:
        TypeError, ValueError: leaves that are not tensors of rows, or disagree on m.
    """
    leaves = tree_leaves(rows_of(jacobian))
    row_count(rows_of(jacobian), "gramian", leaves)
    return gramian_of_leaves(leaves)


def gramian_of_leaves(leaves: list[Tensor]) -> Gramian:
    """`gramian` of the leaves of rows, which all have m rows."""
    with autocast_disabled(leaves):
        if any_sharded(leaves):
            return sum_over_shards([inner_products(as_matrix(shard_of(leaf))) for leaf in leaves], leaves)
        matrices = joined([as_matrix(leaf) for leaf in leaves])
        return reduce(torch.add, [inner_products(matrix) for matrix, _ in matrices])


def norms(jacobian: Jacobian, *others: Jacobian, losses: Losses = None) -> Tensor:
    """The norms of the rows: float64 `[m]`, summed in float64. A row of zeros has derivative zero.

    Args:
        jacobian: pytree with leaves `[m, *p]`; only `shared` of a `MultitaskJacobian` is used.
        others: ignored.
        losses: ignored.

    Returns:
        float64 `[m]`.

    Raises:
        TypeError, ValueError: leaves that are not tensors of rows, or disagree on m.
    """
    row_count(rows_of(jacobian), "norms")
    if any_sharded(tree_leaves(rows_of(jacobian))):
        squares = gramian(jacobian).diagonal()
        return sqrt_or_zero(squares, squares == 0)
    with autocast_disabled(jacobian):
        return row_norms(rows_of(jacobian))


def cross_gramian(jacobian: Jacobian, *others: Jacobian, losses: Losses = None) -> Tensor:
    """The inner products of the rows on two independent batches, `J J2'`: float64 `[m, m]`.

    Args:
        jacobian: pytree with leaves `[m, *p]`; only `shared` of a `MultitaskJacobian` is used.
        others: the first is the Jacobian of the same objectives on the other batch.
        losses: ignored.

    Returns:
        float64 `[m, m]`; row i belongs to `jacobian`, column j to the other.

    Raises:
        TypeError, ValueError: no other Jacobian; leaves that are not tensors of rows, or disagree on m.
    """
    if not others:
        raise ValueError(
            "aggregate: this rule needs Jacobians on two independent batches, found only one. Pass another: "
            "aggregate(rule, jacobian, state, other_jacobian)."
        )
    left, right = (rows_of(rows) for rows in (jacobian, others[0]))
    row_count(left, "cross_gramian")
    row_count(right, "cross_gramian")
    shapes, others_shapes = ([list(leaf.shape[1:]) for leaf in tree_leaves(rows)] for rows in (left, right))
    if shapes != others_shapes:
        raise ValueError(
            f"cross_gramian: expected Jacobians of the same parameters, found leaves [m, *p] with {shapes} and "
            f"{others_shapes} for *p. Compute both with jacobian_fn of the same losses."
        )
    with autocast_disabled(jacobian):
        leaves = tree_leaves(left)
        pairs = zip(leaves, tree_leaves(right), strict=True)
        products = [cross_inner_products(*(as_matrix(shard_of(leaf)) for leaf in pair)) for pair in pairs]
        return sum_over_shards(products, leaves)


def full_jacobian(jacobian: Jacobian, *others: Jacobian, losses: Losses = None) -> Jacobian:
    """The view of a rule that needs the Jacobian itself: the pytree with leaves `[m, *p]`.

    Args:
        jacobian: pytree with leaves `[m, *p]`, or a `MultitaskJacobian`.
        others: ignored.
        losses: ignored.

    Returns:
        The Jacobian; of a `MultitaskJacobian`, `shared`.

    Raises:
        TypeError, ValueError: leaves that are not tensors of rows, or disagree on m; the rows are sharded, so that no
            rank holds them.
    """
    rows = rows_of(jacobian)
    row_count(rows, "full_jacobian")
    if any_sharded(tree_leaves(rows)):
        raise ValueError(
            "aggregate: this rule needs whole rows, found rows that are sharded. Use a rule that needs the losses, the "
            "Gramian or single entries, such as upgrad, graddrop or trimmed_mean."
        )
    return rows


def jacobian_entries(jacobian: Jacobian, *others: Jacobian, losses: Losses = None) -> Jacobian:
    """The view of a rule that looks at one entry of all rows at a time: the Jacobian, of which a rank may hold shards.

    Args:
        jacobian: pytree with leaves `[m, *p]`, or a `MultitaskJacobian`.
        others: ignored.
        losses: ignored.

    Returns:
        The Jacobian; of a `MultitaskJacobian`, `shared`.

    Raises:
        TypeError, ValueError: leaves that are not tensors of rows, or disagree on m.
    """
    rows = rows_of(jacobian)
    row_count(rows, "jacobian_entries")
    return rows


def jacobian_and_losses(jacobian: Jacobian, *others: Jacobian, losses: Losses = None) -> tuple[Jacobian, Tensor]:
    """The view of a rule that needs both `full_jacobian` and `losses`."""
    return full_jacobian(jacobian), loss_vector(losses)


def gramian_and_losses(jacobian: Jacobian, *others: Jacobian, losses: Losses = None) -> tuple[Gramian, Tensor]:
    """The view of a rule that needs both `gramian` and `losses`."""
    return gramian(jacobian), loss_vector(losses)


def norms_and_losses(jacobian: Jacobian, *others: Jacobian, losses: Losses = None) -> tuple[Tensor, Tensor]:
    """The view of a rule that needs both `norms` and `losses`."""
    return norms(jacobian), loss_vector(losses)


def loss_vector(losses: Losses) -> Tensor:
    if losses is None:
        raise ValueError(
            "aggregate: this rule needs the losses, found none. Pass them: aggregate(rule, jacobian, losses=losses)."
        )
    loss_count(losses, "losses")
    return torch.cat([leaf.reshape(-1).double() for leaf in tree_leaves(losses)])


def loss_count(losses: Losses, where: str) -> int:
    """Return m, the number of losses.

    Raises:
        TypeError: a leaf is not a floating-point tensor.
        ValueError: there are none.
    """
    leaves = tree_leaves(losses)
    for index, leaf in enumerate(leaves):
        if not isinstance(leaf, Tensor) or not leaf.is_floating_point() or leaf.layout != torch.strided:
            raise TypeError(
                f"{where}: losses must be floating-point tensors, found {described(leaf)} in "
                f"{tree_names(losses)[index]!r}. Pass what the loss function returned."
            )
    if not leaves:
        raise ValueError(f"{where}: expected at least one loss, found none. Pass what the loss function returned.")
    return sum(leaf.numel() for leaf in leaves)


def needs_no_rows(aggregator: Any) -> bool:
    """Whether a rule needs no gradients: one weighted backward pass serves it."""
    return aggregator.view in (no_gradients, losses)


def norms_suffice(aggregator: Any) -> bool:
    """Whether a rule needs no inner products of different rows."""
    return aggregator.view in (norms, norms_and_losses)


def inner_products_suffice(aggregator: Any) -> bool:
    """Whether a rule needs the Gramian or its diagonal, and no rows."""
    return norms_suffice(aggregator) or aggregator.view in (gramian, gramian_and_losses)


def view_of_products(aggregator: Any, products: Tensor, losses: Losses) -> View:
    """The view of a rule for which `inner_products_suffice`, without rows.

    Args:
        aggregator: the rule.
        products: the Gramian `[m, m]`; where `norms_suffice`, its diagonal `[m]`.
        losses: the m values.

    Returns:
        What the rule's view returns for rows with these inner products.
    """
    seen = products if products.ndim == 2 else sqrt_or_zero(products, products == 0)
    return seen if aggregator.view in (gramian, norms) else (seen, loss_vector(losses))


def gramian_in(aggregator: Any, view: View) -> Gramian | tuple[()]:
    """The Gramian that a rule received, `()` for rules that need none."""
    return view if aggregator.view is gramian else view[0] if aggregator.view is gramian_and_losses else ()
