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


# Each rule, what it descends on, and what it has learnt.
GRADIENTS = {
    "cosmos": (jd.cosmos(2.0, U), lambda x: U @ x - 2 * torch.nn.functional.cosine_similarity(U, x, dim=0), None),
    "geometric_mean": (jd.geometric_mean(), lambda x: x.prod() ** (1 / 3), None),
    "pbi": (jd.pbi(5.0, U, Z), penalised, None),
    "stch": (jd.stch(), smooth(1 / 3, 0, 1), None),
    "stch with all": (jd.stch(0.5, U, Z), smooth(U, Z, 0.5), None),
    "tchebycheff": (jd.tchebycheff(), lambda x: x.max() / 3, None),
    "tchebycheff with all": (jd.tchebycheff(QUARTERS, Z), lambda x: (QUARTERS * (x - Z)).max(), None),
    "imtl_l": (jd.imtl_l(), lambda x: x.sum(), None),
    "imtl_l later": (jd.imtl_l(), lambda x: (x * LEARNT.exp()).sum(), {"log_scales": LEARNT}),
    "uw": (jd.uw(), lambda x: x.sum() / 2, None),
    "uw later": (jd.uw(), lambda x: (x / (2 * LEARNT.exp())).sum(), {"log_variances": LEARNT}),
}


@pytest.mark.parametrize("name", GRADIENTS)
def test_weights_are_the_gradient(name):
    rule, s, state = GRADIENTS[name]
    for losses in LOSSES:
        expected = torch.func.grad(s)(losses)
        found = jd.aggregate(rule, ROWS, state, losses=losses).weights
        check_within(found, expected, 64 * eps() * (1 + expected.abs().max()))


VALUES = {
    "cosmos": (lambda x: cosmos.value(x, 2.0, U), GRADIENTS["cosmos"][1]),
    "geometric_mean": (geometric_mean.value, GRADIENTS["geometric_mean"][1]),
    "imtl_l": (lambda x: imtl_l.value(x, LEARNT), lambda x: (x * LEARNT.exp() - LEARNT).sum()),
    "pbi": (lambda x: pbi.value(x, 5.0, U, Z), penalised),
    "stch": (lambda x: stch.value(x, 0.5, U, Z), smooth(U, Z, 0.5)),
    "tchebycheff": (lambda x: tchebycheff.value(x, QUARTERS, Z), GRADIENTS["tchebycheff with all"][1]),
    "uw": (lambda x: uw.value(x, LEARNT), lambda x: (x / (2 * LEARNT.exp()) + LEARNT / 2).sum()),
}


@pytest.mark.parametrize("name", VALUES)
def test_values_are_those_of_the_formulas(name):
    for losses in LOSSES:
        found, expected = (f(losses) for f in VALUES[name])
        check_within(found, expected, 64 * eps() * (1 + losses.abs().sum()))


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


@pytest.mark.parametrize(
    ("rule", "inputs"), [(lambda u, z: jd.stch(0.5, u, z), (U, Z)), (lambda u: jd.cosmos(2.0, u), (U,))]
)
def test_derivatives_reach_preferences(rule, inputs):
    leaves = [x.clone().requires_grad_() for x in inputs]
    assert torch.autograd.gradcheck(lambda *given: calls(rule(*given), LOSSES[:1])[0], leaves)


def test_derivatives_reach_constant_weights():
    J = torch.tensor([[1.0, 2, 3], [-4, 5, 6]])
    f = lambda weights: jd.aggregate(jd.constant(weights), J).direction
    assert torch.equal(torch.func.jacrev(f)(torch.tensor([0.3, 0.7])), J.T)
    assert torch.equal(torch.func.jvp(f, (torch.ones(2),), (torch.tensor([0.0, 1]),))[1], J[1])
    weights = torch.tensor([0.3, 0.7], requires_grad=True)
    f(weights).sum().backward()
    assert torch.equal(weights.grad, J.sum(1))
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
