"""Linear programs and the projection on the simplex: SciPy, conditions of optimality, batches, and derivatives."""

import numpy as np
import pytest
import torch
from bounds import check_within, eps, half_the_digits, sum_bound
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from scipy.optimize import linprog

from functional_jd.solvers.linear_program import linear_program, simplex_projection


def program(seed, n, r, degenerate=False):
    """Objectives, rows and limits: the last row bounds the sum."""
    random = np.random.default_rng(seed)
    draw = random.integers(-2, 3, size=(r - 1, n)).astype(float) if degenerate else random.normal(size=(r - 1, n))
    limits = np.zeros(r - 1) if degenerate else random.uniform(0, 1, r - 1)
    first, second = random.integers(-1, 2, n).astype(float), random.normal(size=n)
    return np.stack([first, second]), np.concatenate([draw, np.ones((1, n))]), np.append(limits, 1)


def best(objectives, rows, limits):
    """The best values, one objective after the other."""
    values, exact = [], {"primal_feasibility_tolerance": 1e-10, "dual_feasibility_tolerance": 1e-10}
    for objective in objectives:
        found = linprog(-objective, A_ub=rows, b_ub=limits, bounds=(0, None), method="highs", options=exact)
        assert found.status == 0
        values.append(-found.fun)
        rows, limits = np.vstack([rows, -objective]), np.append(limits, found.fun + 1e-10)
    return np.array(values)


@pytest.mark.parametrize("solver", ["host", "device"])
@pytest.mark.parametrize("degenerate", [False, True])
@pytest.mark.parametrize(("n", "r"), [(1, 1), (2, 3), (4, 6), (9, 5), (6, 12)])
def test_it_is_as_good_as_scipys_and_allowed(n, r, degenerate, solver):
    for seed in range(12):
        given = program(seed, n, r, degenerate)
        x = linear_program(*map(torch.tensor, given), solver).numpy()
        objectives, rows, limits = given
        rounding = 64 * n * r * eps()
        assert x.min() >= -rounding
        assert (rows @ x - limits).max() <= rounding
        # SciPy gives up a constraint by 1e-10, and the objective by as much times its multipliers.
        assert np.abs(objectives @ x - best(*given)).max() <= half_the_digits(1 + np.abs(objectives).sum())


def test_the_search_ends_where_largest_gains_go_round():
    # Beale's example, whose vertex at the origin is degenerate.
    objective = torch.tensor([[0.75, -150.0, 0.02, -6.0]]).double()
    rows = torch.tensor([[0.25, -60.0, -0.04, 9.0], [0.5, -90.0, -0.02, 3.0], [0.0, 0.0, 1.0, 0.0]]).double()
    limits = torch.tensor([0.0, 0.0, 1.0]).double()
    x = linear_program(objective, rows, limits)
    torch.testing.assert_close(x, torch.tensor([0.04, 0.0, 1.0, 0.0]).double())


def test_a_search_that_does_not_end_gives_nan():
    # The cube of Klee and Minty: largest gains visit all its 2^n vertices, 63 exchanges where a device makes 48.
    n = 6
    rows = torch.tensor([[2.0 ** (i - j + 1) if j < i else float(i == j) for j in range(n)] for i in range(n)]).double()
    limits = 5.0 ** torch.arange(1, n + 1, dtype=torch.float64)
    objective = 2.0 ** torch.arange(n - 1, -1, -1, dtype=torch.float64)
    easy = torch.tensor([0.0] * (n - 1) + [1.0]).double()
    objectives = torch.stack([objective, easy]).unsqueeze(-2)
    expected = torch.tensor([0.0] * (n - 1) + [5.0**n]).double()
    both = rows.expand(2, n, n), limits.expand(2, n)
    torch.testing.assert_close(linear_program(objectives, *both), expected.expand(2, n))
    hard, found = linear_program(objectives, *both, "device")
    assert hard.isnan().all()
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("solver", ["host", "device"])
def test_a_batch_is_solved_as_each_alone(solver):
    given = [tuple(map(torch.tensor, program(seed, 4, 6, seed % 2 == 0))) for seed in range(6)]
    stacked = [torch.stack(parts) for parts in zip(*given, strict=True)]
    alone = torch.stack([linear_program(*one) for one in given])
    rounding = 64 * 4 * 6 * eps()
    check_within(linear_program(*stacked, solver), alone, rounding)
    mapped = torch.vmap(lambda *one: linear_program(*one, solver))(*stacked)
    check_within(mapped, alone, rounding)
    nested = torch.vmap(torch.vmap(linear_program))(*(x.view(2, 3, *x.shape[1:]) for x in stacked))
    check_within(nested.view(6, 4), alone, rounding)


def test_derivatives_of_the_vertex():
    objectives, rows, limits = map(torch.tensor, program(3, 4, 6))
    vertex = lambda rows, limits: linear_program(objectives.abs() + 0.1, rows, limits)
    assert (vertex(rows, limits) > 1e-3).sum() >= 2
    inputs = rows.requires_grad_(), limits.requires_grad_()
    assert torch.autograd.gradcheck(vertex, inputs, check_forward_ad=True)
    assert torch.autograd.gradgradcheck(vertex, inputs)


points = hnp.arrays(np.float64, st.integers(1, 8), elements=st.integers(-12, 12).map(lambda n: n / 4)).map(
    torch.from_numpy
)


@given(points, st.integers(-60, 60))
def test_nearest_by_the_conditions_of_optimality(y, exponent):
    y = y * 2.0**exponent
    w = simplex_projection(y)
    assert (w >= 0).all()
    assert abs(w.sum() - 1) <= 4 * sum_bound(w)
    # y - w is one number on the support, and y lies below it elsewhere.
    theta = (y - w)[w > 0]
    rounding = 4 * len(y) * eps() * y.abs().max().clamp(min=1)
    assert theta.max() - theta.min() <= rounding
    assert (y[w == 0] <= theta.min() + rounding).all()


def test_one_is_not_lost_beside_large_entries():
    assert simplex_projection(torch.tensor([1e36, -1e36, 5.0], dtype=torch.float64)).tolist() == [1, 0, 0]
    assert simplex_projection(torch.tensor([1e36, 1e36, 5.0], dtype=torch.float64)).tolist() == [0.5, 0.5, 0]


@pytest.mark.parametrize("poison", [torch.nan, torch.inf, -torch.inf])
def test_what_is_not_finite_is_nan_in_its_row_only(poison):
    y = torch.zeros(2, 3, dtype=torch.float64)
    y[0, 1] = poison
    w = simplex_projection(y)
    assert w[0].isnan().all()
    torch.testing.assert_close(w[1], torch.full((3,), 1 / 3, dtype=torch.float64))


def test_derivatives_are_those_of_finite_differences():
    y = torch.tensor([[0.3, 0.8, -2.0, 0.6], [0.1, 0.2, 0.3, 0.35]], dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(simplex_projection, y, check_forward_ad=True, check_batched_grad=True)
    assert torch.autograd.gradgradcheck(simplex_projection, y)
