"""Functions of a matrix as rules: what they return is the direction, and their laws are found like those of rules."""

import itertools

import pytest
import torch
from hypothesis import given, settings

from functional_jd.aggregation.aggregate import aggregate
from functional_jd.aggregators.mean import mean
from functional_jd.core.tree import tree_leaves
from functional_jd.testing import (
    BY_CLAIM,
    black_box,
    finite,
    homogeneous,
    jacobians,
    laws_of,
    linear_under_row_scaling,
    non_finite,
    obeys,
    on_the_simplex,
    permutation_equivariant,
    pure,
    strongly_stationary,
)

FEW = settings(max_examples=20, derandomize=True, database=None, deadline=None)
FEWER = settings(FEW, max_examples=10)
TREE = {"b": torch.zeros(()), "a": [torch.zeros(2, 3), torch.zeros(0), torch.zeros(1)]}


def first_row(J):
    return J[0].clone()


def unit_mean(J):
    return torch.nn.functional.normalize(J.mean(0), dim=0)


test_mean_of_the_rows = obeys(black_box(lambda J: J.mean(0)), settings=FEWER)


@given(jacobians(like=TREE))
@settings(FEW)
def test_the_direction_is_what_the_function_returns(jacobian):
    direction = aggregate(black_box(first_row), jacobian).direction
    for found, leaf in zip(tree_leaves(direction), tree_leaves(jacobian), strict=True):
        assert torch.equal(found, leaf[0])


def test_the_function_receives_the_rows_joined_and_in_their_dtype():
    seen = []

    def f(J):
        seen.append(J)
        return J.sum(0)

    jacobian = {"b": torch.tensor([1, 2]).half(), "a": torch.tensor([[3, 4], [5, 6]]).half()}
    direction, weights, _ = aggregate(black_box(f), jacobian)
    assert weights["a"].rest.dtype == torch.float32  # as weights are
    assert torch.equal(seen[0], torch.tensor([[3, 4, 1], [5, 6, 2]]).half())
    assert torch.equal(direction["a"], torch.tensor([8, 10]).half())
    assert torch.equal(direction["b"], torch.tensor(3).half())


def test_it_composes_with_transforms():
    batch = torch.arange(24, dtype=torch.float64).reshape(4, 2, 3)

    def direction(J):
        return aggregate(black_box(lambda J: (J**2).sum(0)), J).direction

    expected = (batch**2).sum(1)
    assert torch.equal(torch.vmap(direction)(batch), expected)
    assert torch.equal(torch.func.grad(lambda J: direction(J).sum())(batch[0]), 2 * batch[0])
    assert torch.equal(torch.func.jvp(direction, (batch[0],), (batch[1],))[1], (2 * batch[0] * batch[1]).sum(0))
    assert torch.equal(torch.compile(direction, fullgraph=True, backend="eager")(batch[0]), expected[0])


def test_it_has_the_laws_of_the_rule_that_it_computes():
    def holding(rule):
        return {name: bool(found) for name, found in laws_of(rule, *BY_CLAIM, settings=FEWER).items()}

    assert holding(black_box(lambda J: J.mean(0))) == holding(mean())


BROKEN = {
    "a direction of fixed length is not homogeneous": (unit_mean, homogeneous),
    "the first row depends on the order": (first_row, permutation_equivariant),
    "the sum is no convex combination": (lambda J: J.sum(0), on_the_simplex),
    "squares are not linear in the scales": (lambda J: (J**2).sum(0), linear_under_row_scaling),
    "zero is no direction": (lambda J: 0 * J[0], strongly_stationary),
    "zero over zero": (lambda J: J.sum(0) / J.sum(0).norm(), finite),
    "the global generator": (lambda J: J.mean(0) * torch.rand(()), pure),
    "an exception for what is not finite": (lambda J: torch.linalg.eigh(J @ J.T)[1][0] @ J, non_finite),
}


def test_a_state_of_its_own_is_found_however_rarely_it_shows():
    calls = itertools.count()
    assert not laws_of(black_box(lambda J: J[0] + (next(calls) % 7 == 3)), homogeneous, settings=FEW)["homogeneous"]


def test_random_numbers_give_the_same_counterexample_again():
    first, second = (str(laws_of(black_box(lambda J: J[0] * torch.rand(())), pure, settings=FEW)) for _ in range(2))
    assert first == second


@pytest.mark.parametrize("name", BROKEN)
def test_what_a_function_breaks_is_found(name):
    f, law = BROKEN[name]
    assert not laws_of(black_box(f), law, settings=FEW)[law.__name__]


def test_a_convex_combination_of_the_rows_is_on_the_simplex():
    weights = torch.tensor([0.25, 0.75], dtype=torch.float64)
    held = laws_of(black_box(lambda J: weights @ J), on_the_simplex, jacobians=jacobians(rows=2), settings=FEW)
    assert held["on_the_simplex"]


@pytest.mark.parametrize(
    ("f", "kind", "message"),
    [
        (3, TypeError, "black_box: f must be a function, found int. Pass a function of the matrix"),
        (lambda J: J.sum(0).tolist(), TypeError, r"f must return a tensor, the direction \[3\], found list"),
        (lambda J: J.sum(1), ValueError, r"one number per column, \[3\], found \[2\]. Return the direction"),
        (lambda J: J[:1], ValueError, r"one number per column, \[3\], found \[1, 3\]"),
    ],
    ids=["no function", "no tensor", "weights", "one row"],
)
def test_what_is_no_direction_is_refused(f, kind, message):
    with pytest.raises(kind, match=message):
        aggregate(black_box(f), torch.ones(2, 3))


def test_aggregators_of_torchjd():
    peer = pytest.importorskip("torchjd.aggregation")
    assert laws_of(black_box(peer.Mean()), homogeneous, on_the_simplex, settings=FEW) == {
        "homogeneous": True,
        "on_the_simplex": True,
    }
    (example,) = laws_of(black_box(peer.MGDA()), strongly_stationary, settings=FEW).values()
    assert not example
    with pytest.raises(AssertionError, match="not strongly stationary"):
        strongly_stationary(black_box(peer.MGDA()), example.jacobian)
