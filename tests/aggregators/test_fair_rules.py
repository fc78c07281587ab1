"""FairGrad and Nash-MTL: their equations, the utility and the product of gains."""

import numpy as np
import pytest
import torch
from bounds import check_within, eps
from exact.cones import fair_weights
from exact.decimals import decimals, floats, precisely
from hypothesis import assume, given
from hypothesis import strategies as st
from scipy.linalg import null_space
from scipy.optimize import linprog
from sequences import J3, integer_jacobians
from torch.func import jacrev

import functional_jd as jd


def direction(J, alpha=1.0):
    return jd.aggregate(jd.fairgrad(alpha), J).direction


def of_no_gain(J):
    """The rows that gain zero in every direction in which no row loses."""
    best = [linprog(-g, A_ub=-J, b_ub=np.zeros(len(J)), bounds=[(-1, 1)] * J.shape[1]).fun for g in J]
    return np.array([-value < 1e-9 for value in best])


def of_largest_utility(J, alpha):
    """The direction that maximises the utility of the gains minus half of its square.

    It is orthogonal to the rows that cannot gain. Among the others it solves the equation of their weights.
    """
    fixed = of_no_gain(J)
    basis = null_space(J[fixed]) if fixed.any() else np.eye(J.shape[1])
    rows = J[~fixed] @ basis
    if not len(rows):
        return np.zeros(J.shape[1])
    with precisely():
        weights = fair_weights(decimals(torch.from_numpy(rows)), alpha)
        assume(weights is not None)  # Newton's method finds it
        return basis @ (rows.T @ floats(weights).numpy())


@st.composite
def degenerate_jacobians(draw):
    """Integer Jacobians, many of which have opposite rows or rows that add up to zero."""
    J = draw(integer_jacobians()).numpy()
    kind = draw(st.sampled_from(["any", "opposite", "zero sum"]))
    if kind == "opposite":
        J[-1] = -draw(st.integers(1, 3)) * J[0]
    elif kind == "zero sum":
        J[-1] = -J[:-1].sum(0)
    assume((J != 0).any(axis=1).all())
    return J


@given(degenerate_jacobians(), st.integers(-16, 10).map(lambda k: 10 ** (k / 10)))
def test_it_is_the_direction_of_largest_utility(J, alpha):
    d, w, _ = jd.aggregate(jd.fairgrad(alpha), torch.from_numpy(J))
    if alpha >= 1 and of_no_gain(J).any():
        assert (w == 0).all()
        return
    expected = torch.from_numpy(of_largest_utility(J, alpha))
    size = expected.norm() + np.linalg.norm(J, axis=1).max()
    check_within(d, expected, 16 * sum(J.shape) * eps() ** (1 / (1 + alpha)) * size)


def test_rows_that_cancel_do_not_stop_a_row_that_is_independent_of_them():
    J = torch.tensor(
        [[-2, -3, 2, 0], [3, 0, -1, 0], [1, -1, 1, 0], [2, 1, 1, 0], [-4, 3, -3, 0], [0, -1, -2, 1]]
    ).double()
    for alpha in (0.05, 0.1, 0.2, 0.3, 0.5, 0.8):
        expected = torch.tensor([0.0, 0, 0, 1], dtype=torch.float64)
        check_within(direction(J, alpha), expected, 16 * eps() ** (1 / (1 + alpha)) * J.norm())
        assert jacrev(lambda J, alpha=alpha: direction(J, alpha))(J).isfinite().all()
    assert (direction(J, 1.0) == 0).all()


def test_alpha_zero_is_the_mean_and_looks_at_nothing_but_a_tensor_of_zero_is_refused_with_nan():
    torch.testing.assert_close(direction(J3, 0), J3.mean(0))
    assert jd.fairgrad(0).view.products == "none"
    assert direction(J3, torch.zeros(())).isnan().all()


@pytest.mark.parametrize("conflict", [False, True])
def test_the_limit_of_small_alpha_is_the_projected_total(conflict):
    J = torch.tensor([[3.0, 0, 1], [-2 if conflict else 2, 1, 0], [2, 1, 0]], dtype=torch.float64)
    assert ((J @ J.sum(0)).amin() < 0) == conflict
    projected = jd.aggregate(jd.dualproj([1.0, 1.0, 1.0]), J).direction
    assert torch.allclose(projected, J.sum(0)) != conflict
    alpha = 1e-6  # to first order, the direction is off by alpha times logarithms of the weights
    check_within(direction(J, alpha), projected, 64 * alpha * J.norm())


def of_nash_mtl(J, max_norm=1.0):
    return jd.aggregate(jd.nash_mtl(max_norm), J).direction


@pytest.mark.parametrize("m", [8, 16, 32, 64])
@pytest.mark.parametrize("lean", [0.0, 1.0])
def test_the_residual_is_rounding_from_few_rows_to_many(m, lean):
    generator = torch.Generator().manual_seed(m)
    J = torch.randn(m, 2 * m, generator=generator, dtype=torch.float64)
    J = J + lean * torch.randn(2 * m, generator=generator, dtype=torch.float64)
    w = jd.aggregate(jd.nash_mtl(max_norm=0), J).weights
    for huge in (1e200, 10**20):
        torch.testing.assert_close(jd.aggregate(jd.nash_mtl(max_norm=huge), J).weights, w)
    # What sums may round off in `w_i <g_i, sum_j w_j g_j>`, which is one.
    check_within(w * (J @ J.T @ w), torch.ones(m), 4 * sum(J.shape) * eps() * w * (J.abs() @ (J.abs().T @ w)))


@pytest.mark.parametrize("cosine", [-1.0, -1 + 1e-9, -0.5, 0.0, 0.9, 1.0])
def test_two_rows_have_the_bisector_of_length_root_two(cosine):
    second = torch.tensor([cosine, (1 - cosine**2) ** 0.5], dtype=torch.float64)
    J = torch.stack([torch.tensor([1.0, 0], dtype=torch.float64), 1e6 * second])
    middle = J[0] + second
    expected = 0 * middle if cosine == -1 else middle / middle.norm() * 2**0.5
    check_within(of_nash_mtl(J, 0.0), expected, 16 * eps() / (1 + cosine) if cosine > -1 else 0.0)
    assert torch.equal(of_nash_mtl(torch.stack([J[0], 0 * J[0]])), J[0])
    assert jacrev(of_nash_mtl)(J).isfinite().all()
