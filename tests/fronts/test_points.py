"""Preferences that are spread over the simplex; which points are not dominated, and the knee."""

import math
from itertools import product

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from functional_jd.fronts import knee, lattice, non_dominated


@pytest.mark.parametrize(("m", "divisions"), [(1, 1), (1, 5), (2, 1), (2, 7), (3, 1), (3, 4), (4, 3), (5, 2)])
def test_the_points_are_all_multiples_of_one_division_that_add_to_one(m, divisions):
    expected = [counts for counts in product(range(divisions + 1), repeat=m) if sum(counts) == divisions]
    found = lattice(m, divisions)
    assert found.dtype == torch.float64
    assert torch.equal(found, torch.tensor(expected, dtype=torch.float64).reshape(-1, m) / divisions)


@given(st.integers(1, 4).flatmap(lambda m: st.lists(st.tuples(*[st.integers(0, 3)] * m), min_size=1, max_size=12)))
def test_what_nobody_beats_is_not_dominated(points):
    def beats(p, q):
        return p != q and all(a <= b for a, b in zip(p, q, strict=True))

    expected = [not any(beats(p, q) for p in points) for q in points]
    found = torch.tensor(points, dtype=torch.float64)
    assert non_dominated(found).tolist() == expected
    assert expected[knee(found)]


def test_non_dominated_composes_and_leaves_out_what_is_not_finite():
    points = torch.rand(3, 10, 2, generator=torch.Generator().manual_seed(0))
    expected = torch.stack([non_dominated(cloud) for cloud in points])
    assert torch.equal(torch.vmap(non_dominated)(points), expected)
    assert torch.equal(torch.compile(non_dominated, fullgraph=True, backend="eager")(points[0]), expected[0])
    assert non_dominated(torch.tensor([[torch.nan, 0.0], [1.0, 1.0], [torch.inf, 0.0]])).tolist() == [0, 1, 0]


def test_the_knee_of_a_circle_is_its_middle_in_any_units():
    angles = torch.linspace(0, math.pi / 2, 9, dtype=torch.float64)
    circle = 1 - torch.stack([angles.cos(), angles.sin()], 1)  # convex: its middle is nearest to the ideal point
    assert knee(circle) == 4
    assert knee(circle * torch.tensor([1e3, 1e-3]) + torch.tensor([-2.0, 5.0])) == 4
    worse = circle + torch.tensor([0.5, 50.0]), torch.full((1, 2), torch.nan)
    assert knee(torch.cat([circle, *worse]) - torch.tensor([100.0, 1.0])) == 4
    assert knee(torch.tensor([[0.5, 1.0, 3.0], [0.2, 1.0, 3.3], [0.1, 1.0, 5.0]])) == 1


def test_the_knee_of_several_losses_is_nearest_to_the_ideal_between_ideal_and_nadir():
    points = torch.tensor([[0.0, 2.0, 4.0], [1.0, 0.0, 4.0], [1.0, 2.0, 0.0], [0.2, 0.6, 0.8]])
    assert knee(points) == 3
    batch = torch.stack([points, points.flip(0)])
    assert torch.vmap(knee)(batch).tolist() == [3, 0]
    assert torch.compile(knee, fullgraph=True, backend="eager")(points) == 3
