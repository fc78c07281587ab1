"""Hypothesis strategies for Jacobians and hyper-parameters.

Entries are small integers as floats, and rows are scaled by powers of two. So every Gramian is exact in any order of
summation, and a law fails because of the rule, not because of rounding.
"""

import math
from typing import Any, NamedTuple

import torch
from hypothesis import strategies as st

from functional_jd.core.arguments import check_flag, is_size, refuse
from functional_jd.core.tree import floating_leaves, tree_flatten
from functional_jd.core.types import Params, Tree

Size = int | tuple[int, int]
"""One number, or the minimum and the maximum."""

# Row norms from 1e-18 to 1e18, within the range of the dtype, for which the rules guarantee the laws.
_MAX_EXPONENT = 60


class Range(NamedTuple):
    """The numbers from `low` to `high`, both included, for a hyper-parameter."""

    low: float
    high: float


def numbers(within: Range) -> st.SearchStrategy[float]:
    """Draw `low + t (high - low)`, t a multiple of 1/64 or a power of two down to 2^-16; shrinks to `low`."""
    ends = st.sampled_from([0.0, 1.0])
    fractions = st.one_of(ends, st.integers(0, 64).map(lambda k: k / 64), st.integers(1, 16).map(lambda k: 2.0**-k))
    return fractions.map(lambda t: within.low + t * (within.high - within.low))


def jacobians(
    rows: Size = (1, 5),
    columns: Size = (1, 5),
    dtype: torch.dtype = torch.float64,
    like: Params = None,
    wide: bool = True,
) -> st.SearchStrategy[Tree]:
    """Draw Jacobians: generic and degenerate ones.

    `J = diag(2^k) kind(Z)`, Z small integers, k mostly 0. The kinds: Z itself, zero, one row of zeros, two equal rows,
    two opposite rows, a row that is the sum of the others (rank deficient), rows whose sum is zero (stationary),
    multiples of one row (rank one).

    Args:
        rows: m, the number of objectives, or its minimum and maximum.
        columns: n, likewise; ignored if `like` is given.
        dtype: the dtype of the leaves.
        like: a pytree of parameters, whose structure the Jacobian gets, with leaves `[m, *p]`.
        wide: whether rows may have very different norms, up to 2^60 and down to 2^-60 (narrower in float16).

    Returns:
        A strategy for a tensor `[m, n]`, or for a pytree with leaves `[m, *p]`. Shrinks to few rows of zeros and ones.

    Guarantees:
        `J J'` is exact in float64 in any order of summation. With too few rows, a kind returns Z or zero rows.
    """
    _check_size("rows", rows)
    _check_size("columns", columns)
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:  # pyright: ignore[reportUnnecessaryIsInstance]
        refuse("dtype", "a floating-point dtype", dtype, "Pass for instance torch.float64.")
    check_flag("wide", wide)
    if like is not None:
        floating_leaves(like)
    return _jacobians(rows, columns, dtype, like, wide)


@st.composite
def _jacobians(draw: st.DrawFn, rows: Size, columns: Size, dtype: torch.dtype, like: Params, wide: bool) -> Tree:
    leaves, structure = tree_flatten(like)
    m = draw(_sizes(rows))
    n = draw(_sizes(columns)) if like is None else sum(leaf.numel() for leaf in leaves)
    entries = draw(st.lists(st.integers(-4, 4), min_size=m * n, max_size=m * n))
    integers = torch.tensor(entries, dtype=torch.float64).reshape(m, n)
    matrix = draw(st.sampled_from(_KINDS))(integers) + 0  # turns -0.0 into 0.0, for readable counterexamples
    if wide and draw(st.integers(0, 3)) == 3:
        limit = min(_MAX_EXPONENT, int(math.log2(torch.finfo(dtype).max)) - 6)
        exponents = draw(st.lists(st.integers(-limit, limit), min_size=m, max_size=m))
        matrix = matrix * 2.0 ** torch.tensor(exponents, dtype=torch.float64).unsqueeze(1)
    if like is None:
        return matrix.to(dtype)
    parts = zip(leaves, matrix.to(dtype).split([leaf.numel() for leaf in leaves], dim=1), strict=True)
    return structure.unflatten([part.reshape(m, *leaf.shape).contiguous() for leaf, part in parts])


def _check_size(name: str, size: Any) -> None:
    """Refuse all but a number, or a minimum and a maximum."""
    ends: Any = (size, size) if is_size(size) else size
    several = isinstance(ends, tuple | list) and len(ends) == 2 and all(map(is_size, ends))  # pyright: ignore[reportUnknownArgumentType]
    if not several or not 1 <= ends[0] <= ends[1]:
        expected = "a number of at least 1, or a minimum and a maximum"
        refuse(name, expected, size, "Pass for instance (1, 5).", ValueError)


def _sizes(size: Size) -> st.SearchStrategy[int]:
    return st.just(size) if isinstance(size, int) else st.integers(*size)


_KINDS = [
    lambda J: J,
    torch.zeros_like,
    lambda J: torch.cat([0 * J[:1], J[1:]]),
    lambda J: torch.cat([J[:-1], J[:1]]),
    lambda J: torch.cat([J[:-1], -J[:1]]),
    lambda J: torch.cat([J[:-1], J[:-1].sum(0, keepdim=True)]),
    lambda J: torch.cat([J[:-1], -J[:-1].sum(0, keepdim=True)]),
    lambda J: J[:, :1] * J[:1],
]
