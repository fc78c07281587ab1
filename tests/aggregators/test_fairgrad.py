"""FairGrad: its equation, the utility it maximises, the peer's numbers, derivatives by differences."""

import numpy as np
import pytest
import torch
from bounds import check_within, eps, gramian_bound
from hypothesis import assume, given
from hypothesis import strategies as st
from scipy.linalg import null_space
from scipy.optimize import linprog, minimize, root
from sequences import DEPENDENT, J3, differences, integer_jacobians
from torch.func import grad, hessian, jacfwd, jacrev

from functional_jd.aggregation.aggregate import aggregate
from functional_jd.aggregators.dualproj import dualproj
from functional_jd.aggregators.fairgrad import fairgrad

ALPHAS = [0.5, 1.0, 2.0]


def direction(J, alpha=1.0):
    return aggregate(fairgrad(alpha), J).direction


def room(J):
    """The most that all unit rows can gain at once within a box: zero if and only if J is stationary."""
    units = J / np.linalg.norm(J, axis=1, keepdims=True)
    m, n = J.shape
    # The variables are the direction and the least gain, which is maximised.
    rows = np.hstack([-units, np.ones((m, 1))])
    return -linprog([0] * n + [-1], A_ub=rows, b_ub=[0] * m, bounds=[(-1, 1)] * n + [(0, None)]).fun


@given(integer_jacobians().map(torch.Tensor.numpy), st.sampled_from([*ALPHAS, 0.1, 10.0]))
def test_the_equation_holds_unless_the_jacobian_is_stationary(J, alpha):
    assume((J != 0).any(axis=1).all())
    w = aggregate(fairgrad(alpha), torch.from_numpy(J)).weights
    if room(J) > 1e-6:
        assert (w > 0).all()
        G = torch.from_numpy(J @ J.T)
        wanted = w ** (-1 / alpha)
        error = (G @ w - wanted).abs() / (G.abs() @ w + wanted)
        assert error.max() <= 8 * sum(J.shape) * eps() * max(1, 1 / alpha)
    elif alpha >= 1:
        assert (w == 0).all()


def of_no_gain(J):
    """The rows that gain zero in every direction in which no row loses."""
    best = [linprog(-g, A_ub=-J, b_ub=np.zeros(len(J)), bounds=[(-1, 1)] * J.shape[1]).fun for g in J]
    return np.array([-value < 1e-9 for value in best])


def of_largest_utility(J, alpha):
    """The direction that maximises the utility of the gains minus half of its square, by SciPy.

    It is orthogonal to the rows that cannot gain. Among the others it minimises a convex function of their weights.
    """
    fixed, p = of_no_gain(J), 1 / alpha
    basis = null_space(J[fixed]) if fixed.any() else np.eye(J.shape[1])
    rows = J[~fixed] @ basis
    if not len(rows):
        return np.zeros(J.shape[1])
    G = rows @ rows.T
    unit = np.diag(G) ** (-1 / (1 + p))

    def objective(x):
        w = unit * np.exp(x)
        penalty = -np.log(w).sum() if p == 1 else (w ** (1 - p)).sum() / (p - 1)
        return w @ G @ w / 2 + penalty, (G @ w - w**-p) * w

    def equation(x):
        w = unit * np.exp(x)
        return (G @ w) * w**p - 1

    begin = minimize(objective, np.zeros(len(rows)), jac=True, method="BFGS", options={"gtol": 1e-12}).x
    found = root(equation, begin, tol=1e-14).x
    x = min(begin, found, key=lambda x: np.abs(equation(x)).max())
    assume(np.abs(equation(x)).max() <= 1e-8)  # SciPy finds it
    return basis @ (rows.T @ (unit * np.exp(x)))


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
def test_it_is_the_direction_of_largest_utility_that_scipy_finds(J, alpha):
    d, w, _ = aggregate(fairgrad(alpha), torch.from_numpy(J))
    if alpha >= 1 and of_no_gain(J).any():
        assert (w == 0).all()
        return
    expected = torch.from_numpy(of_largest_utility(J, alpha))
    size = expected.norm() + np.linalg.norm(J, axis=1).max()
    check_within(d, expected, 4 * sum(J.shape) * eps() ** (1 / (1 + alpha)) * size)


def test_rows_that_cancel_do_not_stop_a_row_that_is_independent_of_them():
    J = torch.tensor(
        [[-2, -3, 2, 0], [3, 0, -1, 0], [1, -1, 1, 0], [2, 1, 1, 0], [-4, 3, -3, 0], [0, -1, -2, 1]]
    ).double()
    for alpha in (0.05, 0.1, 0.2, 0.3, 0.5, 0.8):
        expected = torch.tensor([0.0, 0, 0, 1], dtype=torch.float64)
        check_within(direction(J, alpha), expected, 16 * eps() ** (1 / (1 + alpha)) * J.norm())
        assert jacrev(lambda J, alpha=alpha: direction(J, alpha))(J).isfinite().all()
    assert (direction(J, 1.0) == 0).all()


@pytest.mark.parametrize(
    ("alpha", "expected"),
    [(1.0, [0.0766, 0.9985]), (2.0, [0.0313, 0.7908]), (0.5, [0.1810, 1.2682]), (0.0, [1.0, 1.0])],
)
def test_published_values(alpha, expected):
    J = torch.tensor([[-4.0, 1, 1], [6, 1, 1]])
    torch.testing.assert_close(direction(J, alpha), torch.tensor([*expected, expected[-1]]), rtol=0, atol=1e-4)


# TorchJD 0.18, FairGrad(alpha)(J), float64.
@pytest.mark.parametrize(
    ("J", "alpha", "expected"),
    [
        (J3, 0.5, [1.9774264409306208, 1.1074697461472858, -0.7278867794337446, 0.11569277017208202]),
        (J3, 1.0, [1.4075910228833428, 0.808508017751514, -0.590604056630232, 0.12723657422500495]),
        (J3, 5.0, [0.7289004682096801, 0.4160382130867254, -0.37545993576685677, 0.12086402571316693]),
        (DEPENDENT, 0.5, [1.065952620708609, 1.9562114327112439]),
        (DEPENDENT, 2.0, [0.46301505941483856, 1.380467206102677]),
    ],
)
def test_the_peer_agrees(J, alpha, expected):
    torch.testing.assert_close(direction(J, alpha), torch.tensor(expected, dtype=torch.float64), rtol=1e-7, atol=1e-7)


def test_alpha_zero_is_the_mean_and_looks_at_nothing():
    torch.testing.assert_close(direction(J3, 0), J3.mean(0))
    assert fairgrad(0).view.products == "none"


@pytest.mark.parametrize("conflict", [False, True])
def test_the_limit_of_small_alpha_is_the_projected_total(conflict):
    J = torch.tensor([[3.0, 0, 1], [-2 if conflict else 2, 1, 0], [2, 1, 0]], dtype=torch.float64)
    assert ((J @ J.sum(0)).amin() < 0) == conflict
    projected = aggregate(dualproj([1.0, 1.0, 1.0]), J).direction
    assert torch.allclose(projected, J.sum(0)) != conflict
    torch.testing.assert_close(direction(J, 1e-6), projected, rtol=0, atol=1e-4)


@pytest.mark.parametrize("alpha", ALPHAS)
@pytest.mark.parametrize("scale", [1e-18, 1e18])
def test_it_scales_with_a_power_and_for_alpha_one_not_at_all(alpha, scale):
    expected = scale ** ((1 - alpha) / (1 + alpha)) * direction(J3, alpha)
    check_within(direction(scale * J3, alpha), expected, gramian_bound(J3, expected.abs().max()))


def test_for_alpha_one_the_scale_of_a_row_does_not_matter():
    scales = torch.tensor([[1e-18], [1.0], [1e18]], dtype=torch.float64)
    check_within(direction(scales * J3), direction(J3), gramian_bound(J3, direction(J3).abs().max()))


@pytest.mark.parametrize("alpha", ALPHAS)
def test_rows_of_zeros_are_left_out(alpha):
    wider = torch.cat([torch.zeros(1, 4, dtype=torch.float64), J3])
    for scale in (1, 1e-9):
        expected = direction(scale * J3, alpha)
        check_within(direction(scale * wider, alpha), expected, gramian_bound(J3, expected.abs().max()))
    assert (direction(0 * J3, alpha) == 0).all()


@pytest.mark.parametrize("alpha", ALPHAS)
@pytest.mark.parametrize("J", [J3, DEPENDENT], ids=["independent", "dependent"])
def test_first_and_second_derivatives_are_those_of_differences(J, alpha):
    f = lambda J: direction(J, alpha)
    torch.testing.assert_close(jacrev(f)(J), differences(f, J), rtol=1e-6, atol=1e-8)
    torch.testing.assert_close(jacfwd(f)(J), differences(f, J), rtol=1e-6, atol=1e-8)
    first = lambda J: f(J)[0]
    torch.testing.assert_close(hessian(first)(J), differences(grad(first), J), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("alpha", [0.1, 0.5, 1.0, 4.0])
def test_derivatives_in_alpha_are_those_of_differences(alpha):
    f, x, h = lambda alpha: direction(J3, alpha), torch.tensor(alpha, dtype=torch.float64), 1e-5 * alpha
    slope = (f(alpha + h) - f(alpha - h)) / (2 * h)
    torch.testing.assert_close(jacfwd(f)(x), slope, rtol=1e-6, atol=1e-8)
    torch.testing.assert_close(jacrev(f)(x), slope, rtol=1e-6, atol=1e-8)
    second = (jacfwd(f)(x + h) - jacfwd(f)(x - h)) / (2 * h)
    torch.testing.assert_close(jacrev(jacfwd(f))(x), second, rtol=1e-6, atol=1e-7)


def test_a_tensor_of_zero_is_refused_with_nan():
    assert direction(J3, torch.zeros(())).isnan().all()
