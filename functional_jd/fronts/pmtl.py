"""Pareto MTL: one solution in the sector of each preference."""

from collections.abc import Callable

import torch
from torch import Tensor

from functional_jd.aggregation.aggregate import Aggregator
from functional_jd.aggregation.hyper_parameters import PREFERENCES, per_objective
from functional_jd.aggregation.views import gramian_and_losses
from functional_jd.aggregators.mgda import mgda
from functional_jd.core.arguments import check_integer, described
from functional_jd.core.safe import nonzero, with_nan_of
from functional_jd.core.types import Gramian, Weights
from functional_jd.fronts.points import check_matrix

# A sector that is missed by less, relative to the length of the losses, is reached.
_MISSED = 2.0**-20


def pmtl(preferences: Tensor, warmup: int = 100) -> Callable[[Tensor], Aggregator]:
    """Pareto optimal solutions, each in the sector of its preference.

    The sector of k has the losses whose angle with `u_k` is smallest among all preferences: with unit vectors u,
    `(u_j - u_k)'L <= 0` for all j. The direction has the least norm in the convex hull of gradients: first, for a
    solution outside of its sector, of the violated `(u_j - u_k)'L`; afterwards of all losses and the violated ones.

    Args:
        preferences: u `[K, m]`, one in a row, all that `fronts.train` is given: not negative, none of them zero.
        warmup: how many steps the first phase lasts at most.

    Returns:
        A function from one of these preferences `[m]` to a rule: `rule=pmtl(u), preferences=u`. The rule needs the
        Gramian and the losses, and remembers the number of steps, int64 `[]`. Weights `[m]`, float64, may be negative
        outside of the sector. Differentiable with respect to the Gramian and preferences.

    Guarantees:
        Invariant to the lengths of preferences; homogeneous in the Jacobian, and the same for losses that are scaled
        together. In the sector, the direction is that of `mgda`. Losses that are not finite give NaN weights; sectors
        are those of losses that are not negative.

    Source:
        Lin, Zhen, Li, Zhang & Kwong, Pareto multi-task learning, NeurIPS 2019, arXiv 1912.12854: the descent to an
        initial solution in the sector, then the restricted descent.

    Differences:
        The programs are solved exactly. A solution that reaches its sector goes on at once, and does not wait or stop.
    """
    check_matrix("preferences", preferences, "Take lattice(m, divisions).")
    check_integer("warmup", warmup, 0, "It counts steps.")
    units = _units(preferences.double())
    least_norm = mgda().update

    def rule_of(preference: Tensor) -> Aggregator:
        own = per_objective("preference", preference, PREFERENCES)

        def update(seen: tuple[Gramian, Tensor], steps: Tensor) -> tuple[Weights, Tensor]:
            G, losses = seen
            if units.shape[1] != len(losses):
                raise ValueError(
                    f"pmtl: preferences must be [K, {len(losses)}], one column per loss, found {described(units)}. "
                    "Take lattice(m, divisions) with m losses."
                )
            constraints = units.to(losses) - _units(own(losses))
            violated = constraints @ losses > _MISSED * losses.abs().amax()
            is_first = violated.any() & (steps < warmup)
            counts = torch.cat([(~is_first).expand(len(losses)), violated])
            hull = torch.cat([torch.eye(len(losses), dtype=G.dtype, device=G.device), constraints])
            # What does not count is replaced by what does: the hull stays the same.
            hull = torch.where(counts.unsqueeze(-1), hull, hull.index_select(0, counts.long().argmax(0, keepdim=True)))
            shares, _ = least_norm(hull @ G @ hull.mT, ())
            return with_nan_of(shares @ hull, losses.sum()), steps + 1

        return Aggregator(gramian_and_losses, lambda seen: seen[0].new_zeros((), dtype=torch.int64), update)

    return rule_of


def _units(preferences: Tensor) -> Tensor:
    """Preferences `[*, m]` by their lengths, whose squares may not underflow or overflow."""
    largest = nonzero(preferences.detach().abs().amax(-1, keepdim=True))
    return torch.nn.functional.normalize(preferences / largest, dim=-1)
