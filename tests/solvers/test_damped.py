"""Damped systems against NumPy, degenerate ones against the ridge that is promised; derivatives and transforms."""

from decimal import Decimal

import numpy as np
import pytest
import torch
from bounds import check_stable, check_within, eps
from exact.decimals import decimals, floats, precisely, solved
from hypothesis import given
from hypothesis import strategies as st
from torch.func import jacfwd, jacrev

from functional_jd.solvers.spectral import damped_solve, damped_weights
from functional_jd.testing import jacobians


def gramians(rows, rank, wide=True):
    return jacobians(rows, rank, wide=wide).map(lambda J: J @ J.mT)


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@given(gramians((1, 6), (1, 6), wide=False), st.integers(-12, 6))
def test_numpy_has_the_same_solution(G, exponent):
    damping, b = 2.0**exponent, torch.arange(1.0, len(G) + 1, dtype=torch.float64)
    x = damped_solve(G, b, damping)
    expected = np.linalg.solve(G.numpy() + damping * np.eye(len(G)), b.numpy())
    condition = (G.trace() + damping) / damping
    check_within(x, torch.from_numpy(expected), 64 * len(G) ** 2 * eps() * condition * b.norm() / damping)


@given(gramians((2, 5), 1))
def test_without_damping_a_degenerate_matrix_has_a_solution_still(G):
    """Of a right-hand side in the range, up to the ridge."""
    b = G.sum(1)
    x = damped_solve(G, b, 0.0)
    assert x.isfinite().all()
    size = G.diagonal().max()
    check_within(G @ x, b, 1e3 * len(G) ** 3 * eps() * size)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
@pytest.mark.parametrize("where", ["matrix", "last entry", "b", "damping"])
def test_what_is_not_finite_gives_nan_everywhere(where, bad):
    G, b, damping = torch.eye(3, dtype=torch.float64), torch.ones(3, dtype=torch.float64), torch.tensor(1.0).double()
    if where == "matrix":
        G[0, 1] = G[1, 0] = bad
    elif where == "last entry":
        G[2, 2] = bad
    elif where == "b":
        b[1] = bad
    else:
        damping = damping * bad
    found = damped_solve(G, b, damping)
    assert not found.isfinite().all()
    if where != "b":
        assert found.isnan().all()


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


def test_derivatives_are_those_of_finite_differences():
    J, b, damping = normal(3, 4), normal(3, seed=1), torch.tensor(0.5, dtype=torch.float64)
    f = lambda J, b, damping: damped_solve(J @ J.mT, b, damping)
    inputs = [x.clone().requires_grad_() for x in (J, b, damping)]
    assert torch.autograd.gradcheck(f, inputs, check_forward_ad=True)
    assert torch.autograd.gradgradcheck(f, inputs)
    for argument in range(3):
        check_stable(jacfwd(f, argument)(J, b, damping), jacrev(f, argument), J, b, damping)
