"""The volume that points dominate, its derivatives, and the weights of its ascent, by counts and by differences."""

import pytest
import torch
from bounds import check_within, differences, eps
from hypothesis import given
from hypothesis import strategies as st
from solutions import check_composes, cloud, trained
from torch.autograd import gradcheck, gradgradcheck
from torch.func import grad, jvp

from functional_jd.fronts import hypervolume, hypervolume_gradient, non_dominated

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


@pytest.mark.parametrize("m", [2, 3, 4])
def test_it_composes(m):
    points, reference = torch.stack([cloud(5, m, seed) for seed in range(3)]), torch.ones(m)
    check_composes(lambda points: hypervolume(points, reference), points)
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


def one_behind_another(points):
    """Fronts, one after the other: what is left is sorted again without those before."""
    left, fronts = list(range(len(points))), []
    while left:
        kept = non_dominated(points[left])
        fronts.append([k for k, on in zip(left, kept, strict=True) if on])
        left = [k for k, on in zip(left, kept, strict=True) if not on]
    return fronts


H = 2.0**-14


def check_slopes(found, expected):
    """A hypervolume is linear in each coordinate: differences are off by its rounding over the step."""
    check_within(found, expected, 2**8 * eps() / H)


def by_differences(points, reference):
    """Unit vectors along finite differences of the hypervolume of each point's own front."""
    expected = torch.empty_like(points)
    for front in one_behind_another(points):
        slopes = differences(lambda own: hypervolume(own, reference)[None], points[front], H)[0]
        expected[front] = -slopes
    return expected / expected.norm(dim=1, keepdim=True)


@pytest.mark.parametrize("m", [1, 2, 3, 4])
@pytest.mark.parametrize("k", [1, 2, 7])
def test_weights_are_unit_slopes_of_the_hypervolume_of_the_own_front(k, m):
    points, reference = cloud(k, m, seed=k), torch.full((m,), 1.5, dtype=torch.float64)
    found = hypervolume_gradient(reference).weigh(points)
    check_slopes(found, by_differences(points, reference))


def test_many_fronts():
    chain = torch.arange(9).double()[:, None] + torch.tensor([[0.0, 0.5]])
    points, reference = torch.cat([chain, chain.flip(1) + 0.1]), torch.tensor([20.0, 20.0]).double()
    assert len(one_behind_another(points)) == 9
    check_slopes(hypervolume_gradient(reference).weigh(points), by_differences(points, reference))


def test_beyond_the_reference_the_worst_solution_sets_it():
    points = torch.tensor([[0.5, 4.0], [2.0, 0.5], [1.0, 1.0]]).double()
    found = hypervolume_gradient([3.0, 3.0]).weigh(points)
    check_slopes(found, by_differences(points, torch.tensor([3.0, 4.4], dtype=torch.float64)))
    alone = hypervolume_gradient([0.0, 0.0]).weigh(torch.zeros(1, 2))
    torch.testing.assert_close(alone, torch.full((1, 2), 0.5**0.5).double())
    assert (hypervolume_gradient([-10.0, -10.0]).weigh(points - 9) >= 0).all()


def test_equal_solutions_belong_to_fronts_of_their_own():
    points, reference = torch.tensor([[0.2, 0.5], [0.2, 0.5], [0.6, 0.1]]).double(), torch.ones(2).double()
    found = hypervolume_gradient(reference).weigh(points)
    check_slopes(found[[0, 2]], by_differences(points[[0, 2]], reference))
    check_slopes(found[1], by_differences(points[1:2], reference)[0])


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_a_solution_that_is_not_finite_does_not_touch_the_others(bad):
    points = torch.tensor([[0.2, 0.5], [bad, 0.3], [0.6, 0.1]]).double()
    found = hypervolume_gradient([1.0, 1.0]).weigh(points)
    torch.testing.assert_close(found[[0, 2]], hypervolume_gradient([1.0, 1.0]).weigh(points[[0, 2]]))
    assert found[1].isnan().all()


@pytest.mark.parametrize("m", [2, 3])
def test_weights_under_transforms(m):
    """Of the reference; of the losses: `test_population.py`."""
    points, reference = cloud(5, m), torch.full((m,), 1.2).double()
    weights = lambda reference: hypervolume_gradient(reference).weigh(points)
    swept = torch.stack([reference, 2 * reference])
    torch.testing.assert_close(torch.vmap(weights)(swept), torch.stack([weights(r) for r in swept]))
    assert gradcheck(weights, reference.requires_grad_(), check_forward_ad=True)


@pytest.mark.parametrize("k", [1, 2, 3])
def test_on_a_line_the_best_solutions_are_evenly_spread(k):
    # L_1 + L_2 = 1 with the reference 1, 1: k points divide the line into k + 1 parts.
    def losses(w):
        share = torch.sigmoid(w).sum()
        return torch.stack([share, 1 - share])

    start = torch.randn(k, 1, generator=torch.Generator().manual_seed(k), dtype=torch.float64)
    found = trained(start, losses, hypervolume_gradient([1.0, 1.0]), (1.0, 0.5), 100).losses
    expected = torch.arange(1, k + 1, dtype=torch.float64) / (k + 1)
    torch.testing.assert_close(found[:, 0].sort().values, expected, rtol=0, atol=1e-3)
