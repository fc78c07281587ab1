"""GradDrop: entry by entry, chance picks a sign, and the rows of the other sign are dropped."""

import torch
from torch import Tensor

from functional_jd.aggregation.aggregate import Aggregator
from functional_jd.aggregation.per_objective import Domain, Numbers, per_objective
from functional_jd.aggregation.views import full_jacobian
from functional_jd.core.rows import per_row
from functional_jd.core.safe import nonzero
from functional_jd.core.tree import tree_flatten, tree_leaves, tree_unflatten
from functional_jd.core.types import Jacobian, Weights
from functional_jd.random import split, uniform

_PARTS = Domain(
    lambda leak: ((leak >= 0) & (leak <= 1)).all(),
    "from 0 to 1",
    "0 drops an objective's entries of the other sign, 1 keeps them.",
)


def graddrop(key: Tensor, leak: Numbers | None = None) -> Aggregator:
    """Keep, in every entry, only the rows of one sign, picked by chance in proportion to what each sign adds up to.

    Per entry, `P = sum_i max(J_i, 0) / sum_i |J_i|`, U uniform in [0, 1), the sign is positive if U < P, else negative:
    `weights_i = 1` where J_i has this sign, else `leak_i`.

    Args:
        key: int64 `[2]`, as `functional_jd.random.key` makes it; do not use it again.
        leak: `[m]`, floating-point, from 0 to 1: how much of what is dropped gets through; `None` means 0. Copied: what
            happens to the tensor afterwards is not seen.

    Returns:
        A rule that looks at the whole Jacobian. Weights: a pytree like the Jacobian, at least float32; constant to
        derivatives with respect to it, which is right wherever no sign changes, and differentiable with respect to the
        leak. Its state is the key of the next call, int64 `[2]`, on the Jacobian's device.

    Raises:
        TypeError: a leak that is not floating-point; or `key` is none.
        ValueError: a leak of another shape, or not from 0 to 1 (not checked under a transform, where values are not
            known); at the call, not one per row; or `key` is none.

    Laws:
        The same state, the same random numbers, on every device and under every transform, for a tree and for its
        flattened rows; the key advances at every call. Without a leak the direction is `total()` on average over keys,
        up to 2^-24; with ones it is `total()`. Entries on which all rows agree are never dropped. Scale-equivariant.
        Rows of zeros change nothing. An entry with a row that is not finite is not finite.

    Source:
        Chen et al., Just pick a sign: gradient sign dropout, NeurIPS 2020, arXiv 2010.06808, equations 1 and 2,
        lines 10 to 15 of algorithm 1, with f the identity.

    Differs:
        U = P picks the negative sign, where the paper drops both: so an entry without conflict never vanishes.
    """
    split(key, 1)  # what is no key is refused here, not at the first call
    leaks_for = per_objective(leak, "graddrop", "leak", _PARTS, otherwise=lambda _: 0.0)

    def update(J: Jacobian, state: Tensor) -> tuple[Weights, Tensor]:
        drawn, carried = split(state)
        leaves, structure = tree_flatten(J)
        leaks = leaks_for(leaves[0])
        # One draw for all leaves: a tree and its flattened rows get the same chances.
        sizes = [leaf.shape[1:].numel() for leaf in leaves]
        chances = uniform(drawn, (sum(sizes),)).split(sizes)
        weights = [_weights(leaf, chance, leaks) for leaf, chance in zip(leaves, chances, strict=True)]
        return tree_unflatten(structure, weights), carried

    return Aggregator(full_jacobian, lambda J: key.to(tree_leaves(J)[0].device), update)


def _weights(leaf: Tensor, chance: Tensor, leaks: Tensor) -> Tensor:
    values = leaf.detach()
    positive = values.clamp(min=0).sum(0, dtype=torch.float64)  # what two entries of any dtype add up to, it can hold
    negative = values.clamp(max=0).sum(0, dtype=torch.float64)
    size = positive - negative
    purity = positive / nonzero(size)
    picks_positive = chance.view_as(size).to(size.device) < purity
    picked = torch.where(picks_positive, values > 0, values < 0)
    dtype = torch.promote_types(leaf.dtype, torch.float32)
    return torch.where(picked, 1, per_row(leaks.to(leaf.device, dtype), leaf))
