"""Projection on the dual cone: feasibility, optimality, and the reference on the rows themselves."""

import numpy as np
import pytest
import torch
from bounds import check_within, cone_bound, projection_bound
from hypothesis import assume, given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from scipy.optimize import nnls

from functional_jd.solvers.dual_cone import cosines, dual_cone_multipliers, row_multipliers

jacobians = st.tuples(st.integers(1, 7), st.integers(1, 7)).flatmap(
    lambda shape: hnp.arrays(np.float64, shape, elements=st.integers(-4, 4).map(float)).map(torch.from_numpy)
)


def unit_rows(J):
    return torch.nn.functional.normalize(J, dim=1)


def reference(N, x):
    """Multipliers by non-negative least squares on the rows: those that are not zero belong to independent rows."""
    return torch.from_numpy(nnls(N.T.numpy(), -x.numpy(), maxiter=100 * len(N))[0])


def random_jacobian(m, kind):
    generator = torch.Generator().manual_seed(m)
    J = torch.randn(m, m + 5, generator=generator, dtype=torch.float64)
    left, right = (m + 1) // 2, m // 2
    return {
        "random": J,
        "conflicting": J - 1.2 * J.mean(0),
        "stationary": J - J.mean(0),
        "opposite": torch.cat([J[:left], -J[:right]]),
        "duplicated": torch.cat([J[:left], J[:right]]),
        "rank 1": J[:, :1] * J[:1],
        "half rank": J[:, :left] @ torch.randn(left, m + 5, generator=generator, dtype=torch.float64),
        "scaled": J * 10 ** (24 * torch.rand(m, 1, generator=generator, dtype=torch.float64) - 12),
    }[kind]


@given(jacobians)
def test_cosines_are_those_of_the_rows(J):
    C, norms = cosines(J @ J.T)
    zero = (J == 0).all(1)
    torch.testing.assert_close(C, unit_rows(J) @ unit_rows(J).T)
    torch.testing.assert_close(norms, torch.where(zero, 1, torch.linalg.vector_norm(J, dim=1)))


@given(jacobians, st.lists(st.integers(-60, 60), min_size=7, max_size=7))
def test_cosines_do_not_change_by_a_bit_under_powers_of_two(J, exponents):
    scale = torch.ldexp(torch.ones(len(J), 1, dtype=torch.float64), torch.tensor(exponents[: len(J)]).unsqueeze(1))
    assert torch.equal(cosines((scale * J) @ (scale * J).T)[0], cosines(J @ J.T)[0])


@given(jacobians, st.data())
def test_the_projection_is_the_closest_point_that_conflicts_with_no_row(J, data):
    x = torch.tensor(data.draw(st.lists(st.integers(-3, 3).map(float), min_size=J.shape[1], max_size=J.shape[1])))
    assume(x.norm() > 0)
    x = (x / x.norm()).double()
    N = unit_rows(J)
    s = dual_cone_multipliers(cosines(J @ J.T)[0], (N @ x).unsqueeze(1)).squeeze(1)
    check_within(x + s @ N, x + reference(N, x) @ N, cone_bound(J))
    assert (N @ (x + s @ N)).min() >= -cone_bound(J)


@given(jacobians)
def test_projections_of_the_rows_never_need_the_row_itself(J):
    N = unit_rows(J)
    S = row_multipliers(cosines(J @ J.T)[0])
    assert (S.diagonal() == 0).all()
    for i in range(len(J)):
        check_within(N[i] + S[:, i] @ N, N[i] + reference(N, N[i]) @ N, cone_bound(J))


@pytest.mark.parametrize(
    "kind",
    ["random", "conflicting", "stationary", "opposite", "duplicated", "rank 1", "half rank", "scaled"],
)
@pytest.mark.parametrize("m", [1, 2, 3, 4, 5, 8, 16, 32])
def test_exact_to_rounding(m, kind):
    J = random_jacobian(m, kind)
    N = unit_rows(J)
    S = row_multipliers(cosines(J @ J.T)[0])
    for i in range(m):
        expected = reference(N, N[i])
        check_within(S[:, i] @ N, expected @ N, projection_bound(N, expected))


def test_two_rows_are_what_many_rows_are():
    for angle in torch.linspace(0.1, 3.1, 7, dtype=torch.float64):
        C = torch.stack([torch.ones_like(angle), angle.cos(), angle.cos(), torch.ones_like(angle)]).view(2, 2)
        three = torch.block_diag(C, torch.zeros(1, 1, dtype=torch.float64))
        torch.testing.assert_close(row_multipliers(C), row_multipliers(three)[:2, :2])


def test_a_row_of_zeros_is_left_alone_also_where_the_search_is_long():
    J = random_jacobian(12, "half rank")
    padded = torch.cat([J[:5], torch.zeros_like(J[:2]), J[5:]])
    S, expected = row_multipliers(cosines(padded @ padded.T)[0]), row_multipliers(cosines(J @ J.T)[0])
    kept = [*range(5), *range(7, 14)]
    assert (S[5:7] == 0).all()
    assert (S[:, 5:7] == 0).all()
    N = unit_rows(J)
    bounds = torch.tensor([projection_bound(N, reference(N, row)) for row in N], dtype=torch.float64)
    check_within(S[kept][:, kept].T @ N, expected.T @ N, bounds.unsqueeze(1))


@pytest.mark.parametrize("m", [2, 3, 5])
def test_composes_with_every_transform(m):
    generator = torch.Generator().manual_seed(m)
    J = torch.randn(4, m, m + 1, generator=generator, dtype=torch.float64)

    def total(J):
        C, norms = cosines(J @ J.mT)
        return (row_multipliers(C) * norms).sum() + dual_cone_multipliers(C, C[:, :1]).square().sum()

    f = torch.func.grad(total)
    expected = torch.stack([f(x) for x in J])
    torch.testing.assert_close(torch.vmap(f)(J), expected)
    torch._dynamo.reset()
    torch.testing.assert_close(torch.compile(torch.vmap(f), fullgraph=True, backend="aot_eager")(J), expected)
    assert torch.autograd.gradcheck(total, J[0].clone().requires_grad_(), check_forward_ad=True)
