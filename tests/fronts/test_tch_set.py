"""Few solutions for many losses: the authors' formula, closed cases, bounds, and what a population finds."""

import math

import pytest
import torch
from sequences import random_rows
from solutions import trained
from torch.autograd import gradcheck

import functional_jd as jd
from functional_jd.fronts import tch_set


def scalarization(L, mu, u, z):
    """In the words of the paper; the reference code has it with u = 1 and z = 0."""
    smallest = -mu * torch.logsumexp(-L / mu, 0)
    return mu * torch.logsumexp(u * (smallest - z) / mu, 0)


@pytest.mark.parametrize("mu", [0.05, 0.1, 3.0])
@pytest.mark.parametrize(("k", "m"), [(1, 3), (2, 1), (3, 7)])
def test_weights_are_the_slopes_of_the_scalarization(k, m, mu):
    L, z = random_rows(k, m), random_rows(m, seed=1)
    for u in (torch.ones(m, dtype=torch.float64), torch.rand(m).double() + 0.1):
        expected = torch.func.grad(scalarization)(L, mu, u, z)
        torch.testing.assert_close(tch_set(mu, u, z).weigh(L), expected)
        value, k_term = scalarization(L, mu, u, z), mu * u.max() * math.log(k)
        hard = (u * (L.amin(0) - z)).amax()
        assert hard - k_term - 1e-12 <= value <= hard + mu * math.log(m) + 1e-12
    torch.testing.assert_close(tch_set(mu, u).weigh(L), torch.func.grad(scalarization)(L, mu, u, 0.0))
    torch.testing.assert_close(tch_set(mu).weigh(L), torch.func.grad(scalarization)(L, mu, 1 / m, 0.0))


def test_closed_cases():
    L = random_rows(3, 5)
    torch.testing.assert_close(tch_set(2.0).weigh(L[:1])[0], jd.stch(2.0).update(L[0], ())[0])  # one solution
    best, of = L.min(0)
    worst = int(best.argmax())
    hard = torch.zeros(3, 5, dtype=torch.float64)
    hard[of[worst], worst] = 1 / 5
    torch.testing.assert_close(tch_set(1e-4).weigh(L), hard)  # the worst of the least losses counts alone
    torch.testing.assert_close(tch_set(1e9).weigh(L), torch.full((3, 5), 1 / 75).double())  # the mean of all
    torch.testing.assert_close(tch_set(1e-12).weigh(1e300 * L)[of[worst], worst], hard.max())  # nothing overflows


def test_permutations_scales_and_what_is_not_finite():
    L = random_rows(4, 3)
    found = tch_set(0.5).weigh(L)
    order, turned = [3, 1, 0, 2], [2, 0, 1]
    torch.testing.assert_close(tch_set(0.5).weigh(L[order][:, turned]), found[order][:, turned])
    torch.testing.assert_close(tch_set(50.0).weigh(100 * L), found)
    lost = torch.cat([L, torch.tensor([[torch.nan, 0.0, 0.0], [torch.inf, 0.0, 0.0]])])
    together = tch_set(0.5).weigh(lost)
    torch.testing.assert_close(together[:4], found)
    assert together[4:].isnan().all()


def test_under_transforms():
    """Of numbers; of the losses: `test_population.py`."""
    L = random_rows(3, 4)
    given = [torch.tensor(x).double().requires_grad_() for x in (0.3, [1.0, 2.0, 0.5, 1.0], [0.0, 1.0, -1.0, 0.2])]
    assert gradcheck(lambda mu, u, z: tch_set(mu, u, z).weigh(L), given, check_forward_ad=True)
    lost = torch.cat([L, L[:1] * torch.nan])
    size = lambda mu: tch_set(mu).weigh(lost)[:3].square().sum()
    assert torch.func.grad(size)(torch.tensor(0.3).double()).isfinite()


def test_two_solutions_part_forty_losses_between_them():
    """The losses have their minima in two groups; the least worst loss of two solutions is at the middles."""
    centers = torch.cat([torch.linspace(0.8, 1.2, 20), torch.linspace(-1.2, -0.8, 20)]).double()
    front = torch.tensor([0.1, -0.2], dtype=torch.float64)
    for mu in (0.3, 0.01, 1e-3):  # from smooth to sharp, as the authors' code does
        front = trained(front, lambda w: (w - centers).square(), tch_set(mu, torch.ones(40)), [mu / 4], 500)
    torch.testing.assert_close(front.states.params, torch.tensor([1.0, -1.0]).double(), atol=5e-3, rtol=0)
    assert front.losses.amin(0).amax() == pytest.approx(0.04, rel=0.03)
