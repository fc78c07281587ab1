"""Functions of a matrix by its eigenvalues: NumPy, SciPy, the promised ridge, derivatives by differences."""

from decimal import Decimal

import numpy as np
import pytest
import torch
from bounds import check_derivatives, check_within, eps, gramian_bound
from exact.decimals import decimals, floats, precisely, solved
from hypothesis import given
from sequences import integer_jacobians
from sequences import random_rows as normal
from torch.func import grad, hessian, jacfwd, jacrev

import functional_jd as jd
from functional_jd.solvers.spectral import (
    damped_solve,
    damped_weights,
    inverse_root,
    pseudo_inverse,
    solve_well_conditioned,
)
from functional_jd.testing import jacobians


@given(integer_jacobians())
def test_penrose_and_the_root_of_the_inverse(J):
    G = J @ J.T
    (P, range_), (X, eigenvalues) = pseudo_inverse(G), inverse_root(G)
    rounding = 64 * len(G) * eps() * max(G.abs().max(), 1) * max(P.abs().max(), 1)
    check_within(G @ P @ G, G, rounding * max(G.abs().max(), 1))
    check_within(P, P.T, rounding * max(P.abs().max(), 1))
    check_within(G @ P, range_, rounding)
    check_within(X @ X, P, rounding * max(P.abs().max(), 1))
    assert (eigenvalues != 0).sum() == np.linalg.matrix_rank(J.numpy())


def condition(J):
    """Of the Gramian on its range, as these points have no small singular values beside zero."""
    values = torch.linalg.svdvals(J)
    return float((values.max() / values.min()) ** 2)


# Points on which the rank stays: rows or columns are changed, not the Gramian.
POINTS = {
    "generic": normal(3, 4),
    "equal eigenvalues": torch.eye(3, 4, dtype=torch.float64),
    "two of three equal": torch.eye(3, 4, dtype=torch.float64) * torch.tensor([[1.0], [2.0], [2.0]]).double(),
    "dependent rows": normal(4, 2),
    "dependent rows, equal eigenvalues": torch.tensor([[1.0, 0], [0, 1], [1, 0], [0, 1]], dtype=torch.float64),
}


FUNCTIONS = {
    "+": lambda G: pseudo_inverse(G)[0],
    "range": lambda G: pseudo_inverse(G)[1],
    "-/": lambda G: inverse_root(G)[0],
    "s": lambda G: inverse_root(G)[1].sum(),
}


@pytest.mark.parametrize("name", POINTS)
@pytest.mark.parametrize("function", FUNCTIONS)
def test_derivatives_are_those_of_differences(name, function):
    f, J = lambda J: FUNCTIONS[function](J @ J.T), POINTS[name]
    for transform in (jacrev, jacfwd):
        check_derivatives(transform(f)(J), f, J, condition(J))
    if not name.startswith("dependent"):
        check_derivatives(hessian(f)(J), jacrev(f), J, condition(J))


def test_a_simple_eigenvalue_has_second_derivatives():
    J = normal(3, 4)
    f = lambda J: inverse_root(J @ J.T)[1]
    torch.testing.assert_close(f(J), torch.linalg.eigvalsh(J @ J.T))
    check_derivatives(hessian(f)(J), jacrev(f), J, condition(J))


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_what_is_not_finite_stays_so(value):
    G = torch.tensor([[1.0, value], [value, 1.0]], dtype=torch.float64)
    assert all(part.isnan().all() for part in (*pseudo_inverse(G), *inverse_root(G)))


@pytest.mark.parametrize("m", [1, 2, 5, 40])
def test_the_well_conditioned_are_solved_with_derivatives(m):
    J = normal(m, m + 4, seed=m)
    J, b = J / J.norm(dim=1, keepdim=True), normal(m, seed=1)
    C = J @ J.T
    check_within(solve_well_conditioned(C, b), pseudo_inverse(C)[0] @ b, 64 * m * eps() * torch.linalg.cond(C) ** 1.5)
    if m <= 5:
        f = lambda J, b: solve_well_conditioned(J @ J.T, b)
        inputs = J.requires_grad_(), b.requires_grad_()
        assert torch.autograd.gradcheck(f, inputs)
        assert torch.autograd.gradgradcheck(f, inputs)


def test_what_is_not_well_conditioned_is_left():
    b, one = normal(3), torch.eye(3, dtype=torch.float64)
    dependent = torch.tensor([[1.0, 0], [1, 0], [0, 1]], dtype=torch.float64)
    nearly = torch.cat([dependent, torch.tensor([[1e-4], [0], [0]], dtype=torch.float64)], dim=1)
    infinite = one.index_fill(0, torch.tensor(2), torch.inf)
    for C in (dependent @ dependent.T, nearly @ nearly.T, 0 * one, one * torch.nan, infinite):
        assert solve_well_conditioned(C, b) is None
    refused = []
    torch.vmap(lambda C: refused.append(solve_well_conditioned(C, b)) or C)(one.unsqueeze(0))
    grad(lambda C: refused.append(solve_well_conditioned(C, b)) or C.sum())(one)
    assert refused == [None, None]


@pytest.mark.parametrize("m", [1, 2, 4, 8, 32])
@pytest.mark.parametrize("spread", [0, 6])
@pytest.mark.parametrize("rule", [jd.config, jd.imtl_g])
def test_rules_by_the_factor_find_what_they_find_by_eigenvalues(rule, m, spread):
    direction = lambda J: jd.aggregate(rule(), J).direction
    J = normal(m, m + 9, seed=m) * 10.0 ** (spread * torch.linspace(-1, 1, m, dtype=torch.float64).unsqueeze(1))
    expected = torch.vmap(direction)(J.unsqueeze(0))[0]  # under vmap no value can be looked at
    check_within(direction(J), expected, gramian_bound(J, expected.abs().max()))
    if m <= 4 and not spread:
        slopes = torch.autograd.functional.jacobian(direction, J)
        check_within(slopes, jacrev(direction)(J), gramian_bound(J, condition(J) * slopes.abs().max()))


def gramians(rows, rank, wide=True):
    return jacobians(rows, rank, wide=wide).map(lambda J: J @ J.mT)


@given(gramians((2, 5), 1))
def test_without_damping_a_degenerate_matrix_has_a_solution_still(G):
    """Of a right-hand side in the range, up to the ridge."""
    b = G.sum(1)
    x = damped_solve(G, b, 0.0)
    assert x.isfinite().all()
    size = G.diagonal().max()
    check_within(G @ x, b, 1e3 * len(G) ** 3 * eps() * size)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_a_matrix_or_a_damping_that_is_not_finite_gives_nan_everywhere(bad):
    one, b = torch.eye(3, dtype=torch.float64), torch.ones(3, dtype=torch.float64)
    for G in (one.index_fill(0, torch.tensor(2), bad), one + torch.diag(torch.tensor([0, 0, bad]))):
        assert damped_solve(G, b, torch.tensor(1.0).double()).isnan().all()
    assert damped_solve(one, b, torch.tensor(bad).double()).isnan().all()


def exactly(J, r, damping):
    """The direction in the space of parameters, in 80 decimal digits."""
    with precisely():
        A = decimals(J)
        return floats(solved(A.T @ A + Decimal(damping) * np.eye(J.shape[1], dtype=int), A.T @ decimals(r)))


@pytest.mark.parametrize("exponent", [-12, -10, -8, -6, -3, 0])
@pytest.mark.parametrize(("m", "n"), [(40, 4), (12, 11), (5, 9)])
@pytest.mark.parametrize("size", [1.0, 30.0])
def test_the_part_out_of_range_costs_no_digits(m, n, size, exponent):
    J, r = size * normal(m, n), normal(m, seed=1)
    expected = exactly(J, r, 10.0**exponent)
    found = J.mT @ damped_weights(J @ J.mT, r, 10.0**exponent)
    values = torch.linalg.svdvals(J)
    condition = float(values.max() / values.min()) ** 2
    check_within(found, expected, (2e-10 + 2**6 * m * eps() * condition) * expected.norm())


@pytest.mark.parametrize("damping", [1e-6, 1e-8, 1e-9])
def test_eigenvalues_that_fall_through_rounding_are_not_dropped(damping):
    """As those of equations do: what is below rounding in the Gramian is not in its root, the Jacobian."""
    m, n = 80, 40
    U, V = torch.linalg.qr(normal(m, n))[0], torch.linalg.qr(normal(n, n, seed=2))[0]
    J, r = (U * torch.logspace(1, -7, n, dtype=torch.float64)) @ V.mT, normal(m, seed=1)
    # As least squares, whose condition is the root of that of the Gramian.
    augmented = torch.cat([J, damping**0.5 * torch.eye(n, dtype=torch.float64)])
    expected = torch.linalg.lstsq(augmented, torch.cat([r, r.new_zeros(n)])[:, None]).solution[:, 0]
    found = J.mT @ damped_weights(J @ J.mT, r, damping)
    bound = m * eps() * float(J.square().sum()) / damping
    assert bound < 0.01, "a direction without the dropped part is 0.02 to 0.3 off"
    check_within(found, expected, bound * expected.norm())


def test_without_a_part_out_of_range_it_is_the_solution_and_nothing_is_dropped():
    J, r = normal(4, 9), normal(4, seed=1)
    for damping in (1e-12, 1e-3, 2.0):
        assert torch.equal(damped_weights(J @ J.mT, r, damping), damped_solve(J @ J.mT, r, damping))
    zero = torch.zeros(3, 3, dtype=torch.float64)
    assert damped_weights(zero, normal(3), 0.5).isfinite().all()
    assert damped_weights(zero.fill_(torch.nan), normal(3), 0.5).isnan().all()


def test_derivatives_with_a_part_out_of_range_are_those_of_the_smaller_system():
    J, r, damping = normal(7, 2), normal(7, seed=1), torch.tensor(1e-6, dtype=torch.float64)

    def ours(J, r, damping):
        return J.mT @ damped_weights(J @ J.mT, r, damping)

    def smaller(J, r, damping):
        return torch.linalg.solve(J.mT @ J + damping * torch.eye(2).double(), J.mT @ r)

    inputs = [x.clone().requires_grad_() for x in (J, r, damping)]
    for cotangent in torch.eye(2).double():
        found = torch.autograd.grad(ours(*inputs), inputs, cotangent)
        expected = torch.autograd.grad(smaller(*inputs), inputs, cotangent)
        for x, y in zip(found, expected, strict=True):
            check_within(x, y, 1e-8 * (1 + y.abs().max()))
