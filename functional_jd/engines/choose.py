"""Every automatic decision: from shapes to a named choice, with the measurement that it rests on."""

from math import ceil
from typing import Any

from torch import Tensor

from functional_jd.core.rows import HALVE_FROM
from functional_jd.core.torch_internals import graph_nodes, largest_gradient, under_transform
from functional_jd.core.tree import tree_leaves
from functional_jd.core.types import LossFunction, Params
from functional_jd.engines.gramian.factors import Factors
from functional_jd.engines.vjp import Vjp
from functional_jd.objectives import Multitask, PerExample

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


# What `"auto"` goes by, measured on CPUs: up to so many rows a loop is never slower;
_FEW = 3


# a gradient of so many elements, all rows of a group together, still fits a cache near the core;
_CACHED = 1 << 19


# and a group of fewer rows does not pay for what vmap costs.
_GROUP = 8


def row_schedule(point: Vjp, m: int, mode: str, chunk_size: int | None) -> tuple[str, int | None]:
    """What `"auto"` means here: a loop, or vmap over so many rows at once.

    Rows together save the fixed price of every operation, and cost the cache: on a CPU few rows, or wide ones (images),
    go one by one, what is between in groups of about the same size. Where the weights are larger than all that passes
    between the layers, the rows themselves are the work: together, they are written once and never copied.
    """
    if mode != "auto":
        return mode, chunk_size
    if m == 1 or (m <= _FEW and not under_transform()):
        return "loop", chunk_size
    if under_transform() or not point.inputs or not all(x.is_cpu for x in point.inputs):
        return "auto", chunk_size
    between = largest_gradient(graph_nodes(point.outputs), point.inputs)
    if between <= max(x.numel() for x in point.inputs):
        return "auto", chunk_size
    at_once = _CACHED // between
    if at_once < _GROUP:
        return "loop", chunk_size
    size = ceil(m / ceil(m / at_once))
    return "auto", size if chunk_size is None else min(size, chunk_size)


# In multiplications of float64, of which float32 does two at a time: the price of writing a number and reading it.
_MOVED = 12


def factors_are_cheaper(f: Factors, leaf: Tensor, m: int) -> bool:
    """Whether inner products of factors take less time than rows, by multiplications and by numbers moved."""
    positions, groups, i = f.right.shape[1:]
    lookup = f.left.ndim == 2
    o = leaf.shape[0] if lookup else f.left.shape[-1]
    rows = positions * m * i * (1 if lookup else groups * o) // 2 + _price(m) * i * groups * o
    if len(f.left) == len(f.right):
        n = positions * m
        return groups * (_price(n) * (i + (1 if lookup else o)) + 2 * _MOVED * n * n) < rows
    common, own = (o, i) if len(f.left) < m else (i, o)
    alike = positions * positions * ((1 if lookup else common) + _MOVED)
    return groups * (alike + positions * (positions + m + _MOVED) * m * own) < rows


def _price(n: int) -> int:
    """Of inner products of so many rows, for each column: what lies beside the diagonal is computed once."""
    return n * ((n + min(n, HALVE_FROM // 2)) // 2 + _MOVED)
