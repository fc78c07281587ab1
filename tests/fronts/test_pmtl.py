"""Pareto MTL: its two programs by SciPy, and fronts in closed form."""

import math

import numpy as np
import pytest
import torch
from bounds import check_same
from scipy.optimize import nnls
from solutions import quadratics
from torch.nn.functional import normalize

import functional_jd as jd
from functional_jd.fronts import lattice, pmtl, train
from functional_jd.testing import ALWAYS, homogeneous, jacobians, obeys, rotation_blind

OF_THREE = pmtl(lattice(3, 2), 1)(lattice(3, 2)[1])
test_laws = obeys(OF_THREE, *ALWAYS, homogeneous, rotation_blind, jacobians=jacobians(3, wide=False))


def shortest(rows):
    """The point of least norm in the convex hull of rows, by a non-negative least-squares problem."""
    heavy = 1e5 * np.abs(rows).max()  # the equation that the shares add up to one
    shares, _ = nnls(np.vstack([rows.T, np.full(len(rows), heavy)]), np.r_[np.zeros(rows.shape[1]), heavy])
    return shares @ rows


# How near SciPy's search comes to the least norm.
SCIPY = 1e-4


def expected_direction(J, L, u, k, first):
    """Of the violated constraints alone in the first phase, if there are any; then beside the losses."""
    units = u / np.linalg.norm(u, axis=1, keepdims=True)
    constraints = units - units[k]
    violated = constraints[constraints @ L > 0] @ J
    return shortest(violated if first and len(violated) else np.vstack([J, violated]))


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("m", [2, 3])
def test_directions_are_scipys(m, first):
    random, outside = np.random.default_rng(m), 0
    u = lattice(m, 4)
    rule = pmtl(u, 1 if first else 0)
    for k in range(len(u)):
        J = random.normal(size=(m, 6))
        L = u[k].numpy() + 0.01 if k % 2 else random.uniform(0.1, 1, m)
        found = jd.aggregate(rule(u[k]), torch.tensor(J), losses=torch.tensor(L))
        expected = torch.tensor(expected_direction(J, L, u.numpy(), k, first))
        torch.testing.assert_close(found.direction, expected, rtol=0, atol=SCIPY)
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


def vlmop2(w):
    at = 1 / math.sqrt(len(w))
    return torch.stack([1 - (-(w - at).square().sum()).exp(), 1 - (-(w + at).square().sum()).exp()])


@pytest.mark.parametrize(("losses", "length"), [(quadratics, 1.0), (vlmop2, 1 / math.sqrt(3))])
def test_every_solution_is_optimal_and_in_its_sector(losses, length):
    u, start = lattice(2, 8)[1:-1], torch.tensor([0.4, -0.3, 0.1], dtype=torch.float64) * length
    for rate in (0.1, 0.03):
        method = {"losses": losses, "rule": pmtl(u), "preferences": u, "optimizer": jd.sgd(rate)}
        start = train(start, [()] * 150, **method)
    w = start.states.params
    assert (w - w.mean(1, keepdim=True)).abs().max() < 1e-2
    assert (w.mean(1).abs() <= length + 1e-2).all()
    cosines = start.losses @ normalize(u, dim=1).T
    torch.testing.assert_close(cosines.diagonal(), cosines.amax(1), rtol=1e-2, atol=0)


def test_sectors_of_three_losses():
    corners, u = torch.eye(3).double(), lattice(3, 2)

    def losses(w):
        return (w - corners).square().sum(1)

    method = {"losses": losses, "rule": pmtl(u), "preferences": u, "optimizer": jd.sgd(0.03)}
    front = train(torch.tensor([1.0, -1.0, 0.5]).double(), [()] * 300, **method)
    cosines = front.losses @ normalize(u, dim=1).T
    torch.testing.assert_close(cosines.diagonal(), cosines.amax(1), rtol=1e-2, atol=0)
    assert (front.states.params.sum(1) - 1).abs().max() < 1e-2


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
    for several, own in ((length * u, u[3]), (u, length * u[3]), (length * u, length * u[3])):
        torch.testing.assert_close(jd.aggregate(pmtl(several)(own), J, losses=L).weights, expected)


def test_many_preferences_and_losses_that_are_not_finite():
    u = lattice(2, 40)
    J, L = torch.eye(2).double(), torch.tensor([1.0, 0.01]).double()
    for k in (0, 20, 40):
        found = jd.aggregate(pmtl(u, 0)(u[k]), J, losses=L).direction
        expected = expected_direction(J.numpy(), L.numpy(), u.numpy(), k, False)
        torch.testing.assert_close(found, torch.tensor(expected), rtol=0, atol=SCIPY)
    assert jd.aggregate(pmtl(u)(u[3]), J, losses=torch.tensor([torch.nan, 1.0])).weights.isnan().all()


@pytest.mark.parametrize(
    ("arguments", "kind", "message"),
    [
        (([[1.0]],), TypeError, "pmtl: preferences must be a floating-point tensor"),
        ((torch.ones(2),), ValueError, r"pmtl: preferences must be \[K, m\], one in a row, found torch.float32 \[2\]"),
        ((torch.ones(2, 2), -1), ValueError, "pmtl: warmup must be an integer of at least 0"),
        ((torch.ones(2, 2), 1.5), (TypeError, ValueError), "pmtl: warmup must be an integer"),
    ],
)
def test_what_does_not_fit_is_refused(arguments, kind, message):
    with pytest.raises(kind, match=message):
        pmtl(*arguments)


def test_what_does_not_fit_the_losses_is_refused():
    with pytest.raises(ValueError, match="pmtl: preference must be"):
        pmtl(torch.eye(2))(torch.zeros(2))
    with pytest.raises(
        ValueError, match=r"pmtl: preferences must be \[K, 2\], one column per loss, found torch.float64 \[3, 3\]"
    ):
        jd.aggregate(pmtl(torch.eye(3))(torch.ones(2)), torch.eye(2), losses=torch.ones(2))
