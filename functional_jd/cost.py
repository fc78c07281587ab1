"""What a direction costs: which engine is the cheaper one, read off shapes, before anything is computed."""

from typing import Any

from functional_jd.objectives import Multitask, PerExample
from functional_jd.tree import tree_leaves
from functional_jd.types import LossFunction, Params

# Numbers in a Jacobian, from which its size costs more than taps do; and the m that is taken for one not known yet.
_MANY, _SOME = 1 << 20, 4


def gramian_is_cheaper(losses: LossFunction, params: Params, batch: tuple[Any, ...], m: int | None = None) -> bool:
    """Whether the Gramian without rows costs less than the Jacobian, for a rule that looks at the Gramian.

    `m n >= 2^20`: so many numbers leave the caches, and the size of the Jacobian is what the Gramian engine saves.
    Below, both take milliseconds, and the fixed price of taps decides. Batch size, positions and kinds of layers need
    not be known: the engine itself chooses leaf by leaf between factors and rows. So above it takes at worst 1.1 times
    as long as the Jacobian engine (convolutions, two tasks), at best a hundredth (examples on linear layers).

    Args:
        losses: as for `step`.
        params: the parameters that they take; of `multitask` losses, `shared` counts.
        batch: what they take besides.
        m: the number of objectives, if known; otherwise that of the examples; of `multitask` losses that of pairs of
            leaves in `heads`, as a head is mostly a weight and a bias; at least 4.

    Returns:
        A Python bool: shapes and dtypes decide, never values. False for parameters in half precision, whose rows may
        overflow where their factors do not, so that the engines would not skip the same steps.
    """
    shared, heads = losses.split(params) if isinstance(losses, Multitask) else (params, ())
    if m is None:
        m = losses.count(batch) if isinstance(losses, PerExample) else max(_SOME, len(tree_leaves(heads)) // 2)
    leaves = tree_leaves(shared)
    return m * sum(leaf.numel() for leaf in leaves) >= _MANY and all(leaf.dtype.itemsize >= 4 for leaf in leaves)
