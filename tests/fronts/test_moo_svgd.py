"""Weights of descent and repulsion: finite differences of the kernel, and what a population does with them."""

import numpy as np
import pytest
import torch
from bounds import check_within, eps, half_the_digits
from solutions import check_composes, quadratics, trained
from torch.autograd import gradcheck

import functional_jd as jd
from functional_jd.fronts import hypervolume, moo_svgd


def seen(k, m, seed=0):
    """Gramians and losses of k solutions."""
    generator = torch.Generator().manual_seed(seed)
    J = torch.randn(k, m, 6, generator=generator, dtype=torch.float64)
    return J @ J.mT, torch.rand(k, m, generator=generator, dtype=torch.float64)


STEP = 1e-6


def expected_weights(G, L, repulsion, h):
    """Kernels in NumPy, their derivatives by finite differences, and the weights of `mgda`."""
    G, L = G.numpy(), L.numpy()
    k, m = L.shape

    def kernels(point, others):
        return np.exp(-np.square(point - others).sum(-1) / h).sum()

    found, step = np.empty((k, m)), STEP
    for i in range(k):
        found[i] = kernels(L[i], L) * jd.mgda().update(torch.from_numpy(G[i]), ())[0].numpy()
        for j, unit in enumerate(np.eye(m)):
            slope = (kernels(L[i] + step * unit, L) - kernels(L[i] - step * unit, L)) / (2 * step)
            found[i, j] += repulsion * slope
    return torch.tensor(np.maximum(found, 0))


@pytest.mark.parametrize(("repulsion", "h"), [(1.0, 0.3), (0.0, 0.3), (3.0, 0.05), (0.5, 2.0)])
@pytest.mark.parametrize(("k", "m"), [(1, 2), (2, 2), (5, 3)])
def test_weights_are_those_of_descent_and_repulsion(k, m, repulsion, h):
    G, L = seen(k, m)
    found = moo_svgd(repulsion, h).weigh((G, L))
    # A kernel is rounded, and its third derivative is below 32 / h^1.5.
    slopes = repulsion * k * (eps() / STEP + STEP**2 * 32 / h**1.5)
    check_within(found, expected_weights(G, L, repulsion, h), 64 * k * half_the_digits() + slopes)


@pytest.mark.parametrize(("k", "m"), [(2, 2), (3, 2), (6, 3), (3, 1)])
def test_the_usual_bandwidth_is_the_scaled_median_of_squared_distances(k, m):
    G, L = seen(k, m, seed=1)
    squares = sorted(float((L[i] - L[j]).square().sum()) for i in range(k) for j in range(i))
    h = squares[(len(squares) - 1) // 2] / k ** (2 / max(m - 1, 1))
    torch.testing.assert_close(moo_svgd().weigh((G, L)), moo_svgd(1.0, h).weigh((G, L)))


def test_equal_solutions_descend_and_one_that_is_not_finite_does_not_touch_the_others():
    G, L = seen(3, 2)
    together = moo_svgd().weigh((G, L[:1].expand(3, 2)))
    torch.testing.assert_close(together, 3 * moo_svgd(0.0, 1e-9).weigh((G, L)))
    lost, h = torch.cat([L, torch.tensor([[torch.inf, 0.0]])]), 0.2
    found = moo_svgd(1.0, h).weigh((torch.cat([G, G[:1]]), lost))
    torch.testing.assert_close(found[:3], moo_svgd(1.0, h).weigh((G, L)))
    assert found[3].isnan().all()
    torch.testing.assert_close(moo_svgd().weigh((torch.cat([G, G[:1]]), lost))[:3], moo_svgd().weigh((G, L)))
    assert moo_svgd().weigh((G[:2], lost[2:]))[0].isfinite().all()


def test_a_solution_far_from_others_that_coincide_descends():
    G, L = seen(4, 2)
    L[1:3], L[3] = L[0], L[0] + 100
    descent = moo_svgd(0.0, 1e-9).weigh((G, L[[0, 0, 0, 3]]))
    torch.testing.assert_close(moo_svgd().weigh((G, L)), descent)
    torch.testing.assert_close(descent[3].sum(), torch.ones(()).double())


@pytest.mark.parametrize("h", [0.3, None])
def test_under_transforms(h):
    """Of numbers and of the usual bandwidth; of the losses with a bandwidth: `test_population.py`."""
    G, L = seen(4, 2)
    weights = lambda repulsion, L=L: moo_svgd(repulsion, h).weigh((G, L))
    check_composes(weights, torch.tensor([0.0, 0.5, 2.0]).double())
    assert gradcheck(weights, [x.clone().requires_grad_() for x in (L.new_ones(()), L)], check_forward_ad=True)
    width = torch.tensor(0.3).double().requires_grad_()
    assert gradcheck(lambda h: moo_svgd(1.0, h).weigh((G, L)), width, check_forward_ad=True)


@pytest.mark.parametrize("seed", [0, 1])
def test_solutions_that_start_close_spread_over_the_front(seed):
    start = 0.3 * torch.randn(6, 3, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    reference, worth = torch.tensor([2.0, 2.0]).double(), []
    for repulsion in (0.0, 1.0):
        front = trained(start, lambda w: quadratics(w) / 12, moo_svgd(repulsion), (1.0, 0.3), 80)
        w = front.states.params
        assert (w - w.mean(1, keepdim=True)).abs().max() < 1e-2  # on the line through the minima
        worth.append(float(hypervolume(front.losses, reference)))
    # The whole front, sqrt(L_1) + sqrt(L_2) = 1, dominates 4 - 1/6; six points dominate less.
    assert worth[0] < 3.5 < 3.7 < worth[1] < 4 - 1 / 6
