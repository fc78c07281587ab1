"""Projection on the dual cone: feasibility, optimality, and the reference on the rows themselves."""

import pytest
import torch
from bounds import check_within, eps, projection_bound
from hypothesis import given
from hypothesis import strategies as st
from scipy.optimize import nnls
from sequences import integer_jacobians, rows_of_kind

from functional_jd.core.safe import cosines
from functional_jd.solvers.lcp import row_multipliers

jacobians = integer_jacobians((1, 7), (1, 7))


def unit_rows(J):
    return torch.nn.functional.normalize(J, dim=1)


def reference(N, x):
    """Multipliers by non-negative least squares on the rows: those that are not zero belong to independent rows."""
    return torch.from_numpy(nnls(N.T.numpy(), -x.numpy(), maxiter=100 * len(N))[0])


@given(jacobians, st.lists(st.integers(-60, 60), min_size=7, max_size=7))
def test_cosines_do_not_change_by_a_bit_under_powers_of_two_and_zeros_have_length_one(J, exponents):
    scale = torch.ldexp(torch.ones(len(J), 1, dtype=torch.float64), torch.tensor(exponents[: len(J)]).unsqueeze(1))
    C, norms = cosines((scale * J) @ (scale * J).T)
    assert torch.equal(C, cosines(J @ J.T)[0])
    assert (norms[(J == 0).all(1)] == 1).all()


KINDS = ["random", "conflicting", "stationary", "halves", "repeated", "rank one", "low rank", "integers", "scaled"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("m", [1, 2, 3, 4, 5, 8, 16, 32])
@pytest.mark.parametrize("solver", ["host", "device"])
def test_exact_to_rounding(m, kind, solver):
    J = rows_of_kind(kind, m)
    N = unit_rows(J)
    S = row_multipliers(cosines(J @ J.T)[0], solver)
    for i in range(m):
        expected = reference(N, N[i])
        check_within(S[:, i] @ N, expected @ N, projection_bound(N, expected))


def test_a_row_of_zeros_is_left_alone_also_where_the_search_is_long():
    J = rows_of_kind("low rank", 12)
    padded = torch.cat([J[:5], torch.zeros_like(J[:2]), J[5:]])
    S, expected = row_multipliers(cosines(padded @ padded.T)[0]), row_multipliers(cosines(J @ J.T)[0])
    kept = [*range(5), *range(7, 14)]
    assert (S[5:7] == 0).all()
    assert (S[:, 5:7] == 0).all()
    N = unit_rows(J)
    bounds = torch.tensor([projection_bound(N, reference(N, row)) for row in N], dtype=torch.float64)
    check_within(S[kept][:, kept].T @ N, expected.T @ N, bounds.unsqueeze(1))


def test_multipliers_of_nearly_opposite_rows_are_those_of_the_gramian():
    # Two rows cancel but for e. What the rounding of the Gramian changes is the limit: eps / e^2.
    for e in (1e-3, 1e-4, 1e-5, 1e-6):
        J = torch.tensor([[1, e, 0], [-1, e, 0], [0, -1, 0.5]], dtype=torch.float64)
        N = unit_rows(J)
        S = row_multipliers(cosines(J @ J.T)[0])
        expected = reference(N, N[2])
        check_within(N[2] + S[:, 2] @ N, N[2] + expected @ N, eps() / e**2)
