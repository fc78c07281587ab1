"""Blocks of leaves against rows multiplied out by hand in float64: every shape, price, layout, size and transform."""

import pytest
import torch
from bounds import check_within, eps, product_bound
from gramian_by_hand import Largest, rows_of_parts
from hypothesis import given
from hypothesis import strategies as st
from zoo import numbers

from functional_jd.engines.gramian import products
from functional_jd.engines.gramian.products import Factors, block_of, products_of_leaves

PRICES = pytest.mark.parametrize("lean", [True, False], ids=["factors", "rows"])


def agree(parts, leaf, m, tolerance):
    (gramian_of, pull), rows = block_of(parts, leaf, m), rows_of_parts(parts, leaf.shape, m)
    gramian, weights = rows @ rows.mT, numbers(m, seed=9)
    assert gramian_of.dtype == torch.float64
    assert (gramian_of - gramian).abs().max() <= tolerance * gramian.abs().max()
    direction = pull(weights)
    assert (direction.shape, direction.dtype) == (leaf.shape, leaf.dtype)
    true = weights @ rows
    assert (direction.double().reshape(-1) - true).abs().max() <= 10 * tolerance * rows.abs().max() * m


def priced(patch, lean, cached):
    patch.setattr(products, "factors_are_cheaper", lambda *_: lean)
    patch.setattr(products, "block_size", lambda _: cached)


@given(
    m=st.integers(1, 5),
    positions=st.lists(st.integers(1, 4), min_size=1, max_size=2),
    groups=st.integers(1, 2),
    o=st.integers(1, 7),
    i=st.integers(1, 7),
    kind=st.sampled_from(["own", "common left", "common right", "lookup"]),
    pixels=st.booleans(),
    dense=st.booleans(),
    lean=st.booleans(),
    cached=st.sampled_from([1, 16, 1 << 17]),
    dtype=st.sampled_from([torch.float32, torch.float64]),
    seed=st.integers(0, 99),
)
def test_blocks_equal_rows_by_hand(m, positions, groups, o, i, kind, pixels, dense, lean, cached, dtype, seed):
    groups = 1 if kind == "lookup" else groups
    leaf = torch.zeros(o, i, dtype=dtype) if kind == "lookup" else torch.zeros(groups * o, i, dtype=dtype)

    def side(rows, p, length, seed):
        if pixels:  # neighbours in memory are positions, as convolutions leave them
            return numbers(rows, groups, length, p, seed=seed, dtype=dtype).permute(0, 3, 1, 2)
        return numbers(rows, p, groups, length, seed=seed, dtype=dtype)

    parts = []
    for k, p in enumerate(positions):
        left = side(1 if kind == "common left" else m, p, o, seed + k)
        if kind == "lookup":
            left = torch.randint(o, (m, p), generator=torch.Generator().manual_seed(seed))
        parts.append(Factors(left, side(1 if kind == "common right" else m, p, i, seed + k + 100)))
    if dense:
        parts.append(numbers(m, *leaf.shape, seed=seed + 7, dtype=dtype))
    with pytest.MonkeyPatch.context() as patch:
        priced(patch, lean, cached)
        agree(parts, leaf, m, 64 * eps(torch.float32) if dtype == torch.float32 else 2**12 * eps())


def test_a_leaf_that_nothing_reaches_has_rows_of_zeros():
    gramian_of, pull = block_of([], torch.ones(2, 3), 4)
    assert torch.equal(gramian_of, torch.zeros(4, 4, dtype=torch.float64))
    assert torch.equal(pull(torch.ones(4)), torch.zeros(2, 3))


@PRICES
@pytest.mark.parametrize("size", [1e-25, 1e-12, 1e12, 1e25])
def test_sizes_leave_no_trace(size, lean, monkeypatch):
    priced(monkeypatch, lean, 64)
    left, right = numbers(3, 4, 1, 5, dtype=torch.float32), numbers(3, 4, 1, 6, seed=1, dtype=torch.float32)
    agree([Factors(left * size, right)], torch.zeros(5, 6), 3, 64 * eps(torch.float32))


@PRICES
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


def sides():
    return numbers(3, 2, 1, 4), numbers(3, 2, 1, 5, seed=1)


COUNTED, WEIGHTS = numbers(3, 3, seed=2), numbers(3, seed=3)


def number(left, right):
    gramian_of, pull = block_of([Factors(left, right)], torch.zeros(4, 5, dtype=torch.float64), 3)
    return (gramian_of * COUNTED).sum() + pull(WEIGHTS).square().sum()


@pytest.mark.filterwarnings("ignore:.*:DeprecationWarning")
@PRICES
def test_composes_with_every_transform(lean, monkeypatch):
    priced(monkeypatch, lean, 16)
    left, right = sides()
    assert torch.autograd.gradcheck(number, [x.clone().requires_grad_() for x in (left, right)])
    slope = torch.func.grad(number)(left, right)
    tangent = numbers(*left.shape, seed=4)
    _, forward = torch.func.jvp(lambda x: number(x, right), (left,), (tangent,))
    torch.testing.assert_close(forward, (slope * tangent).sum())
    several = torch.stack([left, 2 * left])
    together = torch.vmap(number, (0, None))(several, right)
    torch.testing.assert_close(together, torch.stack([number(x, right) for x in several]))
    compiled = torch.compile(number, fullgraph=True, backend="aot_eager")(left, right)
    torch.testing.assert_close(compiled, number(left, right))


@given(
    m=st.integers(1, 5),
    leaves=st.lists(
        st.tuples(
            st.sampled_from([(), (3,), (2, 3), (0,)]),
            st.sampled_from([torch.float16, torch.float32, torch.float64]),
            st.sampled_from([torch.float32, torch.float64]),
            st.integers(0, 2),
        ),
        min_size=1,
        max_size=5,
    ),
    small=st.sampled_from([0, 6, 1 << 15]),
    seed=st.integers(0, 99),
)
def test_leaves_joined_equal_leaves_apart(m, leaves, small, seed):
    """Whichever of them are small enough to be joined, in whatever dtypes, and unused ones among them."""
    likes = [torch.zeros(shape, dtype=dtype) for shape, dtype, _, _ in leaves]
    parts = [
        [numbers(m, *shape, seed=seed + 7 * k + use).to(rows) for use in range(uses)]
        for k, (shape, _, rows, uses) in enumerate(leaves)
    ]
    parts.append([Factors(numbers(m, 2, 1, 3, seed=seed), numbers(m, 2, 1, 2, seed=seed + 1))])
    likes.append(torch.zeros(3, 2, dtype=torch.float64))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(products, "LEAST_WIDTH", -1)
        patch.setattr(products, "_JOINED", small)
        gramian, pullback = products_of_leaves(parts, likes, m)
    rows = torch.cat([rows_of_parts(own, like.shape, m) for own, like in zip(parts, likes, strict=True)], 1)
    assert gramian.dtype == torch.float64
    assert (gramian - rows @ rows.mT).abs().max() <= 1e-6 * (rows @ rows.mT).abs().max()
    weights = numbers(m, seed=3)
    true = (weights.double() @ rows).split([like.numel() for like in likes])
    for direction, like, own in zip(pullback(weights), likes, true, strict=True):
        assert (direction.shape, direction.dtype) == (like.shape, like.dtype)
        assert torch.allclose(direction.double().reshape(-1), own, rtol=1e-5 if like.itemsize > 2 else 2e-3, atol=2e-2)


@pytest.mark.parametrize(("m", "positions", "groups"), [(5, 60, 1), (9, 40, 2), (300, 1, 1)])
def test_pairs_beside_the_diagonal_are_computed_once_and_right(m, positions, groups):
    f = Factors(numbers(m, positions, groups, 3), numbers(m, positions, groups, 2, seed=1))
    rows = rows_of_parts([f], torch.Size([groups * 3, 2]), m)
    gramian = products._inner_products(f, m)
    check_within(gramian, rows @ rows.mT, product_bound(rows, rows.mT))
    check_within(gramian, gramian.mT, product_bound(rows, rows.mT))
