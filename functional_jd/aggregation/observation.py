"""What is observed of losses at a point, from which a rule receives what it needs."""

from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

from torch import Tensor

from functional_jd.core.heads import rows_of
from functional_jd.core.types import Direction, Jacobian, Losses, Tree, Weights

Products: TypeAlias = Any
"""The Gramian `[m, m]` or the squared norms `[m]` of the rows, float64; by name for groups of parameters."""


class Pulled(NamedTuple):
    """What the pullback of weights returns.

    Attributes:
        direction: a pytree like params.
        rows_finite: bool with the scale's shape: which rows did not overflow.
        direction_finite: bool `[]`: whether the weights, and with them the direction, are finite. If they are not while
            all rows are, no other scale would help: the rule refused, or a sum overflowed.

    Without a scale a flag may be None: then it does not matter what was not finite, and the driver looks at everything
    at once.
    """

    direction: Direction
    rows_finite: Tensor | None
    direction_finite: Tensor | None


class Scaling(NamedTuple):
    """What is still to be done to the products of an observation before a rule sees them.

    Attributes:
        factor: by what the rows were multiplied, `[]` or `[m]`; None: by nothing.
        flags: the dimensions of the flags of rows that did not overflow: 0, or 1 for one a row. None: all rows pass.
    """

    factor: Tensor | None
    flags: int | None


def _no_pullback(weights: Weights) -> Pulled:
    raise NotImplementedError("expected an observation that an engine made, found rows without a pullback.")


class Observation(NamedTuple):
    """Losses at a point, with as much of their derivatives as the rule needs.

    Attributes:
        losses: the values, unscaled; `None` where only rows are known.
        products: inner products of the rows, or their squared norms; `None` where they are not known.
        rows: the Jacobian, unscaled; `None` where it is not formed.
        others: Jacobians of the same objectives on other batches.
        pullback: `pullback(weights) -> Pulled`, called where autocast is off; of products with a scaling, of what
            `weights_for` makes of them.
        carried: `(buffers, aux)` from the losses.
        scaling: of products that no rule has seen yet; None: they are as rules take them.
        where: the function that the user called, for errors.
    """

    losses: Losses
    products: Products | None = None
    rows: Jacobian | None = None
    others: tuple[Jacobian, ...] = ()
    pullback: Callable[[Weights], Pulled] = _no_pullback
    carried: tuple[Tree, Tree] = ((), ())
    scaling: Scaling | None = None
    where: str = "aggregate"

    def of_group(self, key: str) -> "Observation":
        """The part of the observation that belongs to the parameters below one top-level key."""
        return self._replace(
            products=None if self.products is None else self.products[key],
            rows=None if self.rows is None else rows_of(self.rows)[key],
            others=tuple(rows_of(rows)[key] for rows in self.others),
        )
