"""Pareto MTL: its two programs by `mgda`, and fronts in closed form."""

import math

import numpy as np
import pytest
import torch
from bounds import check_same
from solutions import quadratics, trained, vlmop2
from torch.nn.functional import normalize

import functional_jd as jd
from functional_jd.fronts import lattice, pmtl
from functional_jd.testing import ALWAYS, homogeneous, jacobians, obeys, rotation_blind

OF_THREE = pmtl(lattice(3, 2), 1)(lattice(3, 2)[1])
test_laws = obeys(OF_THREE, *ALWAYS, homogeneous, rotation_blind, jacobians=jacobians(3, wide=False))


def expected_direction(J, L, u, k, first):
    """Of the violated constraints alone in the first phase, if there are any; then beside the losses."""
    units = u / np.linalg.norm(u, axis=1, keepdims=True)
    constraints = units - units[k]
    violated = constraints[constraints @ L > 0] @ J
    rows = torch.from_numpy(violated if first and len(violated) else np.vstack([J, violated]))
    return jd.aggregate(jd.mgda(), rows).direction


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("m", [2, 3])
def test_directions_are_those_of_mgda(m, first):
    random, outside = np.random.default_rng(m), 0
    u = lattice(m, 4)
    rule = pmtl(u, 1 if first else 0)
    for k in range(len(u)):
        J = random.normal(size=(m, 6))
        L = u[k].numpy() + 0.01 if k % 2 else random.uniform(0.1, 1, m)
        found = jd.aggregate(rule(u[k]), torch.tensor(J), losses=torch.tensor(L))
        torch.testing.assert_close(found.direction, expected_direction(J, L, u.numpy(), k, first))
        assert found.state == 1
        outside += bool((u @ torch.tensor(L) / u.norm(dim=1)).argmax() != k)
    assert 0 < outside < len(u)


def test_the_first_phase_ends_in_the_sector_and_after_its_steps():
    u, J = lattice(2, 4), torch.tensor([[1.0, 0.2], [0.1, 1.0]]).double()
    inside, outside = torch.tensor([1.0, 1.0]).double(), torch.tensor([1.0, 0.0]).double()
    rule, mgda = pmtl(u, 2)(u[2]), jd.aggregate(jd.mgda(), J).direction
    torch.testing.assert_close(jd.aggregate(rule, J, losses=inside).direction, mgda)
    state, directions = None, []
    for _ in range(4):
        direction, _, state = jd.aggregate(rule, J, state, losses=outside)
        directions.append(direction)
    torch.testing.assert_close(directions[0], directions[1])
    torch.testing.assert_close(directions[2], directions[3])
    assert not torch.allclose(directions[1], directions[2])
    assert (J @ directions[0])[0] > 0  # the loss that is too large falls


@pytest.mark.parametrize(("losses", "length"), [(quadratics, 1.0), (vlmop2, 1 / math.sqrt(3))])
def test_every_solution_is_optimal_and_in_its_sector(losses, length):
    u, start = lattice(2, 8)[1:-1], torch.tensor([0.4, -0.3, 0.1], dtype=torch.float64) * length
    front = trained(start, losses, pmtl(u), (0.1, 0.03), 150, preferences=u)
    w = front.states.params
    assert (w - w.mean(1, keepdim=True)).abs().max() < 1e-2
    assert (w.mean(1).abs() <= length + 1e-2).all()
    cosines = front.losses @ normalize(u, dim=1).T
    torch.testing.assert_close(cosines.diagonal(), cosines.amax(1), rtol=1e-2, atol=0)


def test_under_transforms():
    J = torch.tensor([[1.0, 0.2, 0.0], [-0.3, 1.0, 0.4], [0.1, -0.2, 0.8]]).double()
    L, us = torch.tensor([1.0, 2.0, 0.5]).double(), lattice(3, 3)

    def direction(u, J=J, warmup=0):
        return jd.aggregate(pmtl(us, warmup)(u), J, losses=L).direction

    for warmup in (0, 10):
        alone = torch.stack([direction(u, warmup=warmup) for u in us])
        found = torch.vmap(lambda u, warmup=warmup: direction(u, warmup=warmup))(us)
        check_same(found, alone)
    compiled = torch.compile(direction, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(us[1]), direction(us[1]))
    assert torch.autograd.gradcheck(lambda J: direction(us[1], J), J.requires_grad_(), check_forward_ad=True)


@pytest.mark.parametrize("length", [1e-200, 1e-13, 1e200])
def test_the_lengths_of_preferences_do_not_matter(length):
    J, L = torch.tensor([[1.0, 0.3], [-0.2, 1.0]]).double(), torch.tensor([1.0, 3.0]).double()
    u = lattice(2, 4)
    expected = jd.aggregate(pmtl(u)(u[3]), J, losses=L).weights
    assert (expected < 0).any()  # outside of its sector
    for several, own, scale in ((length * u, u[3], 1), (u, length * u[3], length), (length * u, length * u[3], 1)):
        torch.testing.assert_close(jd.aggregate(pmtl(several)(own), J, losses=scale * L).weights, expected)


def test_many_preferences_and_losses_that_are_not_finite():
    u = lattice(2, 40)
    J, L = torch.eye(2).double(), torch.tensor([1.0, 0.01]).double()
    for k in (0, 20, 40):
        found = jd.aggregate(pmtl(u, 0)(u[k]), J, losses=L).direction
        expected = expected_direction(J.numpy(), L.numpy(), u.numpy(), k, False)
        torch.testing.assert_close(found, expected)
    assert jd.aggregate(pmtl(u)(u[3]), J, losses=torch.tensor([torch.nan, 1.0])).weights.isnan().all()
