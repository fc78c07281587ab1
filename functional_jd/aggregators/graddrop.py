"""GradDrop: draw a sign for every entry, and drop the rows of the other sign."""

from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor

from functional_jd.aggregation import Aggregator, Jacobian, Numbers, Weights, jacobian_entries, per_objective
from functional_jd.core.arguments import FROM_0_TO_1
from functional_jd.core.rows import per_row
from functional_jd.core.safe import nonzero
from functional_jd.core.sharding import positions, shard_of, sharded_as
from functional_jd.core.tree import any_sharded, tree_flatten, tree_leaves
from functional_jd.random import split, uniform
from functional_jd.random.keys import check_key, draw_at


def graddrop(key: Tensor, leak: Numbers | None = None) -> Aggregator:
    """Keep, in every entry, only the rows of one sign, drawn in proportion to the sum of the entries of each sign.

    Per entry, `P = sum_i max(J_i, 0) / sum_i |J_i|`, U uniform in [0, 1), the sign is positive if U < P, else negative:
    `weights_i = 1` where J_i has this sign, else `leak_i`.

    Args:
        key: int64 `[2]`, from `functional_jd.random.key`; do not use it again.
        leak: `[m]`, from 0 to 1: the weight of dropped entries. Default: 0.

    Returns:
        A rule that needs the entries of the Jacobian. Weights: a pytree like the Jacobian, at least float32; their
        derivative with respect to it is 0, which is right where no sign changes. Its state is the next key.

    Guarantees:
        The same state gives the same random numbers on every device and under every transform, for a tree and for its
        flattened rows. Without a leak the expected direction is `total()`, up to 2^-24. Entries of one sign in all rows
        are never dropped. Scale-equivariant.

    Source:
        Chen et al., NeurIPS 2020, arXiv 2010.06808, equations 1 and 2, with f the identity. `U = P` gives the negative
        sign here; the paper drops both.
    """
    check_key(key)
    leak_of = per_objective("leak", leak, FROM_0_TO_1, default=lambda _: 0.0)

    def update(J: Jacobian, state: Tensor) -> tuple[Weights, Tensor]:
        subkey, next_key = split(state)
        leaves, structure = tree_flatten(J)
        leaks = leak_of(leaves[0])
        weights = [
            sharded_as(_entrywise(shard_of(leaf), number, leaks), leaf)
            for leaf, number in zip(leaves, _numbers(subkey, leaves), strict=True)
        ]
        return structure.unflatten(weights), next_key

    return Aggregator(jacobian_entries, lambda J: key.to(tree_leaves(J)[0].device), update)


def _numbers(key: Tensor, leaves: list[Tensor]) -> Sequence[Tensor]:
    """One number for every entry. One draw for all leaves, so that a tree and its flattened rows get the same; of
    sharded leaves each rank draws the numbers of its entries.
    """
    sizes = [leaf.shape[1:].numel() for leaf in leaves]
    if not any_sharded(leaves):
        return uniform(key, (sum(sizes),)).split(sizes)
    starts = accumulate(sizes, initial=0)
    places = [positions(leaf, 1) + start for leaf, start in zip(leaves, starts, strict=False)]
    return [draw_at(key, place, "uniform", torch.float32) for place in places]


def _entrywise(leaf: Tensor, number: Tensor, leaks: Tensor) -> Tensor:
    values = leaf.detach()
    positive = values.clamp(min=0).sum(0, dtype=torch.float64)  # a sum in the leaf's dtype may overflow
    size = positive - values.clamp(max=0).sum(0, dtype=torch.float64)
    picks_positive = number.view_as(size).to(size.device) < positive / nonzero(size)
    picked = torch.where(picks_positive, values > 0, values < 0)
    dtype = torch.promote_types(leaf.dtype, torch.float32)
    return torch.where(picked, 1, per_row(leaks.to(leaf.device, dtype), leaf))
