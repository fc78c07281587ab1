"""Rules that look at losses: gradients of the scalars that they name, values, and the ends of their domains."""

import math

import pytest
import torch
from bounds import check_within, eps
from hypothesis import given
from hypothesis import strategies as st
from sequences import LOSSES, ROWS, calls

import functional_jd as jd
from functional_jd.aggregators import cosmos, geometric_mean, imtl_l, pbi, stch, tchebycheff, uw

U, Z = torch.tensor([0.2, 0.3, 0.5], dtype=torch.float64), torch.tensor([0.1, -0.5, 0.25], dtype=torch.float64)
QUARTERS = torch.tensor([0.25, 0.5, 1.0], dtype=torch.float64)
LEARNT = torch.tensor([0.5, -1.0, 0.25], dtype=torch.float64)


def penalised(losses):
    """The penalty boundary intersection, by a projection."""
    ray = U / U.norm()
    along = (losses - Z) @ ray
    return along + 5 * (losses - Z - along * ray).norm()


def smooth(u, z, mu):
    """The smooth maximum, as textbooks write it."""
    return lambda losses: mu * (u * (losses - z) / mu).exp().sum().log()


# Each rule with what it has learnt, its value, and the formula of the scalar that it descends on.
SCALARS = {
    "cosmos": (
        *(jd.cosmos(2.0, U), None, lambda x: cosmos.value(x, 2.0, U)),
        lambda x: U @ x - 2 * torch.nn.functional.cosine_similarity(U, x, dim=0),
    ),
    "geometric_mean": (jd.geometric_mean(), None, geometric_mean.value, lambda x: x.prod() ** (1 / 3)),
    "pbi": (jd.pbi(5.0, U, Z), None, lambda x: pbi.value(x, 5.0, U, Z), penalised),
    "stch": (jd.stch(), None, lambda x: stch.value(x, 1.0, 1 / 3), smooth(1 / 3, 0, 1)),
    "stch with all": (jd.stch(0.5, U, Z), None, lambda x: stch.value(x, 0.5, U, Z), smooth(U, Z, 0.5)),
    "tchebycheff": (jd.tchebycheff(), None, lambda x: tchebycheff.value(x, 1 / 3), lambda x: x.max() / 3),
    "tchebycheff with all": (
        *(jd.tchebycheff(QUARTERS, Z), None, lambda x: tchebycheff.value(x, QUARTERS, Z)),
        lambda x: (QUARTERS * (x - Z)).max(),
    ),
    "imtl_l": (
        *(jd.imtl_l(), {"log_scales": LEARNT}, lambda x: imtl_l.value(x, LEARNT)),
        lambda x: (x * LEARNT.exp() - LEARNT).sum(),
    ),
    "uw": (
        *(jd.uw(), {"log_variances": LEARNT}, lambda x: uw.value(x, LEARNT)),
        lambda x: (x / (2 * LEARNT.exp()) + LEARNT / 2).sum(),
    ),
}


@pytest.mark.parametrize("name", SCALARS)
def test_values_are_those_of_the_formulas_and_weights_their_gradients(name):
    rule, state, value, formula = SCALARS[name]
    for losses in LOSSES:
        check_within(value(losses), formula(losses), 64 * eps() * (1 + losses.abs().sum()))
        expected = torch.func.grad(formula)(losses)
        found = jd.aggregate(rule, ROWS, state, losses=losses).weights
        check_within(found, expected, 64 * eps() * (1 + expected.abs().max()))


@given(
    st.lists(st.integers(1, 9).map(float), min_size=1, max_size=4),
    st.integers(-30, 30),
    st.sampled_from([0.0, 1.0, 3.0, 7.0]),
)
def test_on_the_ray_the_weights_of_pbi_are_its_own_whatever_is_rounded(weights, exponent, distance):
    u = torch.tensor(weights, dtype=torch.float64) / 3
    found = jd.pbi(5.0, u).update(u * distance * 10.0**exponent, ())[0]
    check_within(found, u / u.norm(), 8 * eps())
    slopes = torch.func.jacrev(lambda losses: jd.pbi(5.0, u).update(losses, ())[0])(2 * u)
    assert slopes.isfinite().all()


@pytest.mark.parametrize("mu", [1e-300, 1e-320])
def test_however_small_mu_is_the_worst_loss_has_all_the_weight(mu):
    losses = torch.tensor([1e30, 3e30, -2e30], dtype=torch.float64)
    assert calls(jd.stch(mu, U), [losses])[0][0].tolist() == [0, U[1].item(), 0]


def test_derivatives_reach_constant_weights():
    J = torch.tensor([[1.0, 2, 3], [-4, 5, 6]])
    f = lambda weights: jd.aggregate(jd.constant(weights), J).direction
    assert torch.equal(torch.func.jacrev(f)(torch.tensor([0.3, 0.7])), J.T)
    for same in ([0.5, 2.0], (0.5, 2.0), torch.tensor([0.5, 2.0], dtype=torch.float16)):
        assert torch.equal(f(same), 0.5 * J[0] + 2 * J[1])


@pytest.mark.parametrize(("rule", "share"), [(jd.imtl_l(0.25), 1.0), (jd.uw(0.5), 0.5)], ids=["imtl_l", "uw"])
def test_losses_that_never_change_end_with_equal_weighted_losses(rule, share):
    losses = torch.tensor([0.1, 0.5, 1.0, 3.0, 8.0], dtype=torch.float64)
    state = rule.init(losses)
    for _ in range(300):
        weights, state = rule.update(losses, state)
    check_within(weights * losses, torch.full_like(losses, share), 64 * eps())
    start = calls(rule, LOSSES[:1])[0]
    assert start.tolist() == [[share] * 3]
    broken = jd.aggregate(rule, ROWS, losses=torch.tensor([1.0, math.nan, 1.0])).state
    assert next(iter(broken.values())).isfinite().tolist() == [True, False, True]
