"""The volume that points dominate, its derivatives, and the weights of its ascent, by counts and by differences."""

import itertools
from itertools import combinations

import numpy as np
import pytest
import torch
from bounds import check_within, eps
from hypothesis import given
from hypothesis import strategies as st
from scipy.optimize import minimize
from solutions import check_composes, cloud, quadratics
from torch.autograd import gradcheck, gradgradcheck
from torch.func import grad, jvp

import functional_jd as jd
from functional_jd.fronts import hypervolume, hypervolume_gradient, non_dominated, train


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
    expected, h = torch.empty_like(points), H
    for front in one_behind_another(points):
        for place, k in enumerate(front):
            for i in range(points.shape[1]):
                up, down = points[front].clone(), points[front].clone()
                up[place, i] += h
                down[place, i] -= h
                expected[k, i] = (hypervolume(down, reference) - hypervolume(up, reference)) / (2 * h)
    return expected / expected.norm(dim=1, keepdim=True)


@pytest.mark.parametrize("m", [1, 2, 3, 4])
@pytest.mark.parametrize("k", [1, 2, 7])
def test_weights_are_unit_slopes_of_the_hypervolume_of_the_own_front(k, m):
    points, reference = cloud(k, m, seed=k), torch.full((m,), 1.5, dtype=torch.float64)
    found = hypervolume_gradient(reference).weigh(points)
    check_slopes(found, by_differences(points, reference))


def test_many_fronts():
    chain = torch.arange(9, dtype=torch.float64).unsqueeze(1) + torch.tensor([[0.0, 0.5]], dtype=torch.float64)
    points, reference = torch.cat([chain, chain.flip(1) + 0.1]), torch.tensor([20.0, 20.0], dtype=torch.float64)
    assert len(one_behind_another(points)) == 9
    found = hypervolume_gradient(reference).weigh(points)
    check_slopes(found, by_differences(points, reference))


def test_permutations():
    points, reference = cloud(6, 3), torch.tensor([1.0, 2.0, 3.0])
    found = hypervolume_gradient(reference).weigh(points)
    for order in itertools.islice(itertools.permutations(range(6)), 0, 720, 97):
        torch.testing.assert_close(hypervolume_gradient(reference).weigh(points[list(order)]), found[list(order)])
    turned = [2, 0, 1]
    torch.testing.assert_close(hypervolume_gradient(reference[turned]).weigh(points[:, turned]), found[:, turned])


def test_beyond_the_reference_the_worst_solution_sets_it():
    points = torch.tensor([[0.5, 4.0], [2.0, 0.5], [1.0, 1.0]]).double()
    found = hypervolume_gradient([3.0, 3.0]).weigh(points)
    check_slopes(found, by_differences(points, torch.tensor([3.0, 4.4], dtype=torch.float64)))
    alone = hypervolume_gradient([0.0, 0.0]).weigh(torch.zeros(1, 2))
    torch.testing.assert_close(alone, torch.full((1, 2), 0.5**0.5).double())


def test_equal_solutions_belong_to_fronts_of_their_own():
    points, reference = torch.tensor([[0.2, 0.5], [0.2, 0.5], [0.6, 0.1]]).double(), torch.ones(2).double()
    found = hypervolume_gradient(reference).weigh(points)
    check_slopes(found[[0, 2]], by_differences(points[[0, 2]], reference))
    check_slopes(found[1], by_differences(points[1:2], reference)[0])


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_a_solution_that_is_not_finite_does_not_touch_the_others(bad):
    points = torch.tensor([[0.2, 0.5], [bad, 0.0], [0.6, 0.1]]).double()
    found = hypervolume_gradient([1.0, 1.0]).weigh(points)
    torch.testing.assert_close(found[[0, 2]], hypervolume_gradient([1.0, 1.0]).weigh(points[[0, 2]]))
    assert found[1].isnan().all()


@pytest.mark.parametrize("m", [2, 3])
def test_weights_under_transforms(m):
    points, reference = torch.stack([cloud(5, m, seed) for seed in range(3)]), torch.full((m,), 1.2).double()

    def weights(points, reference):
        return hypervolume_gradient(reference).weigh(points)

    check_composes(lambda points: weights(points, reference), points)
    swept = torch.stack([reference, 2 * reference])
    expected = torch.stack([weights(points[0], r) for r in swept])
    torch.testing.assert_close(torch.vmap(weights, in_dims=(None, 0))(points[0], swept), expected)
    inputs = points[0].clone().requires_grad_(), reference.clone().requires_grad_()
    assert gradcheck(weights, inputs, check_forward_ad=True)


def best_hypervolume(losses_at, reference, k):
    """The largest hypervolume of k points of a curve, t in [0, 1], by SciPy from several starts."""

    def negative(t):
        points = torch.tensor(np.stack([losses_at(x) for x in t]))
        return -float(hypervolume(points, torch.tensor(reference)))

    starts = np.random.default_rng(0).uniform(0, 1, (4, k))
    how = {"method": "Nelder-Mead", "bounds": [(0, 1)] * k, "options": {"xatol": 1e-9, "fatol": 1e-12, "maxiter": 9000}}
    return -min(minimize(negative, start, **how).fun for start in starts)


@pytest.mark.parametrize("k", [2, 3, 5])
def test_solutions_of_two_quadratics_reach_the_best_hypervolume(k):
    reference = np.array([13.0, 13.0])
    best = best_hypervolume(lambda t: np.array([12 * (t - 1) ** 2, 12 * t**2]), reference, k)
    front = torch.randn(k, 3, generator=torch.Generator().manual_seed(k), dtype=torch.float64)
    for rate in (0.1, 0.02):
        method = {"losses": quadratics, "rule": hypervolume_gradient(reference.tolist()), "optimizer": jd.sgd(rate)}
        front = train(front, [()] * 60, **method)
    assert float(hypervolume(front.losses, torch.tensor(reference))) == pytest.approx(best, rel=1e-5)


@pytest.mark.parametrize("k", [1, 2, 3])
def test_on_a_line_the_best_solutions_are_evenly_spread(k):
    # L_1 + L_2 = 1 with the reference 1, 1: k points divide the line into k + 1 parts.
    def losses(w):
        share = torch.sigmoid(w).sum()
        return torch.stack([share, 1 - share])

    start = torch.randn(k, 1, generator=torch.Generator().manual_seed(k), dtype=torch.float64)
    for rate in (1.0, 0.5):
        method = {"losses": losses, "rule": hypervolume_gradient([1.0, 1.0]), "optimizer": jd.sgd(rate)}
        start = train(start, [()] * 100, **method)
    expected = torch.arange(1, k + 1, dtype=torch.float64) / (k + 1)
    torch.testing.assert_close(start.losses[:, 0].sort().values, expected, rtol=0, atol=1e-3)


@pytest.mark.parametrize(
    ("reference", "points", "kind", "message"),
    [
        ([1.0, torch.nan], torch.ones(2, 2), ValueError, "hypervolume_gradient: reference must be finite"),
        (torch.ones(2, dtype=torch.int64), torch.ones(2, 2), TypeError, "reference must be a floating-point tensor"),
        ([1.0] * 3, torch.ones(2, 2), ValueError, "hypervolume_gradient: reference must be one per row, found 3 and 2"),
        ([1.0] * 5, torch.ones(2, 5), ValueError, "hypervolume_gradient: losses must be at most 4, .*found 5"),
    ],
)
def test_what_does_not_fit_is_refused(reference, points, kind, message):
    with pytest.raises(kind, match=message):
        hypervolume_gradient(reference).weigh(points)
