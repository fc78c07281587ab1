"""Weights by entry: what they multiply, by torch's own broadcasting, and what is refused."""

import itertools

import pytest
import torch
import torch._dynamo
from bounds import check_same, check_within, eps
from sequences import random_rows

import functional_jd as jd
from functional_jd.aggregation import AffineWeights, combine

SHAPES = [(2, 3, 4), (2, 2, 4), (3, 3, 3), (2, 2), (3,), (1, 1)]  # square ones tell rows from other axes


def fitting(shape):
    """All shapes with as many dimensions, each of the full size or 1."""
    return {tuple(sizes) for sizes in itertools.product(*({1, size} for size in shape))}


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_weights_of_all_dimensions_broadcast_as_in_torch(shape):
    leaf = random_rows(*shape)
    for index, own in enumerate(sorted(fitting(shape))):
        weights = random_rows(*own, seed=1 + index)
        found = combine({"w": leaf}, {"w": weights})["w"]
        check_within(found, (leaf * weights).sum(0), 8 * eps() * (leaf * weights).abs().sum(0))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_one_number_for_each_row_weighs_rows_also_where_another_axis_is_as_long(shape):
    leaf, weights = random_rows(*shape), random_rows(shape[0], seed=1)
    terms = [w * row for w, row in zip(weights, leaf, strict=True)]
    check_within(combine({"w": leaf}, {"w": weights})["w"], sum(terms), 8 * eps() * sum(map(torch.abs, terms)))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_weights_of_other_shapes_are_refused_by_the_name_of_their_leaf(shape):
    sizes = sorted({1, 2, 3, 4})
    others = {own for count in range(len(shape) + 2) for own in itertools.product(sizes, repeat=count)}
    for own in sorted(others - fitting(shape) - {shape[:1]}):
        with pytest.raises(ValueError, match=r"combine: weights of leaf 'a\.w' must have shape \[\d\], one per row"):
            combine({"a": {"w": random_rows(*shape)}}, {"a": {"w": random_rows(*own)}})


def test_a_rule_that_returns_a_direction_is_told_so():
    rule = jd.stateless(jd.views.full_jacobian, lambda J: {name: leaf.sum(0) for name, leaf in J.items()})
    for shape in ((2, 3, 4), (2, 2, 2), (2, 3), (2,)):
        with pytest.raises(ValueError, match=r"aggregate: .*A rule returns weights, and no direction\."):
            jd.aggregate(rule, {"w": random_rows(*shape)})


@pytest.mark.parametrize("rest", [(2, 3), (1,), (), (4,)], ids=str)
def test_the_rest_has_the_shape_of_the_direction(rest):
    weights = AffineWeights(torch.ones(2, 1, dtype=torch.float64), random_rows(*rest))
    with pytest.raises(ValueError, match=r"combine: expected the rest of leaf 'w' of shape \[3\], that of"):
        combine({"w": random_rows(2, 3)}, {"w": weights})
    good = combine({"w": random_rows(2, 3)}, {"w": weights._replace(rest=random_rows(3, seed=2))})["w"]
    torch.testing.assert_close(good, random_rows(2, 3).sum(0) + random_rows(3, seed=2))


def test_transforms_keep_what_weights_by_entry_mean():
    leaf, weights = random_rows(2, 2, 4), random_rows(2, 1, 4, seed=1)
    weighted = lambda leaf, weights: combine({"w": leaf}, {"w": weights})["w"]
    batch = random_rows(5, 2, 2, 4, seed=2)
    found = torch.vmap(weighted, (0, None))(batch, weights)
    check_same(found, (batch * weights).sum(1))
    grad = torch.func.grad(lambda w: weighted(leaf, w).square().sum())(weights)
    expected = 2 * (leaf * (leaf * weights).sum(0)).sum(1, keepdim=True)
    check_same(grad, expected)
    _, slope = torch.func.jvp(lambda w: weighted(leaf, w), (weights,), (random_rows(2, 1, 4, seed=3),))
    check_same(slope, weighted(leaf, random_rows(2, 1, 4, seed=3)))
    compiled = torch.compile(weighted, fullgraph=True, backend="eager")
    assert torch.equal(compiled(leaf, weights), weighted(leaf, weights))


@pytest.mark.parametrize("own", [(2, 1), (4,), (2, 4), (1,)], ids=str)
def test_a_compiled_rule_does_not_take_weights_of_other_shapes_either(own):
    weights, J = random_rows(*own, seed=1), random_rows(2, 2, 4)

    def weighted(leaf, weights):
        rule = jd.stateless(jd.views.full_jacobian, lambda _: {"w": weights})
        return jd.aggregate(rule, {"w": leaf}).direction["w"]

    compiled = torch.compile(weighted, fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(J, random_rows(2, 2, 1, seed=1)), (J * random_rows(2, 2, 1, seed=1)).sum(0))
    with pytest.raises(torch._dynamo.exc.Unsupported, match="of leaf"):
        compiled(J, weights)
