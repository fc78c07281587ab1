"""Linear complementarity, by the search, by numbers and by products: least squares, and the conditions."""

import numpy as np
import pytest
import torch
from bounds import check_within, eps, least_singular_value, projection_bound
from gramian_by_hand import Largest
from hypothesis import example, given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from scipy.optimize import nnls
from sequences import integer_jacobians, random_rows, rows_of_kind

import functional_jd as jd
from functional_jd.solvers import by_products as products
from functional_jd.solvers import lcp
from functional_jd.solvers.by_numbers import solve_by_numbers
from functional_jd.solvers.by_products import solve_by_products
from functional_jd.solvers.lcp import linear_complementarity, row_multipliers


@st.composite
def problems(draw, most=6, entries=3):
    """A factor A [m, n] of M = A A' / scale and an offset in its range, all small integers before scaling."""
    m, n = draw(st.integers(1, most)), draw(st.integers(1, most))
    integers = st.integers(-entries, entries).map(float)
    A = torch.from_numpy(draw(hnp.arrays(np.float64, (m, n), elements=integers)))
    x = torch.from_numpy(draw(hnp.arrays(np.float64, (3, n), elements=integers)))
    scale = max(1.0, float((A @ A.T).abs().max()))
    return A / scale**0.5, x / max(1.0, float((x @ A.T).abs().max()) / scale**0.5)


def unit_rows(m, n, seed=0):
    return torch.nn.functional.normalize(random_rows(m, n, seed=seed), dim=1)


def random_problem(m, n, seed=0, k=4):
    """A matrix `[m, m]`, and k offsets in its range."""
    A = unit_rows(m, n, seed)
    return A @ A.T, random_rows(k, n, seed=seed + 1) / n**0.5 @ A.T


def turned_from_the_mean(m):
    A = torch.nn.functional.normalize(rows_of_kind("conflicting", m))
    return A @ A.T, ~torch.eye(m, dtype=torch.bool)


def bound(A):
    """How far two answers `s @ A` may lie apart, whichever rows turn out active: A is scaled, but its rows are not."""
    return 512 * eps() / least_singular_value(A) ** 2


HARD = torch.tensor([[-3, 3, -1, 4], [2, -3, 3, -4], [0, -1, 0, 2], [0, 0, -1, 1], [3, -2, 1, -2], [3, -1, -1, -1]])


@given(problems(most=8))
@example((HARD.double() / 38**0.5, HARD.double() / 38**0.5))
def test_all_ways_to_search_find_the_same(problem):
    """Which are right: `tests/exact/test_exact_cones.py`."""
    A, x = problem
    M, q = A @ A.T, x @ A.T
    expected = linear_complementarity(M, q)
    check_within(linear_complementarity(M, q, solver="device") @ A, expected @ A, bound(A))
    for start in ("_PRODUCTS_FROM", "_TENSORS_FROM"):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(lcp, start, 0)
            s = linear_complementarity(M, q)
            differentiable = linear_complementarity(M, q.clone().requires_grad_())
        check_within(s @ A, expected @ A, bound(A))
        assert torch.equal(differentiable, s) or start == "_TENSORS_FROM"


with_and_without_factors = pytest.mark.parametrize("start", [lcp._PRODUCTS_FROM, 0], ids=["factors", "products"])


@pytest.mark.parametrize(("m", "n"), [(9, 12), (12, 6), (30, 40), (40, 20), (64, 64)])
@pytest.mark.parametrize(
    ("solver", "start"),
    [("host", lcp._PRODUCTS_FROM), ("host", 0), ("device", 0)],
    ids=["factors", "products", "fixed"],
)
def test_equal_to_non_negative_least_squares(m, n, solver, start, monkeypatch):
    monkeypatch.setattr(lcp, "_PRODUCTS_FROM", start)
    A, x = unit_rows(m, n, m), random_rows(12, n, seed=m + 1) / n**0.5
    s = linear_complementarity(A @ A.T, x @ A.T, solver=solver)
    for i in range(len(x)):
        expected = torch.from_numpy(nnls(A.T.numpy(), -x[i].numpy())[0])
        check_within(s[i] @ A, expected @ A, projection_bound(A, expected))


def test_many_rows_that_nearly_depend_on_one_another_are_projected_with_a_warning():
    """Rows as of residuals at neighbouring points: singular values from 18 to 1e-15, a search for every one."""
    x, centres = (torch.linspace(-1, 1, n, dtype=torch.float64) for n in (80, 40))
    rows = torch.exp(-8 * (x[:, None] - centres).square()) * torch.sin(40 * x).sign()[:, None]
    A = torch.nn.functional.normalize(rows)
    with pytest.warns(jd.SlowPathWarning, match="projections on the dual cone of 80 rows that nearly depend"):
        s = row_multipliers(A @ A.T)
    # The conditions of the projections, where eigenvalues up to 1e-14 for each row count as zero.
    gains, sizes = (A + s.T @ A) @ A.T, 1 + s.sum(0)
    assert (s >= 0).all()
    assert (gains.amin(1) >= -4 * len(A) * 1e-14 * sizes).all()
    assert ((s.T * gains).sum(1).abs() <= 4 * len(A) * 1e-14 * sizes).all()


@with_and_without_factors
def test_what_is_not_allowed_is_zero_and_left_out_of_the_problem(start, monkeypatch):
    monkeypatch.setattr(lcp, "_PRODUCTS_FROM", start)
    M, q = random_problem(6, 9)
    allowed = torch.tensor([True, False, True, True, False, True]).expand_as(q)
    s = linear_complementarity(M, q, allowed)
    kept = allowed[0].nonzero()[:, 0]
    assert (s[:, ~allowed[0]] == 0).all()
    torch.testing.assert_close(s[:, kept], linear_complementarity(M[kept][:, kept], q[:, kept]))


def test_a_batch_of_easy_and_hard_problems_is_the_loop():
    widths = [14, 5, 10, 2, 1, 5, 30, 5]
    several = [(unit_rows(10, n, k), random_rows(4, n, seed=k + 9) / n**0.5) for k, n in enumerate(widths)]
    M, q = (torch.stack(x) for x in zip(*((A @ A.T, x @ A.T) for A, x in several), strict=True))
    expected = torch.stack([linear_complementarity(*pair) @ pair[0] for pair in zip(M, q, strict=True)])
    multipliers = [[torch.from_numpy(nnls(A.T.numpy(), -row.numpy())[0]) for row in x] for A, x in several]
    bounds = [[[projection_bound(A, s)] for s in each] for (A, _), each in zip(several, multipliers, strict=True)]
    bounds = torch.tensor(bounds, dtype=torch.float64)
    check_within(torch.vmap(linear_complementarity)(M, q) @ M, expected, bounds)
    check_within(linear_complementarity(M, q) @ M, expected, bounds)
    nested = torch.vmap(torch.vmap(linear_complementarity, in_dims=(None, 0)))(M, q.unsqueeze(2)).squeeze(2)
    check_within(nested @ M, expected, bounds)


@with_and_without_factors
def test_what_is_not_finite_stays_in_its_own_problem(start, monkeypatch):
    monkeypatch.setattr(lcp, "_PRODUCTS_FROM", start)
    M, q = random_problem(5, 8)
    expected = linear_complementarity(M, q)
    for poison in (torch.nan, torch.inf, -torch.inf):
        bad = q.clone()
        bad[1, 3] = poison
        s = linear_complementarity(M, bad)
        assert s[1].isnan().all()
        torch.testing.assert_close(s[[0, 2, 3]], expected[[0, 2, 3]])
        assert linear_complementarity(M.index_fill(0, torch.tensor(2), poison), q).isnan().all()


def symmetric(f):
    """The derivative is with respect to symmetric matrices: the search takes M for what it is."""
    return lambda factor, q: f(factor @ factor.mT, q)


@pytest.mark.parametrize("m", [3, 6])
@with_and_without_factors
def test_first_and_second_derivatives_are_those_of_finite_differences(m, start, monkeypatch):
    monkeypatch.setattr(lcp, "_PRODUCTS_FROM", start)
    A, q = unit_rows(m, m + 2, m), random_rows(2, m, seed=m + 1)
    inputs = A.requires_grad_(), q.requires_grad_()
    assert symmetric(linear_complementarity)(A, q).count_nonzero() > 0
    assert torch.autograd.gradcheck(symmetric(linear_complementarity), inputs, check_forward_ad=True)
    assert torch.autograd.gradgradcheck(symmetric(linear_complementarity), inputs)


def test_the_search_is_a_sound_operator():
    M, q = random_problem(4, 6)
    allowed = torch.ones_like(q, dtype=torch.bool)
    large = torch.eye(12, dtype=torch.float64)
    torch.library.opcheck(lcp._opaque_search.op, (large, large, torch.ones_like(large, dtype=torch.bool)))
    torch.library.opcheck(lcp._opaque_solution.op, (M, q, allowed))
    torch.library.opcheck(lcp._opaque_search.op, (M, q, allowed))
    torch.library.opcheck(lcp._opaque_search.op, (M.mT, q.mT.contiguous().mT, allowed[:1].expand_as(q)))


@pytest.mark.parametrize("m", [1, 3, 5, 8])
def test_numbers_find_what_tensors_find(m, monkeypatch):
    M, allowed = turned_from_the_mean(m)
    found = solve_by_numbers(M[None], M[None], allowed[None])
    assert found is not None
    monkeypatch.setattr(lcp, "_TENSORS_FROM", 0)
    wanted = lcp.solution(M, M, allowed, fixed=False)
    condition = float(torch.linalg.cond(M))
    check_within(found[0], wanted, 64 * m**2 * eps() * condition * wanted.abs().max())


def test_numbers_leave_to_the_search_what_is_ill_conditioned():
    N = torch.nn.functional.normalize(torch.tensor([[1, 1e-3, 0], [-1, 1e-3, 0], [0, -1, 0.5]], dtype=torch.float64))
    assert solve_by_numbers((N @ N.T)[None], (N[2] @ N.T)[None, None], torch.ones(1, 1, 3, dtype=torch.bool)) is None


def test_nothing_is_read_where_something_may_record_what_is_computed():
    M, allowed = turned_from_the_mean(3)
    inputs = M[None], M[None], allowed[None]
    with torch.utils._python_dispatch.TorchDispatchMode():
        assert solve_by_numbers(*inputs) is None


TOLERANCE = 1e-13


def found_for(A, x):
    """The rows and vectors as one batch of one matrix."""
    q = (x @ A.mT).unsqueeze(0)
    found = solve_by_products((A @ A.mT).unsqueeze(0), q, torch.ones_like(q, dtype=torch.bool), TOLERANCE)
    return products.Found(*(field[0] for field in found))


@given(integer_jacobians((1, 8), (1, 8), 3))
def test_what_counts_as_solved_meets_the_conditions(J):
    A = torch.nn.functional.normalize(J, dim=1)
    found = found_for(A, A)
    size = 1 + torch.linalg.vector_norm(found.s, dim=-1, keepdim=True)
    w = found.s @ (A @ A.mT) + A @ A.mT
    slack = torch.where(found.solved, TOLERANCE * size, torch.inf)
    assert (found.s >= -slack).all()
    assert (w >= -slack).all()
    assert (torch.where(found.active, w, found.s).abs() <= slack).all()


def test_dependent_rows_that_agree_are_solved_too():
    A, x = unit_rows(6, 20), unit_rows(5, 20, seed=1)
    twice = torch.cat([A, A, -A[:2]])
    found = found_for(twice, x)
    assert found.solved.all()
    for s, vector in zip(found.s, x, strict=True):
        expected = torch.from_numpy(nnls(twice.mT.numpy(), -vector.numpy())[0])
        check_within(s @ twice, expected @ twice, projection_bound(twice, expected))


def test_no_problem_has_a_matrix_of_its_own():
    A = unit_rows(40, 80)
    with Largest() as made:
        assert found_for(A, A).solved.all()
    assert made.numel <= 40 * 80
