"""Trimmed mean: the entrywise mean of the rows without the largest and the smallest."""

import torch
from torch import Tensor

from functional_jd.aggregation import Aggregator, jacobian_entries, stateless
from functional_jd.core.arguments import check_integer
from functional_jd.core.sharding import shard_of, sharded_as
from functional_jd.core.tree import tree_map


def trimmed_mean(trim: int) -> Aggregator:
    """The mean, in every entry, of the rows without the `trim` largest and the `trim` smallest.

    Per entry, `weights_i = 1 / (m - 2 trim)` for the rows whose place in ascending order is not among the first or
    last `trim`, else 0.

    Args:
        trim: number of rows to drop on either side, at least 0; `2 trim + 1` rows are needed.

    Returns:
        A rule that needs the entries of the Jacobian. Weights: a pytree like the Jacobian, at least float32; their
        derivative is 0, which is right where no two entries are equal.

    Guarantees:
        `trimmed_mean(0) = mean()`; for `m = 2 trim + 1` it is the median. With at most `trim` wrong rows, every entry
        lies between entries of right rows. An entry with a non-finite row is not finite, also if that is dropped.

    Source:
        Yin et al., ICML 2018, arXiv 1803.01498, definition 2, where `trim` is a fraction of m. The authors' code hides
        NaN and inf.
    """
    check_integer("trim", trim, 0, "It counts rows.")

    def weigh(leaf: Tensor) -> Tensor:
        m = leaf.shape[0]
        n_kept = m - 2 * trim
        if n_kept < 1:
            raise ValueError(
                f"trimmed_mean: expected at least {2 * trim + 1} rows, with trim={trim}, found {m}. "
                "Use more objectives, or a smaller trim."
            )
        kept = leaf.detach().sort(dim=0, stable=True).indices[trim : m - trim]
        zeros = torch.zeros_like(leaf, dtype=torch.promote_types(leaf.dtype, torch.float32))
        return zeros.scatter(0, kept, 1 / n_kept)

    return stateless(jacobian_entries, lambda J: tree_map(lambda leaf: sharded_as(weigh(shard_of(leaf)), leaf), J))
