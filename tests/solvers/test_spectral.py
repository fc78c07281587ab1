"""Functions of a matrix by its eigenvalues: SciPy, and derivatives by differences, also at equal eigenvalues."""

import numpy as np
import pytest
import torch
from bounds import check_derivatives, check_within, eps, gramian_bound
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from torch.func import grad, hessian, jacfwd, jacrev

from functional_jd import aggregate, config, imtl_g
from functional_jd.solvers.spectral import inverse_root, pseudo_inverse, solve_well_conditioned


def rows():
    shapes = st.tuples(st.integers(1, 6), st.integers(1, 6))
    return shapes.flatmap(
        lambda shape: hnp.arrays(np.float64, shape, elements=st.integers(-4, 4).map(float)).map(torch.from_numpy)
    )


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@given(rows())
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


@pytest.mark.parametrize("name", POINTS)
@pytest.mark.parametrize(
    "function",
    [
        lambda G: pseudo_inverse(G)[0],
        lambda G: pseudo_inverse(G)[1],
        lambda G: inverse_root(G)[0],
        lambda G: inverse_root(G)[1].sum(),
    ],
    ids=["+", "range", "-/", "s"],
)
def test_derivatives_are_those_of_differences(name, function):
    f = lambda J: function(J @ J.T)
    J = POINTS[name]
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
def test_what_is_not_finite_stays_so_and_does_not_raise(value):
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
    for C in (
        dependent @ dependent.T,
        nearly @ nearly.T,
        0 * one,
        one * torch.nan,
        one.index_fill(0, torch.tensor(2), torch.inf),
    ):
        assert solve_well_conditioned(C, b) is None
    refused = []
    torch.vmap(lambda C: refused.append(solve_well_conditioned(C, b)) or C)(one.unsqueeze(0))
    grad(lambda C: refused.append(solve_well_conditioned(C, b)) or C.sum())(one)
    assert refused == [None, None]


@pytest.mark.parametrize("m", [1, 2, 4, 8, 32])
@pytest.mark.parametrize("spread", [0, 6])
@pytest.mark.parametrize("rule", [config, imtl_g])
def test_rules_by_the_factor_find_what_they_find_by_eigenvalues(rule, m, spread):
    direction = lambda J: aggregate(rule(), J).direction
    J = normal(m, m + 9, seed=m) * 10.0 ** (spread * torch.linspace(-1, 1, m, dtype=torch.float64).unsqueeze(1))
    expected = torch.vmap(direction)(J.unsqueeze(0))[0]  # under vmap no value can be looked at
    check_within(direction(J), expected, gramian_bound(J, expected.abs().max()))
    if m <= 4 and not spread:
        slopes = torch.autograd.functional.jacobian(direction, J)
        check_within(slopes, jacrev(direction)(J), gramian_bound(J, condition(J) * slopes.abs().max()))
