"""Aggregation: rows are added up as weights say, views show what they name, and the lifts keep their promises."""

import math

import hypothesis
import pytest
import torch
from bounds import check_within, eps
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._pytree import tree_leaves, tree_map
from two_tasks import close

import functional_jd as fj
from functional_jd.aggregation.aggregate import apply_rule, start
from functional_jd.aggregation.views import cross_gramian, full_jacobian, gramian, losses, no_gradients
from functional_jd.core.heads import MultitaskJacobian
from functional_jd.testing import batched, compiled, differentiable, laws_of, pure, shaped, tree_equals_flat

numbers = st.integers(-4, 4).map(float)


def rows_of(n, m=(1, 5)):
    return st.lists(st.lists(numbers, min_size=n, max_size=n), min_size=m[0], max_size=m[1])


def split(matrix):
    """Six columns as a tree of three leaves, one of them without dimensions of its own."""
    return {"w": matrix[:, :4].reshape(-1, 2, 2), "b": [matrix[:, 4], matrix[:, 5:]]}


def random_tree(*batch, m=3, seed=0, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    shapes = {"w": (2, 2), "b": (3,)}
    return {
        k: torch.randn(*batch, m, *s, generator=generator, dtype=torch.float64).to(dtype) for k, s in shapes.items()
    }


def counting():
    """A rule that remembers how often it was asked, and weighs the rows with that."""
    return fj.Aggregator(no_gradients, lambda seen: seen.new_zeros(()), lambda seen, n: (seen + n + 1, n + 1))


def geometric():
    return fj.scalarized(lambda v: v.log().mean().exp())


@given(rows_of(6), st.lists(numbers, min_size=5, max_size=5), st.sampled_from([torch.float32, torch.float64]))
def test_combine_adds_up_the_rows_as_plain_numbers_do(rows, weights, dtype):
    weights = weights[: len(rows)]
    expected = [sum(w * row[i] for w, row in zip(weights, rows, strict=True)) for i in range(6)]
    found = fj.aggregation.combine(split(torch.tensor(rows, dtype=dtype)), torch.tensor(weights, dtype=torch.float64))
    assert [*found["w"].reshape(-1).tolist(), found["b"][0].item(), found["b"][1].item()] == expected
    assert {leaf.dtype for leaf in tree_leaves(found)} == {dtype}


@given(st.lists(st.integers(1, 30).map(lambda k: k / 4), min_size=1, max_size=6))
def test_scalarized_weighs_with_the_derivatives_by_hand(values):
    v = torch.tensor(values, dtype=torch.float64)
    mean = math.prod(values) ** (1 / len(values))
    jacobian = torch.eye(len(values), dtype=torch.float64)
    found = fj.aggregate(geometric(), jacobian, losses=v)
    check_within(found.direction, mean / len(values) / v, 64 * eps() * mean / v)
    assert found.weights.dtype == torch.float64
    assert found.state == ()
    top = fj.aggregate(fj.scalarized(lambda v: torch.logsumexp(v, 0)), jacobian, losses=v)
    torch.testing.assert_close(top.weights, torch.softmax(v, 0))


def test_scalarized_sees_float64_in_leaf_order_whatever_the_losses_are():
    seen = []

    def s(values):
        seen.append(values.detach())
        return (values * torch.arange(1.0, 4.0)).sum()

    given_losses = {"b": torch.tensor([2.0, 3.0], dtype=torch.bfloat16), "a": torch.tensor(1.0)}
    weights = fj.aggregate(fj.scalarized(s), torch.ones(3, 2), losses=given_losses).weights
    assert weights.tolist() == [1, 2, 3]
    assert seen[0].dtype == torch.float64


def test_a_rule_weighs_the_trunk_and_the_heads_pass_through():
    shared, heads = random_tree(), {"v": torch.tensor([1.0, 2.0])}
    split_jacobian = MultitaskJacobian(shared, heads)
    rule = fj.stateless(gramian, lambda G: torch.softmax(G.diagonal(), 0))
    found = fj.aggregate(rule, split_jacobian)
    alone = fj.aggregate(rule, shared)
    close(found.direction["shared"], alone.direction, rtol=0, atol=0)
    assert found.direction["heads"]["v"].tolist() == [1, 2]
    assert torch.equal(gramian(split_jacobian), gramian(shared))
    assert no_gradients(split_jacobian).shape == (3,)
    assert full_jacobian(split_jacobian) is shared


def test_no_state_starts_the_rule_and_the_state_that_is_returned_carries_on():
    jacobian = random_tree()
    first = fj.aggregate(counting(), jacobian)
    second = fj.aggregate(counting(), jacobian, first.state)
    assert first.weights.tolist() == [1, 1, 1]
    assert second.weights.tolist() == [2, 2, 2]
    assert start(counting(), jacobian).item() == 0
    close(fj.aggregate(counting(), jacobian, start(counting(), jacobian)), first)
    found = apply_rule(counting(), no_gradients(jacobian), first.state)
    close(found, (second.weights, second.state))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_rows_are_added_up_in_float32(dtype):
    jacobian = torch.full((2049, 1), 1.0, dtype=dtype)
    found = fj.aggregation.combine(jacobian, torch.ones(2049, dtype=torch.float64) / 2049)
    assert found.dtype == dtype
    assert found.item() == 1
    assert gramian(jacobian[:2] * 300).tolist() == [[90000.0] * 2] * 2


@pytest.mark.parametrize("size", [1e-30, 1e30])
def test_gramians_neither_overflow_nor_vanish(size):
    row = torch.tensor([[3.0, 4.0]]) * size
    assert gramian(row).item() == pytest.approx(25 * size**2, rel=4 * eps(torch.float32), abs=0)


def test_surrounding_autocast_changes_nothing():
    jacobian = random_tree(dtype=torch.float32)
    values = torch.tensor([1.0, 2.0, 4.0])
    for rule in (geometric(), fj.stateless(gramian, lambda G: torch.softmax(G @ G[0], 0))):
        expected = fj.aggregate(rule, jacobian, losses=values)
        with torch.autocast("cpu", torch.bfloat16):
            close(fj.aggregate(rule, jacobian, losses=values), expected, rtol=0, atol=0)


@pytest.mark.parametrize("poison", [math.inf, math.nan])
def test_what_is_not_finite_stays_so_also_with_weight_zero(poison):
    jacobian = torch.tensor([[1.0, 1.0], [poison, 1.0]])
    found = fj.aggregation.combine(jacobian, torch.tensor([1.0, 0.0], dtype=torch.float64))
    assert not found[0].isfinite()
    assert found[1] == 1


# Transforms

RULES = {
    "blank": counting,
    "losses": geometric,
    "gramian": lambda: fj.stateless(gramian, lambda G: torch.softmax(G.diagonal(), 0)),
    "cross": lambda: fj.stateless(cross_gramian, lambda G: torch.softmax(G.diagonal(), 0)),
    "whole": lambda: fj.stateless(full_jacobian, lambda J: tree_map(torch.tanh, J)),
}
every_rule = pytest.mark.parametrize("rule", [build() for build in RULES.values()], ids=RULES)


@every_rule
def test_lifts_obey_the_laws_of_rules(rule):
    few = hypothesis.settings(max_examples=10, derandomize=True, database=None, deadline=None)
    found = laws_of(rule, pure, shaped, batched, compiled, tree_equals_flat, differentiable, settings=few)
    assert all(value is True for value in found.values()), found


# Mistakes

ONES, SPLIT = torch.ones(2, 3), MultitaskJacobian({"w": torch.ones(2, 3, dtype=torch.float64)}, {})
FOUR = fj.stateless(gramian, lambda G: torch.ones(4))


def scalarizing(s):
    return lambda: fj.aggregate(fj.scalarized(s), ONES, losses=torch.ones(2))


MISTAKES = {
    "others": (lambda: fj.aggregate(counting(), ONES, None, ONES[:1]), ValueError, "of rows, found 2 and 1"),
    "no other": (lambda: fj.aggregate(fj.stateless(cross_gramian, torch.diag), ONES), ValueError, "found only one"),
    "no losses": (lambda: fj.aggregate(geometric(), ONES), ValueError, "needs the losses, found none. Pass them"),
    "swapped": (
        lambda: fj.stateless(torch.diag, gramian),
        TypeError,
        r"^stateless: weigh must .* View\. Pass stateless\(",
    ),
    "no scalar": (scalarizing(torch.exp), ValueError, r"s must return one scalar, found torch.float64 \[2\]. Take"),
    "a number": (scalarizing(lambda v: 1.0), ValueError, "scalarized: s must return one scalar, found 1.0"),
    "weights": (lambda: fj.aggregation.combine(ONES, torch.ones(3)), ValueError, r"\[2\], found \[3\]\. Check the num"),
    "a weight": (lambda: fj.aggregation.combine(ONES, torch.ones(())), ValueError, r"combine: .*\[2\], found \[\]"),
    "weights of a rule": (lambda: fj.aggregate(FOUR, SPLIT), ValueError, r"aggregate: .*\[2\], found \[4\]"),
    "losses": (
        lambda: fj.aggregate(fj.stateless(losses, torch.ones_like), ONES, losses=[torch.ones(()), torch.ones(2)]),
        ValueError,
        r"aggregate: expected one loss per row, 2 in all, found 3\. Pass",
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_are_named_with_their_cure(mistake):
    make, kind, message = MISTAKES[mistake]
    with pytest.raises(kind, match=message):
        make()


@pytest.mark.parametrize("m", [2, 3])
def test_an_update_that_forgets_the_memory_is_named(m):
    rule = fj.Aggregator(fj.views.gramian, lambda G: torch.zeros(()), lambda G, memory: torch.ones(len(G)))
    error = r"aggregate: what the rule's update.* must be a pair, \(weights, memory\), found torch.float32 \["
    for state in (None, torch.zeros(())):
        with pytest.raises(TypeError, match=error):
            fj.aggregate(rule, torch.ones(m, 4), state)


def test_a_memory_of_numbers_is_refused_by_the_first_step():
    rule = fj.Aggregator(fj.views.gramian, lambda G: {"count": 0}, lambda G, memory: (torch.ones(len(G)), memory))
    losses = lambda p: torch.stack([p.square().sum(), (p - 1).square().sum()])
    how = {"losses": losses, "aggregator": rule, "optimizer": fj.sgd(0.1)}
    state = fj.train_state(torch.ones(3), **how)
    with pytest.raises(TypeError, match=r"^step: every leaf must be a tensor, .* found 0 and 0"):
        fj.step(state, **how)


@pytest.mark.parametrize("rule", [fj.mean(), fj.upgrad()])
def test_a_memory_that_a_rule_would_drop_is_refused(rule):
    J = torch.eye(3, dtype=torch.float64)
    memory = fj.aggregate(fj.pcd(), J).state
    with pytest.raises(ValueError, match="aggregate: the state must be one of this rule"):
        fj.aggregate(rule, J, memory)
    assert fj.aggregate(rule, J, ()).state == ()
