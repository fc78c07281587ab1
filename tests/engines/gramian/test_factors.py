"""Rows that are not multiplied out, against their definition by einsum, in every form that a factor may have."""

from itertools import product

import pytest
import torch
from bounds import check_within, eps
from gramian_by_hand import multiplied_out

from functional_jd.engines.gramian import products as module
from functional_jd.engines.gramian.products import (
    Factors,
    column_groups,
    one_use,
    products_of_leaves,
    rows_of_factors,
    weighted_sum_of_factors,
)

M, POSITIONS = 3, 4
WEIGHTS = torch.tensor([0.5, -2.0, 3.0], dtype=torch.float64)
DTYPES = [(torch.float64, torch.float64), (torch.float32, torch.float64), (torch.float16, torch.float16)]


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def dense(left, right, groups, o, i, dtypes=DTYPES[0]):
    """Factors with 1 or m rows on each side."""
    sides = normal(left, POSITIONS, groups, o), normal(right, POSITIONS, groups, i, seed=1)
    return Factors(*(side.to(dtype) for side, dtype in zip(sides, dtypes, strict=True)))


def lookup(left, right, o, i):
    indices = torch.randint(o, (left, POSITIONS), generator=torch.Generator().manual_seed(2))
    return Factors(indices, normal(right, POSITIONS, 1, i, seed=1))


def by_hand(f, leaf):
    return multiplied_out(f, leaf.shape, M)[0]


ROWS = [(M, M), (1, M), (M, 1)]
CASES = [
    *((dense(*rows, groups, o, i), (groups * o, i)) for rows in ROWS for groups in (1, 2) for o, i in ((2, 5), (5, 2))),
    *((dense(M, M, 1, 3, 3, dtypes), (3, 3)) for dtypes in DTYPES),
    *((lookup(*rows, 6, 3), (6, 3)) for rows in ROWS),
    (Factors(normal(POSITIONS, M, 1, 2).transpose(0, 1), normal(M, POSITIONS, 1, 3, seed=1)), (2, 3)),
    (dense(1, M, 1, 2, 2), (2, 2)),
]


def bound(f, expected):
    """Sums of products of numbers of order one: as many roundings as positions and rows, at the precision of a side."""
    narrow = any(side.dtype in (torch.float16, torch.float32) for side in f)
    return 64 * (eps(torch.float32) if narrow else eps()) * (1 + expected.abs().max())


@pytest.mark.parametrize(("f", "shape"), CASES)
def test_rows_and_their_weighted_sum_are_their_definition(f, shape):
    leaf = torch.zeros(shape, dtype=torch.float64)
    expected = by_hand(f, leaf)
    check_within(rows_of_factors(f, leaf, M).double(), expected, bound(f, expected))
    total = torch.einsum("m,m...->...", WEIGHTS, expected)
    found = weighted_sum_of_factors(f, WEIGHTS, leaf, M)
    assert found.dtype == leaf.dtype
    check_within(found, total, 8 * bound(f, expected))


def test_half_precision_is_multiplied_and_added_in_float32():
    """Products of 300 and sums of 4,096 are no float16."""
    f = Factors(torch.full((M, POSITIONS, 1, 2), 300.0).half(), torch.full((M, POSITIONS, 1, 2), 300.0).half())
    leaf = torch.zeros(2, 2)
    assert rows_of_factors(f, leaf, M).unique().tolist() == [POSITIONS * 90_000.0]
    ones = weighted_sum_of_factors(f, torch.ones(M), leaf, M)
    assert ones.unique().tolist() == [M * POSITIONS * 90_000.0]


@pytest.mark.parametrize("sides", list(product(ROWS, ROWS)))
def test_several_uses_are_the_sum_of_their_rows(sides):
    one, other = (dense(*rows, 1, 2, 5) for rows in sides)
    other = Factors(other.left[:, :2], other.right[:, 1:3])
    leaf = torch.zeros(2, 5, dtype=torch.float64)
    expected = by_hand(one, leaf) + by_hand(other, leaf)
    joined = one_use([one, other])
    assert [len(side) for side in joined] == [max(pair) for pair in zip(*sides, strict=True)]
    check_within(rows_of_factors(joined, leaf, M), expected, bound(one, expected))
    both = products_of_leaves([[one, by_hand(other, leaf)]], [leaf], M)[1](WEIGHTS)[0]
    check_within(both, torch.einsum("m,m...->...", WEIGHTS, expected), 8 * bound(one, expected))


def test_rows_of_another_dtype_are_added_in_the_wider_one():
    leaf, rows = torch.zeros(2, dtype=torch.float64), torch.tensor([[1.0, 2.0]] * M)
    small = torch.tensor([1.0, 2.0**-40, 0.0], dtype=torch.float64)
    assert products_of_leaves([[rows]], [leaf], M)[1](small)[0].tolist() == [1 + 2.0**-40, 2 + 2.0**-39]


@pytest.mark.parametrize(("o", "i"), [(2, 7), (7, 2)])
@pytest.mark.parametrize("block", [1, 60, 1 << 20])
def test_groups_of_columns_are_the_columns_of_the_longer_side(o, i, block, monkeypatch):
    monkeypatch.setattr(module, "block_size", lambda _: block)
    f = dense(M, M, 1, o, i)
    groups = list(column_groups(f, M))
    rows = torch.cat([module.products_of_sides(group) for group in groups], 3 if i > o else 2)
    check_within(rows, module.products_of_sides(f), 64 * eps() * 10)
    # So many elements are in memory at once, but for one column at least.
    assert len(groups) == {1: 7, 60: -(-M * 14 // 60), 1 << 20: 1}[block]
