"""The strategies draw what they promise, and what the laws measure with, by hand."""

from fractions import Fraction

import pytest
import torch
from hypothesis import Phase, find, given, settings
from hypothesis import strategies as st

from functional_jd.aggregation import AffineWeights, Aggregation
from functional_jd.core.tree import tree_flatten, tree_leaves
from functional_jd.testing import Range, jacobians
from functional_jd.testing.measures import check_close, reach_of, variants, with_first_entry, with_moderate_norms
from functional_jd.testing.strategies import numbers

torch.set_num_threads(1)

ANY = settings(max_examples=1000, phases=[Phase.generate])  # an example will do, however large


def norms(J):
    return torch.linalg.vector_norm(J, dim=1)


KINDS = {
    "generic": lambda J: torch.linalg.matrix_rank(J) == len(J) > 2,
    "zero": lambda J: not J.any(),
    "a row of zeros": lambda J: len(J) > 1 and not J[0].any() and J[1:].any(1).all(),
    "equal rows": lambda J: len(J) > 1 and J[0].any() and torch.equal(J[0], J[-1]),
    "opposite rows": lambda J: len(J) > 1 and J[0].any() and torch.equal(J[0], -J[-1]),
    "rank deficient, with no two rows parallel": lambda J: (
        len(J) == 3 and 2 == torch.linalg.matrix_rank(J) == min(map(torch.linalg.matrix_rank, (J[:2], J[1:], J[::2])))
    ),
    "stationary, with no two rows parallel": lambda J: (
        len(J) > 2 and J.any() and not J.sum(0).any() and torch.linalg.matrix_rank(J) > 1
    ),
    "rank one": lambda J: len(J) > 2 and J.any(1).all() and torch.linalg.matrix_rank(J) == 1 < J.shape[1],
    "norms of ratio 1e20": lambda J: len(J) > 1 and norms(J).min() > 0 and norms(J).max() / norms(J).min() > 1e20,
    "one row": lambda J: len(J) == 1 and J.any(),
    "more rows than columns": lambda J: len(J) > J.shape[1] and J.any(),
}


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_is_drawn(kind):
    find(jacobians(), KINDS[kind], settings=ANY)


@given(st.data())
def test_shapes_and_dtypes_are_those_asked_for(data):
    dtype = data.draw(st.sampled_from([torch.float16, torch.bfloat16, torch.float32, torch.float64]))
    J = data.draw(jacobians(rows=(2, 3), columns=4, dtype=dtype))
    assert J.dtype == dtype
    assert 2 <= len(J) <= 3
    assert J.shape[1] == 4
    assert J.isfinite().all()


@given(jacobians())
def test_gramians_of_jacobians_are_exact_in_any_order(J):
    expected = [
        [float(sum(Fraction(a) * Fraction(b) for a, b in zip(x, y, strict=True))) for y in J.tolist()]
        for x in J.tolist()
    ]
    assert (J @ J.mT).tolist() == expected
    assert torch.equal(J.flip(1) @ J.flip(1).mT, J @ J.mT)


@given(jacobians(wide=False))
def test_narrow_ones_are_small_integers(J):
    assert torch.equal(J, J.round())
    assert J.abs().max() <= 16


def test_jacobians_like_a_tree_have_its_structure():
    params = {"w": torch.ones(2, 2), "b": [torch.ones(3, 1), (torch.ones(()),)], "a": torch.ones(1)}

    @given(jacobians(rows=3, like=params))
    def check(J):
        assert tree_flatten(J)[1] == tree_flatten(params)[1]
        assert [leaf.shape for leaf in tree_leaves(J)] == [(3, *leaf.shape) for leaf in tree_leaves(params)]
        assert all(leaf.is_contiguous() for leaf in tree_leaves(J))

    check()


def test_examples_shrink_to_what_matters():
    J = find(jacobians(), lambda J: (J @ J.mT).min() < 0)
    assert (tuple(J.shape), J.abs().max()) == ((2, 1), 1)


@given(st.data(), st.sampled_from([Range(0.0, 1.0), Range(0.1, 10.0), Range(-3.0, -1.0)]))
def test_numbers_lie_in_their_range(data, within):
    assert within.low <= data.draw(numbers(within)) <= within.high


def test_both_ends_and_small_numbers_are_drawn():
    within = Range(0.0, 10.0)
    for kind in (lambda x: x == 0, lambda x: x == 10, lambda x: 0 < x < 1e-3, lambda x: 4 < x < 6):
        find(numbers(within), kind)


@pytest.mark.parametrize("end", [0.25, 3.0])
def test_both_ends_of_a_range_are_drawn_often(end):
    drawn = []

    @settings(max_examples=100, derandomize=True, database=None)
    @given(numbers(Range(0.25, 3.0)), st.integers())
    def draw(number, _):
        drawn.append(number)

    draw()
    assert drawn.count(end) >= 5


J = torch.tensor([[1.0, -2.0], [3.0, 4.0]], dtype=torch.float64)


def test_the_reach_bounds_every_entry_of_the_direction():
    assert reach_of(J, torch.tensor([-1.0, 0.5])).tolist() == [2.5, 4]
    rest = torch.tensor([-5.0, 1.0], dtype=torch.float64)
    assert reach_of(J, AffineWeights(torch.zeros(2, 1), rest)).tolist() == [7, 4]
    assert reach_of(J, AffineWeights(torch.tensor([[-2.0], [0.0]]), rest)).tolist() == [8.5, 7]


def test_what_is_close_is_relative_to_the_jacobian_where_the_reach_is_zero():
    zero = Aggregation(torch.zeros(2, dtype=torch.float64), torch.zeros(2, dtype=torch.float64), ())
    check_close(zero._replace(direction=zero.direction + 2.0**-39), zero, J, "far")
    with pytest.raises(AssertionError, match=r"far: off by 3.64e-12, with a reach of 0"):
        check_close(zero._replace(direction=zero.direction + 2.0**-38 + 2.0**-50), zero, J, "far")


def test_norms_become_moderate_by_powers_of_two():
    rows = torch.tensor([[3.0, -0.0], [3e-20, 1e-20], [1e20, -3e20], [0.0, 0.0], [200.0, 1.0]], dtype=torch.float64)
    found = with_moderate_norms(rows)
    factors = found[[0, 1, 2, 4]].abs().amax(1) / rows[[0, 1, 2, 4]].abs().amax(1)
    assert torch.equal(torch.frexp(factors).mantissa, torch.full((4,), 0.5, dtype=torch.float64))
    assert (factors[0], factors[3]) == (1, 1)
    assert torch.equal(found[[0, 1, 2, 4]], rows[[0, 1, 2, 4]] * factors[:, None])
    largest = found.abs().amax(1)
    assert largest[3] == 0
    assert (largest[[0, 1, 2, 4]] >= 2.0**-8).all()
    assert (largest <= 2.0**8).all()


def test_variants_and_replaced_entries():
    column = torch.tensor([[1.0], [2.0], [3.0]])
    found = [jacobian.squeeze(1).tolist() for jacobian, others, losses in variants(column, (), None)]
    assert found == [[1, 2, 3], [3, 2, 1], [6, 2, 4]]
    assert with_first_entry(J, 7.0, -1).tolist() == [[1, -2], [7, 4]]
    assert with_first_entry(J, 7.0, 0).tolist() == [[7, -2], [3, 4]]
    assert J.tolist() == [[1, -2], [3, 4]]
