"""The observation of losses at a point. Rules receive parts of it."""

from collections.abc import Callable, Sequence
from itertools import count
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from functional_jd.core.heads import rows_of
from functional_jd.core.tree import tree_leaves, tree_map
from functional_jd.core.types import Direction, Jacobian, Losses, Tree, Weights

Products: TypeAlias = Any
"""The Gramian `[m, m]` or the squared norms `[m]` of the rows, float64; by name for groups of parameters."""


def _no_pullback(weights: Weights) -> Any:
    raise NotImplementedError("expected an observation that an engine made, found rows without a pullback.")


class Observation(NamedTuple):
    """Losses at a point, with as much of their derivatives as the rule needs, all without the loss scale.

    Attributes:
        losses: the values; `None` where only rows are known.
        products: inner products of the rows, or their squared norms; `None` where they are not known.
        rows: the Jacobian; `None` where it is not formed.
        others: Jacobians of the same objectives on other batches.
        pullback: `pullback(weights) -> (direction, finite)`, called where autocast is off: a pytree like params, and
            which rows passed the backward pass without an overflow, or None if the direction and earlier flags
            tell.
        finite: bool with the scale's shape: which rows did not overflow. None if the products or the pullback tell.
        carried: `(buffers, aux)` from the losses.
        reached: where training starts, the places of the losses that reach a group, by group, if not all of them do.
    """

    losses: Losses
    products: Products | None = None
    rows: Jacobian | None = None
    others: tuple[Jacobian, ...] = ()
    pullback: Callable[[Weights], tuple[Direction, Tensor | None]] = _no_pullback
    finite: Tensor | None = None
    carried: tuple[Tree, Tree] = ((), ())
    reached: Any = None

    def of_group(self, key: str) -> "Observation":
        """The part of the observation that belongs to the parameters below one top-level key."""
        return self._replace(
            products=None if self.products is None else self.products[key],
            rows=None if self.rows is None else rows_of(self.rows)[key],
            others=tuple(rows_of(rows)[key] for rows in self.others),
            reached=(self.reached or {}).get(key),
        )

    def of_objectives(self, places: Sequence[int]) -> "Observation":
        """The part of the observation that belongs to some objectives, in order. Scalars in a dict keep their names."""
        some: Callable[[Tensor], Tensor] = lambda x: torch.stack([x[i] for i in places])
        products, losses = self.products, self.losses
        if products is not None:
            products = some(products) if products.ndim == 1 else some(some(products).mT).mT
        if type(losses) is dict and all(type(k) is str and getattr(x, "ndim", 1) == 0 for k, x in losses.items()):
            losses = {key: losses[key] for i, key in enumerate(sorted(losses)) if i in places}
        elif losses is not None:
            place = count()
            kept = ([x for x in leaf.reshape(-1).unbind() if next(place) in places] for leaf in tree_leaves(losses))
            losses = list(map(torch.stack, filter(None, kept)))
        rows, *others = (None if x is None else tree_map(some, rows_of(x)) for x in (self.rows, *self.others))
        return self._replace(losses=losses, products=products, rows=rows, others=tuple(others))
