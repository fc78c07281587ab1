"""The volume that points dominate, against inclusion and exclusion, its laws, and its derivatives."""

from itertools import combinations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.autograd import gradcheck, gradgradcheck
from torch.func import grad, jvp

from functional_jd.fronts import hypervolume, non_dominated


def cloud(k, m, seed=0):
    return torch.rand(k, m, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def by_inclusion_and_exclusion(points, reference):
    """What several points dominate together is what their largest coordinates dominate."""
    volume = 0.0
    for size in range(1, len(points) + 1):
        for chosen in combinations(points, size):
            sides = (reference - torch.stack(chosen).amax(0)).clamp(min=0)
            volume += (-1) ** (size + 1) * sides.prod()
    return volume


@pytest.mark.parametrize("m", [1, 2, 3, 4])
@pytest.mark.parametrize("k", [1, 2, 8])
def test_it_is_what_inclusion_and_exclusion_give(m, k):
    points, reference = cloud(k, m, seed=k), torch.full((m,), 0.8, dtype=torch.float64)
    # 2^k terms of at most 1, each rounded a few times
    bound = 2**k * 4 * torch.finfo(torch.float64).eps
    assert abs(hypervolume(points, reference) - by_inclusion_and_exclusion(points, reference)) <= bound


grids = st.integers(1, 4).flatmap(
    lambda m: st.lists(st.lists(st.integers(0, 4), min_size=m, max_size=m), min_size=1, max_size=6)
)


@given(points=grids)
def test_on_a_grid_it_counts_the_cells(points):
    m = len(points[0])
    points = torch.tensor(points, dtype=torch.float64)
    cells = torch.cartesian_prod(*[torch.arange(3.0)] * m).reshape(-1, m)
    dominated = (points.unsqueeze(1) <= cells).all(-1).any(0)
    reference = torch.full((m,), 3.0)
    found = hypervolume(points, reference)
    assert found == dominated.sum()
    assert hypervolume(points.flip(0), reference) == found
    assert hypervolume(points.flip(1), reference) == found
    assert hypervolume(torch.cat([points, points, points + 1]), reference) == found
    assert hypervolume(points[non_dominated(points)], reference) == found


@pytest.mark.parametrize("m", [1, 2, 3, 4])
def test_derivatives_are_those_of_finite_differences(m):
    points = cloud(6, m, seed=m).requires_grad_()
    reference = torch.full((m,), 0.9, dtype=torch.float64).requires_grad_()
    assert gradcheck(hypervolume, (points, reference), check_forward_ad=True)
    assert gradgradcheck(hypervolume, (points, reference))


def test_dominated_points_have_no_gradient():
    points, reference = cloud(12, 3), torch.ones(3, dtype=torch.float64)
    gradient = grad(hypervolume)(points, reference)
    eps = torch.finfo(torch.float64).eps
    assert (gradient[~non_dominated(points)].abs() <= 12 * eps).all()
    assert (gradient[non_dominated(points)] < 0).all()


@pytest.mark.parametrize("m", [2, 3, 4])
def test_it_composes(m):
    points, reference = torch.stack([cloud(5, m, seed) for seed in range(3)]), torch.ones(m)
    expected = torch.stack([hypervolume(p, reference) for p in points])
    torch.testing.assert_close(torch.vmap(hypervolume, in_dims=(0, None))(points, reference), expected)
    compiled = torch.compile(hypervolume, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(points[0], reference), expected[0])
    slopes = torch.stack([grad(hypervolume)(p, reference) for p in points])
    torch.testing.assert_close(torch.vmap(grad(hypervolume), in_dims=(0, None))(points, reference), slopes)
    rate = jvp(lambda p: hypervolume(p, reference), (points[0],), (torch.ones_like(points[0]),))[1]
    torch.testing.assert_close(rate, slopes[0].sum())


def test_points_beyond_the_reference_add_nothing_and_nan_is_not_hidden():
    reference = torch.ones(2)
    assert hypervolume(torch.empty(0, 2), reference) == 0
    beyond = torch.tensor([[0.5, 2.0], [torch.inf, 0.0], [0.5, 0.5]])
    assert hypervolume(beyond, reference) == 0.25
    assert hypervolume(torch.tensor([[0.5, torch.nan], [0.0, 0.0]]), reference).isnan()
    assert hypervolume(torch.tensor([[-torch.inf, 0.0]]), reference) == torch.inf


@pytest.mark.parametrize(
    ("points", "reference", "message"),
    [
        (
            torch.ones(3),
            torch.ones(3),
            r"hypervolume: points must be \[K, m\], one in a row, found torch.float32 \[3\]",
        ),
        (
            torch.ones(3, 2),
            torch.ones(3),
            r"hypervolume: reference must be a floating-point tensor \[2\], one per loss",
        ),
        (torch.ones(3, 5), torch.ones(5), "at most 4 losses, .*found 5.*moocore.hypervolume"),
        (torch.ones(3, 2, dtype=torch.int64), torch.ones(2), "points must be a floating-point tensor"),
        (torch.ones(3, 2), [1.0, 1.0], "reference must be a floating-point tensor"),
    ],
)
def test_what_is_no_set_of_points_is_refused(points, reference, message):
    with pytest.raises((TypeError, ValueError), match=message):
        hypervolume(points, reference)
