"""Views: what rules receive, as data, which tells the engines what a step costs."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import reduce
from typing import Any, Literal

import torch
from torch import Tensor

from functional_jd.aggregation.observation import Observation
from functional_jd.core.arguments import check_type, described, here, refuse
from functional_jd.core.float64 import has_float64, on_wide_device
from functional_jd.core.heads import rows_of
from functional_jd.core.names import objective_names
from functional_jd.core.rows import (
    as_matrix,
    at_least_float32,
    cross_inner_products,
    inner_products,
    joined,
    per_row,
    row_count,
)
from functional_jd.core.safe import sqrt_or_zero
from functional_jd.core.sharding import shard_of, sharded_as, sum_over_shards
from functional_jd.core.tree import any_sharded, tree_leaves, tree_map, tree_names
from functional_jd.core.types import Gramian, Jacobian, Losses
from functional_jd.precision.autocast import autocast_disabled

Need = Literal["none", "norms", "gramian", "rows"]

# From the least to the most.
_NEEDS: dict[Need, str] = {
    "none": "no gradients",
    "norms": "the norms of the rows",
    "gramian": "inner products of rows",
    "rows": "the rows themselves",
}


class View:
    """The input of a rule: data, and a function of the Jacobian.

    `view(jacobian, *others, losses=None)` returns it for rows that are known, with leaves `[m, *p]`; of a
    `MultitaskJacobian`, for `shared`.

    Attributes:
        receive: `receive(observation)` returns what the rule receives. For one of your own take `map` of a view:
            `observation.products` is None if the rows are known, else float64 `[m, m]`, or `[m]`, *squared* norms.
        products: what it takes of the rows: `"none"`, their `"norms"`, their `"gramian"`, or the `"rows"` themselves.
        losses: whether it takes the losses.
        batches: of how many independent batches it takes rows.
        groups: for a rule of each top-level key of the parameters, its view; else `None`.
        passes: how many backward passes give the direction, where `products` is `"none"`.
        inner_products_suffice: whether the rule needs inner products of rows, or norms, and no rows.
    """

    def __init__(
        self,
        receive: Callable[[Observation], Any],
        products: Need,
        *,
        losses: bool = False,
        batches: int = 1,
        groups: "Mapping[str, View] | None" = None,
        passes: int = 1,
    ):
        self.receive, self.losses, self.batches = receive, losses, batches
        self.products: Need = products
        self.groups, self.passes = groups, passes
        self.objectives: Literal["all", "some", "reached"] = "all"  # of which it takes the rows
        self.inner_products_suffice = products in ("norms", "gramian")
        self.__name__, self.__doc__ = getattr(receive, "__name__", "view"), receive.__doc__

    def __call__(self, jacobian: Jacobian, *others: Jacobian, losses: Losses = None) -> Any:
        # What is no Jacobian is refused as one without rows: None stands for rows that an engine did not form.
        return self.receive(Observation(losses, rows=() if jacobian is None else jacobian, others=others))

    def __repr__(self) -> str:
        return self.__name__

    def map(self, f: Callable[[Any], Any]) -> "View":
        """The view whose rule receives `f` of the data of this one, at the same cost."""

        def mapped(seen: Observation) -> Any:
            return f(self.receive(seen))

        return self._like(mapped)

    def _like(self, receive: Callable[[Observation], Any], losses: bool = False, need: Need = "none") -> "View":
        more: dict[str, Any] = {"batches": self.batches, "groups": self.groups, "passes": self.passes}
        return View(receive, most([self.products, need]), losses=self.losses or losses, **more)

    @property
    def needs(self) -> str:
        """The needs of the rule, in words."""
        by_group = " of each group" if self.groups else ""
        return _NEEDS[self.products] + by_group + " and the losses" * (self.losses and self.products != "none")


def as_view(given: Any) -> View:
    """A view; of a bare function `f(jacobian, *others, losses)`, which says nothing of its needs, one of rows."""
    if isinstance(given, View):
        return given

    def receive(seen: Observation) -> Any:
        return given(seen.rows, *seen.others, losses=seen.losses)

    found = View(receive, "rows", losses=True)
    found.__name__ = getattr(given, "__name__", repr(given))
    return found


def most(needs: Iterable[Need]) -> Need:
    """The largest of some needs."""
    return max(needs, key=list(_NEEDS).index)


def beside(view: View, need: Need, receive: Callable[[Observation], Any], *, losses: bool = False) -> View:
    """The view of a rule around another one, which receives `receive(seen)`. It `need`s so much of the rows at least,
    and `losses`. The rule within receives `view.receive(narrowed(seen, view.products))`.
    """
    return view._like(receive, losses, need)  # pyright: ignore[reportPrivateUsage]


def narrowed(seen: Observation, need: Need) -> Observation:
    """The observation with squared norms instead of a Gramian, if a rule needs no more."""
    if need == "norms" and seen.products is not None and seen.products.ndim == 2:
        return seen._replace(products=seen.products.diagonal())
    return seen


def divided(seen: Observation, sizes: Tensor) -> Observation:
    """The observation of rows that are divided by sizes `[m]`; losses and the pullback stay."""
    own = lambda leaf: per_row(sizes.to(leaf.device, at_least_float32(leaf).dtype), leaf)
    rows = lambda jacobian: tree_map(lambda leaf: sharded_as(shard_of(leaf) / own(leaf), leaf), jacobian)
    known, others = seen.rows is not None, tuple(rows(rows_of(x)) for x in seen.others)
    squares = sizes.square() if isinstance(seen.products, Tensor) and seen.products.ndim == 1 else sizes.outer(sizes)
    products = None if seen.products is None else seen.products / squares
    return seen._replace(products=products, rows=rows(rows_of(seen.rows)) if known else None, others=others)


def indices_of(argument: str, chosen: Iterable[str | int], losses: Losses, m: int) -> list[int]:
    """The places of some of m objectives, by name or index. Raises ValueError for one that is not there."""
    names = objective_names(losses) if losses is not None else ()
    known = {**dict(zip(names, range(m), strict=False)), **{i: i for i in range(m)}}
    if missing := [each for each in chosen if each not in known]:
        cure = "Pass losses as a dict with these names: objective_names(losses) lists them."
        refuse(argument, f"indices below {m} or names of {names[:5]}", missing[0], cure, ValueError)
    return [known[each] for each in chosen]


def places_of(chosen: Sequence[str | int], seen: Observation) -> Tensor:
    """Which objectives are chosen, by name or index: bool `[m]`."""
    index = torch.arange(len(zeros := no_gradients.receive(seen)), device=zeros.device)
    return torch.stack([index == i for i in indices_of("primary", chosen, seen.losses, len(zeros))]).any(0)


def with_losses(view: View) -> View:
    """The view of a rule that receives a pair: what a rule with this view does, and the losses float64 `[m]`.

    Args:
        view: a view, such as `gramian`.

    Returns:
        A `View`, whose `needs` tell of both.
    """
    check_type("view", view, View, "Pass for instance views.gramian.")

    def both(seen: Observation) -> tuple[Any, Tensor]:
        return view.receive(seen), loss_vector(seen.losses)

    both.__name__ = f"{view.__name__}_and_losses"
    both.__doc__ = f"The view of a rule that needs both `{view.__name__}` and `losses`."
    return view._like(both, losses=True)  # pyright: ignore[reportPrivateUsage]


def _view(products: Need, **needs: Any) -> Callable[..., View]:
    return lambda receive: View(receive, products, **needs)


@_view("none")
def no_gradients(seen: Observation) -> Tensor:
    """The view of a rule that needs the number of objectives only: float64 zeros `[m]`."""
    return _for_each(seen, lambda _: 0.0)


def _for_each(seen: Observation, number: Callable[[int], float]) -> Tensor:
    """A number that depends on m, for each of the m objectives."""
    rows = None if seen.rows is None else rows_of(seen.rows)
    m = loss_count(seen.losses) if rows is None else row_count(rows)
    device = tree_leaves(seen.losses if rows is None else rows)[0].device
    return torch.full((m,), number(m), dtype=torch.float64, device=device if has_float64(device) else "cpu")


@_view("none")
def equal_weights(seen: Observation) -> Tensor:
    """As `no_gradients`, with 1/m instead of zeros: one launch for the weights, and not two."""
    return _for_each(seen, lambda m: 1 / m)


equal_weights.__name__ = no_gradients.__name__


@_view("none", losses=True)
def losses(seen: Observation) -> Tensor:
    """The view of a rule that needs the losses: float64 `[m]`, in leaf order."""
    return loss_vector(seen.losses)


@_view("gramian")
def gramian(seen: Observation) -> Gramian:
    """The inner products of the rows, `G = J J'`: float64 `[m, m]`, symmetric.

    Products and sums are in float64: those of float32 numbers are exact, and norms of 1e-30 or 1e30 do not matter.
    """
    if isinstance(seen.products, Tensor):
        return seen.products
    leaves = tree_leaves(rows_of(seen.rows))
    row_count(rows_of(seen.rows), leaves)
    return gramian_of_leaves(leaves)


def gramian_of_leaves(leaves: list[Tensor]) -> Gramian:
    """`gramian` of the leaves of rows, which all have m rows."""
    with autocast_disabled():
        if any_sharded(leaves):
            return sum_over_shards([inner_products(as_matrix(shard_of(leaf))) for leaf in leaves], leaves)
        return reduce(torch.add, [inner_products(matrix) for matrix, _ in joined(leaves)])


@_view("norms")
def norms(seen: Observation) -> Tensor:
    """The norms of the rows, not their squares: float64 `[m]`. A row of zeros has derivative zero."""
    if isinstance(seen.products, Tensor):
        return sqrt_or_zero(seen.products, seen.products == 0)
    rows = rows_of(seen.rows)
    leaves = tree_leaves(rows)
    row_count(rows, leaves)
    if any_sharded(leaves):
        squares = gramian_of_leaves(leaves).diagonal()
        return sqrt_or_zero(squares, squares == 0)
    with autocast_disabled():
        return row_norms(rows)


@_view("rows", batches=2)
def cross_gramian(seen: Observation) -> Tensor:
    """The inner products of the rows on two independent batches, `J J2'`: float64 `[m, m]`.

    Row i belongs to the Jacobian, column j to the first of the others.
    """
    if not seen.others:
        raise ValueError(
            "aggregate: this rule needs Jacobians on two independent batches, found only one. Pass another: "
            "aggregate(rule, jacobian, state, other_jacobian)."
        )
    left, right = (rows_of(rows) for rows in (seen.rows, seen.others[0]))
    row_count(left)
    row_count(right)
    shapes, others_shapes = ([list(leaf.shape[1:]) for leaf in tree_leaves(rows)] for rows in (left, right))
    if shapes != others_shapes:
        raise ValueError(
            f"cross_gramian: expected Jacobians of the same parameters, found leaves [m, *p] with {shapes} and "
            f"{others_shapes} for *p. Compute both with jacobian_fn of the same losses."
        )
    with autocast_disabled():
        leaves = tree_leaves(left)
        pairs = zip(leaves, tree_leaves(right), strict=True)
        products = [cross_inner_products(*(as_matrix(shard_of(leaf)) for leaf in pair)) for pair in pairs]
        return sum_over_shards(products, leaves)


@_view("rows")
def full_jacobian(seen: Observation) -> Jacobian:
    """The view of a rule that needs the Jacobian itself, whole: the pytree with leaves `[m, *p]`."""
    rows = rows_of(seen.rows)
    row_count(rows)
    if any_sharded(tree_leaves(rows)):
        raise ValueError(
            f"{here()}: this rule needs whole rows, found rows that are sharded. Use a rule that needs the losses, "
            "the Gramian or single entries, such as upgrad, graddrop or trimmed_mean."
        )
    return rows


@_view("rows")
def jacobian_entries(seen: Observation) -> Jacobian:
    """The view of a rule that looks at one entry of all rows at a time: the Jacobian, whole or sharded."""
    rows = rows_of(seen.rows)
    row_count(rows)
    return rows


jacobian_and_losses = with_losses(full_jacobian)
gramian_and_losses = with_losses(gramian)
norms_and_losses = with_losses(norms)


def loss_vector(losses: Losses) -> Tensor:
    if losses is None:
        raise ValueError(
            "aggregate: this rule needs the losses, found none. Pass them: aggregate(rule, jacobian, losses=losses)."
        )
    loss_count(losses)
    return torch.cat([on_wide_device(leaf).reshape(-1).double() for leaf in tree_leaves(losses)])


def loss_count(losses: Losses) -> int:
    """The number m of losses, floating-point tensors, at least one."""
    leaves = tree_leaves(losses)
    for index, leaf in enumerate(leaves):
        if not isinstance(leaf, Tensor) or not leaf.is_floating_point() or leaf.layout != torch.strided:
            raise TypeError(
                f"{here()}: losses must be floating-point tensors, found {described(leaf)} in "
                f"{tree_names(losses)[index]!r}. Pass what the loss function returned."
            )
    if not (m := sum(leaf.numel() for leaf in leaves)):
        raise ValueError(f"{here()}: expected at least one loss, found none. Pass what the loss function returned.")
    return m


def row_norms(jacobian: Jacobian) -> Tensor:
    """The norms of the rows: float64 `[m]`, summed in float64. A row of zeros has derivative zero."""
    matrices = [on_wide_device(as_matrix(leaf)) for leaf in tree_leaves(jacobian)]
    leaves = [torch.linalg.vector_norm(matrix, dim=1, dtype=torch.float64) for matrix in matrices]
    return torch.linalg.vector_norm(torch.stack(leaves), dim=0)
