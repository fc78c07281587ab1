"""Leaves of rows: every helper keeps what it is given, and differentiates as the identity does."""

from itertools import pairwise

import pytest
import torch
from bounds import check_same
from hypothesis import given
from hypothesis import strategies as st
from simulated import simulated

from functional_jd.aggregation import gramian
from functional_jd.core import rows
from functional_jd.core.rows import as_matrix, at_least_float32, per_row


class Unregistered:
    """Holds a tensor that no pytree sees."""

    def __init__(self, held):
        self.held = held


shapes = st.lists(st.integers(0, 3), max_size=3).map(tuple)


@given(st.integers(1, 3), shapes)
def test_rows_times_numbers_are_rows_of_the_matrix_times_numbers(m, shape):
    leaf = torch.arange(m * torch.Size(shape).numel(), dtype=torch.float64).reshape(m, *shape)
    numbers = torch.arange(m, dtype=torch.float64) + 2
    expected = torch.stack([row.reshape(-1) * number for row, number in zip(leaf, numbers, strict=True)])
    assert torch.equal(as_matrix(leaf * per_row(numbers, leaf)), expected)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_wide_is_at_least_float32_and_keeps_the_values(dtype):
    x = torch.tensor([1.5, 3.0], dtype=dtype)
    assert at_least_float32(x).dtype == torch.promote_types(dtype, torch.float32)
    assert at_least_float32(x).tolist() == x.tolist()
    assert (at_least_float32(x) is x) == (dtype.itemsize >= 4)
    assert torch.func.grad(lambda x: at_least_float32(x).sum())(x).dtype == dtype


@given(st.integers(1, 4), st.integers(0, 5), st.sampled_from([1, 3, 1 << 18]), st.sampled_from([1, 2, 128]))
def test_products_are_those_of_float64_however_they_are_cut(m, n, cached, halving):
    left, right = (((torch.arange(m * n).reshape(m, n) * k) % 7 - 3).to(torch.float32) for k in (3, 5))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rows, "_CACHED", cached)
        patch.setattr(rows, "LEAST_WIDTH", 1)
        patch.setattr(rows, "HALVE_FROM", max(halving, 2))  # one row is not cut
        assert torch.equal(rows.inner_products(left), left.double() @ left.double().mT)
        assert torch.equal(rows.cross_inner_products(left, right), left.double() @ right.double().mT)
        fewer = right[: max(1, m - 1)]
        assert torch.equal(rows.cross_inner_products(left, fewer), left.double() @ fewer.double().mT)
        check_same(rows.squared_norms(left), left.double().square().sum(1), roundings=2)
        batch = torch.stack([left, right])
        assert torch.equal(rows.symmetric_product(batch), batch @ batch.mT)


DTYPES = st.sampled_from([torch.float16, torch.float32, torch.float64])


@given(st.integers(1, 3), st.lists(st.tuples(st.integers(0, 5), DTYPES), min_size=1, max_size=6), st.integers(1, 8))
def test_joined_matrices_have_the_same_columns_in_the_same_order(m, leaves, width):
    numbers = torch.arange(m * sum(n for n, _ in leaves), dtype=torch.float64).reshape(m, -1)
    matrices = [
        part.to(dtype) for part, (_, dtype) in zip(numbers.split([n for n, _ in leaves], 1), leaves, strict=True)
    ]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rows, "LEAST_WIDTH", width)
        joined = rows.joined(matrices)
    found = [x for x, _ in joined]
    assert [width for _, widths in joined for width in widths] == [n for n, _ in leaves]
    assert torch.equal(torch.cat([x.double() for x in found], 1), numbers)
    most = max(width, 2 * m)
    for x in found:
        assert x.shape[1] <= most or any(x is matrix for matrix in matrices)
    for x, y in pairwise(found):  # neighbours that would fit are joined
        assert x.dtype != y.dtype or x.shape[1] + y.shape[1] > most


@given(st.integers(1, 5), st.lists(st.lists(st.integers(0, 3), max_size=2), min_size=1, max_size=4))
def test_row_count_is_the_first_dimension_of_all(m, shapes):
    jacobian = {str(i): torch.ones(m, *shape) for i, shape in enumerate(shapes)}
    assert rows.row_count(jacobian) == m
    with pytest.raises(ValueError, match=f"functional_jd: .*found {m} in '0' and {m + 1} in 'more'.*mix Jacobians"):
        rows.row_count({**jacobian, "more": torch.ones(m + 1)})


MISTAKES = {
    "integers": ({"a": torch.ones(2), "b": torch.ones(2).int()}, TypeError, r"int32 \[2\] in 'b'.*Stack"),
    "no rows": ({"a": torch.tensor(1.0)}, TypeError, r"float32 \[\] in 'a'"),
    "no tensor": ({"l": [torch.ones(2), 2.0]}, TypeError, "found 2.0 in 'l.1'.*register"),
    "stranger": ({"u": Unregistered(torch.ones(2))}, TypeError, "found Unregistered in 'u'.*register other containers"),
    "empty": ({}, ValueError, r"at least one row \(one objective\), found none"),
    "none": ({"a": torch.ones(0, 3)}, ValueError, "at least one row"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_rows_that_are_none_are_named(mistake):
    tree, kind, message = MISTAKES[mistake]
    with pytest.raises(kind, match=f"functional_jd: .*{message}"):
        rows.row_count(tree)


CUTS = {
    "one": lambda m, n: (m[:, :1], m[:, 1:3], m[:, 3:]),
    "two": lambda m, n: (m[:, :2], n[:, 2:]),
    "apart": lambda m, n: (m[:, :1], m[:, 2:]),
    "transposed": lambda m, n: (m.mT[:2, :2], m.mT[2:, :2]),
    "second": lambda m, n: (m.view(3, 2, 2)[:, :1, 0], m.view(3, 2, 2)[:, :1, 1]),
    "rows": lambda m, n: (m[:2, :2], m.view(-1)[2:8].view(2, 3)[:, :2]),
}


@pytest.mark.parametrize("cut", CUTS.values(), ids=CUTS)
def test_columns_of_one_matrix_are_joined_without_a_copy_if_they_are_neighbours(cut):
    m, n = torch.arange(12.0).reshape(3, 4) ** 2 + 1, torch.ones(3, 4)
    with simulated() as device:
        found = device.get(gramian(list(cut(device.put(m), device.put(n)))))
        x = device.put(m).requires_grad_()
        (slope,) = torch.autograd.grad(gramian([x[:, :2], x[:, 2:]]).diagonal().sum(), x)
        assert torch.equal(device.get(slope), 2 * m)
    assert torch.equal(found, gramian(list(cut(m, n))))
