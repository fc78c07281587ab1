"""Blocks of leaves and their factors against rows multiplied out by hand in float64, and their definition by einsum."""

import pytest
import torch
from bounds import check_within, eps, product_bound
from gramian_by_hand import Largest, both_prices, priced, rows_of_parts
from hypothesis import example, given
from hypothesis import strategies as st
from zoo import numbers

from functional_jd.engines.gramian import products
from functional_jd.engines.gramian.products import Factors, block_of, products_of_leaves, rows_of_factors

NORMS = pytest.mark.parametrize("norms", [False, True], ids=["gramian", "norms"])


def agree(parts, leaf, m, norms):
    """Inner products or squared norms, and a weighted sum, with those of rows that are multiplied out."""
    found, pull = block_of(parts, leaf, m, norms_only=norms)
    rows, terms = (rows_of_parts(parts, leaf.shape, m, which) for which in (0, 1))
    assert found.dtype == torch.float64
    length = sum(part.right.shape[1] if isinstance(part, Factors) else 1 for part in parts) + leaf.numel()
    expected, size = (x.square().sum(1) if norms else x @ x.mT for x in (rows, terms))
    check_within(found, expected, 4 * length * eps(leaf.dtype) * size)
    assert not norms or (found >= 0).all()
    weights = numbers(m, seed=9)
    direction = pull(weights)
    assert (direction.shape, direction.dtype) == (leaf.shape, leaf.dtype)
    bound = 4 * (length + m) * eps(leaf.dtype) * (weights.abs() @ terms)
    check_within(direction.reshape(-1), weights @ rows, bound)


def drawn(uses, leaf, m, groups, seed, pixels=False):
    """The parts of a leaf: for each use its kind and its positions."""

    def side(rows, p, length, seed):
        shape = (rows, groups, length, p) if pixels else (rows, p, groups, length)
        made = numbers(*shape, seed=seed, dtype=leaf.dtype)
        return made.permute(0, 3, 1, 2) if pixels else made  # neighbours are positions, as convolutions leave them

    def part(kind, p, seed):
        if kind == "rows":
            return numbers(m, *leaf.shape, seed=seed, dtype=leaf.dtype)
        left = side(1 if kind == "common left" else m, p, o, seed)
        if "lookup" in kind:
            left = torch.randint(o, (1 if "common" in kind else m, p), generator=torch.Generator().manual_seed(seed))
        return Factors(left, side(1 if kind == "common right" else m, p, i, seed + 100))

    o, i = leaf.shape[0] // groups, leaf.shape[1]
    return [part(*use, seed + k) for k, use in enumerate(uses)]


KINDS = ["own", "common left", "common right", "lookup", "common lookup", "rows"]
USES = st.tuples(st.sampled_from(KINDS), st.integers(1, 4))
SIZES = {
    "groups": st.integers(1, 2),
    "o": st.integers(1, 7),
    "i": st.integers(1, 7),
    "lean": st.booleans(),
    "cached": st.sampled_from([1, 16, 1 << 17]),
    "dtype": st.sampled_from([torch.float32, torch.float64]),
    "seed": st.integers(0, 99),
}
IN_COLUMNS = {"groups": 1, "o": 5, "i": 3, "lean": False, "cached": 1, "dtype": torch.float32, "seed": 0}


@NORMS
@given(m=st.integers(1, 5), uses=st.lists(USES, min_size=1, max_size=3), pixels=st.booleans(), **SIZES)
@example(m=3, uses=[("own", 2)], pixels=False, **IN_COLUMNS)
def test_blocks_equal_rows_by_hand(norms, m, uses, pixels, groups, o, i, lean, cached, dtype, seed):
    """One weight in several layers, such as an embedding that is the output layer too."""
    groups = 1 if any("lookup" in kind for kind, _ in uses) else groups
    leaf = torch.zeros(groups * o, i, dtype=dtype)
    parts = drawn(uses, leaf, m, groups, seed, pixels)
    if all(isinstance(part, Factors) and len(part.left) == len(part.right) == 1 for part in parts):
        m = 1
    with pytest.MonkeyPatch.context() as patch:
        priced(patch, lean, cached)
        agree(parts, leaf, m, norms)


@given(
    sizes=st.tuples(st.integers(1, 5), st.integers(1, 5)),
    uses=st.tuples(
        *[st.lists(USES.filter(lambda use: use[0] not in ("common left", "common lookup")), max_size=2)] * 2
    ),
    **SIZES,
)
@example(sizes=(2, 3), uses=([("own", 2)], [("own", 1)]), **IN_COLUMNS)
def test_two_batches_equal_rows_multiplied_out(sizes, uses, groups, o, i, lean, cached, dtype, seed):
    """The layers that use a weight on one batch need not be those on the other."""
    groups = 1 if any("lookup" in kind for each in uses for kind, _ in each) else groups
    leaf = torch.zeros(groups * o, i, dtype=dtype)
    both = [drawn(each, leaf, m, groups, seed + 7 * k) for k, (m, each) in enumerate(zip(sizes, uses, strict=True))]
    with pytest.MonkeyPatch.context() as patch:
        priced(patch, lean, cached)
        found = products.crossed_leaf(*both, leaf, *sizes)
    assert (found.shape, found.dtype) == (sizes, torch.float64)
    (rows, terms), (others, other_terms) = (
        [rows_of_parts(parts, leaf.shape, m, which) for which in (0, 1)] for parts, m in zip(both, sizes, strict=True)
    )
    check_within(found, rows @ others.mT, 4 * (leaf.numel() + 12) * eps(dtype) * (terms @ other_terms.mT))


@NORMS
def test_a_leaf_that_nothing_reaches_has_rows_of_zeros(norms):
    found, pull = block_of([], torch.ones(2, 3), 4, norms_only=norms)
    assert torch.equal(found, torch.zeros((4,) if norms else (4, 4), dtype=torch.float64))
    assert torch.equal(pull(torch.ones(4)), torch.zeros(2, 3))


@NORMS
@both_prices
@pytest.mark.parametrize("size", [1e-25, 1e-12, 1e12, 1e25])
def test_sizes_whose_squares_leave_the_range_of_float32_leave_no_trace(size, lean, norms, monkeypatch):
    priced(monkeypatch, lean, 64)
    left, right = numbers(3, 4, 1, 5, dtype=torch.float32), numbers(3, 4, 1, 6, seed=1, dtype=torch.float32)
    agree([Factors(left * size, right)], torch.zeros(5, 6), 3, norms)


@both_prices
def test_positions_that_cancel_leave_no_negative_square(lean, monkeypatch):
    priced(monkeypatch, lean)
    left, right = numbers(50, 3, 1, 4), numbers(50, 3, 1, 5, seed=1)
    opposite = Factors(torch.cat([left, -left], 1), torch.cat([right, right], 1))
    squares, _ = block_of([opposite], torch.zeros(4, 5, dtype=torch.float64), 50, norms_only=True)
    assert (squares >= 0).all()
    size = (left.square().sum((1, 2, 3)) * right.square().sum((1, 2, 3))).max()
    assert squares.max() <= 64 * eps() * size


@both_prices
def test_rows_that_are_equal_stay_dependent(lean, monkeypatch):
    """Rules cut eigenvalues at the rounding of float64: products in float32 would make up a direction of size 1e-8."""
    priced(monkeypatch, lean, 1 << 10)
    left, right = numbers(6, 9, 1, 40, dtype=torch.float32), numbers(6, 9, 1, 50, seed=1, dtype=torch.float32)
    twice = Factors(left.repeat(2, 1, 1, 1), right.repeat(2, 1, 1, 1))
    values = torch.linalg.eigvalsh(block_of([twice], torch.zeros(40, 50), 12)[0])
    assert values[:6].abs().max() < 1e-13 * values[-1]
    assert values[6] > 1e-3 * values[-1]


def test_rows_are_formed_some_columns_at_a_time(monkeypatch):
    priced(monkeypatch, False, 1 << 12)
    left, right = numbers(8, 2, 1, 64, dtype=torch.float32), numbers(8, 2, 1, 96, seed=1, dtype=torch.float32)
    with Largest() as largest:
        block_of([Factors(left, right)], torch.zeros(64, 96), 8)[1](torch.ones(8))
    assert largest.numel <= 64 * 96


@pytest.mark.parametrize(("m", "positions", "groups"), [(5, 60, 1), (9, 40, 2), (300, 1, 1)])
def test_pairs_beside_the_diagonal_are_computed_once_and_right(m, positions, groups):
    f = Factors(numbers(m, positions, groups, 3), numbers(m, positions, groups, 2, seed=1))
    rows = rows_of_parts([f], torch.Size([groups * 3, 2]), m)
    gramian = products._inner_products(f, m)
    check_within(gramian, rows @ rows.mT, product_bound(rows, rows.mT))
    check_within(gramian, gramian.mT, product_bound(rows, rows.mT))


M, POSITIONS = 3, 4


def test_half_precision_is_multiplied_and_added_in_float32():
    """Products of 300 and sums of 4,096 are no float16."""
    f = Factors(torch.full((M, POSITIONS, 1, 2), 300.0).half(), torch.full((M, POSITIONS, 1, 2), 300.0).half())
    leaf = torch.zeros(2, 2)
    assert rows_of_factors(f, leaf, M).unique().tolist() == [POSITIONS * 90_000.0]
    ones = products.weighted_sum_of_factors(f, torch.ones(M), leaf, M)
    assert ones.unique().tolist() == [M * POSITIONS * 90_000.0]


def test_rows_of_another_dtype_are_added_in_the_wider_one():
    leaf, rows = torch.zeros(2, dtype=torch.float64), torch.tensor([[1.0, 2.0]] * M)
    small = torch.tensor([1.0, 2.0**-40, 0.0], dtype=torch.float64)
    assert products_of_leaves([[rows]], [leaf], M)[1](small)[0].tolist() == [1 + 2.0**-40, 2 + 2.0**-39]


@pytest.mark.parametrize(("o", "i"), [(2, 7), (7, 2)])
@pytest.mark.parametrize("block", [1, 60, 1 << 20])
def test_groups_of_columns_are_the_columns_of_the_longer_side(o, i, block, monkeypatch):
    monkeypatch.setattr(products, "block_size", lambda _: block)
    f = Factors(numbers(M, POSITIONS, 1, o), numbers(M, POSITIONS, 1, i, seed=1))
    groups = list(products.column_groups(f, M))
    rows = torch.cat([products.products_of_sides(group) for group in groups], 3 if i > o else 2)
    check_within(rows, products.products_of_sides(f), 64 * eps() * 10)
    # So many elements are in memory at once, but for one column at least.
    assert len(groups) == {1: 7, 60: -(-M * 14 // 60), 1 << 20: 1}[block]
