"""Fair shares: the equation itself, SciPy's roots, derivatives by differences, and every transform."""

import pytest
import torch
from bounds import check_derivatives, check_within, eps
from scipy.optimize import nnls
from torch.func import grad, jacfwd

from functional_jd.solvers import fairness
from functional_jd.solvers.fairness import fair_shares


def problem(m, n, seed, spread=0.0, lean=0.5):
    """Cosines of random rows that lean to one side, and sizes spread over `10^spread`."""
    generator = torch.Generator().manual_seed(seed)
    J = torch.randn(m, n, generator=generator, dtype=torch.float64)
    N = torch.nn.functional.normalize(J + lean * torch.randn(n, generator=generator, dtype=torch.float64), dim=1)
    C = N @ N.T
    sizes = 10 ** (spread * (torch.rand(m, generator=generator, dtype=torch.float64) - 0.5))
    return C.fill_diagonal_(1.0), sizes


@pytest.mark.parametrize("p", [0.1, 0.5, 1.0, 2.0, 10.0])
@pytest.mark.parametrize(
    "rows",
    [
        [[1.0, 0.0], [-1.0, 0.0]],
        [[1.0, 0.3], [-1.0, -0.3], [0.2, 1.0]],
        [[0.0, 1.0], [3.0, 3.0], [-1.0, -1.0], [1.0, 1.0]],
        [[1.0, 0.0], [-0.5, 0.75**0.5], [-0.5, -(0.75**0.5)]],
    ],
    ids=["opposite", "two of three opposite", "opposite to rounding", "star"],
)
def test_a_stationary_problem_has_no_shares(rows, p):
    N = torch.nn.functional.normalize(torch.tensor(rows, dtype=torch.float64), dim=1)
    v = fair_shares(N @ N.T, torch.ones(len(N), dtype=torch.float64), p)
    assert v.isfinite().all()
    if p <= 1:
        assert (v == 0).all()
    else:  # the gains that are left are those of rows that do not cancel; the others are rounding
        gains = N @ (N.T @ v)
        wanted = torch.where(v > 0, v, 1) ** -p
        assert ((gains - wanted).abs() <= 16 * eps() * v.sum()).all() or (v == 0).all()


@pytest.mark.parametrize("p", [0.02, 0.05, 0.1, 1.0])
@pytest.mark.parametrize("seed", range(4))
def test_many_rows_that_are_stationary_have_no_shares(seed, p):
    generator = torch.Generator().manual_seed(seed)
    N = torch.nn.functional.normalize(torch.randn(50, 8, generator=generator, dtype=torch.float64), dim=1)
    assert nnls(N.numpy().T, -N[0].numpy())[1] <= 64 * N.numel() * eps()  # as any row, the first is cancelled by others
    for solver in ("host", "device"):
        assert (fair_shares(N @ N.T, torch.ones(50, dtype=torch.float64), p, solver) == 0).all()


@pytest.mark.parametrize("distance", [1e-2, 1e-4])
def test_a_nearly_stationary_problem_is_solved_as_well_as_its_cosines_say(distance):
    N = torch.nn.functional.normalize(torch.tensor([[1.0, distance], [-1.0, distance]], dtype=torch.float64), dim=1)
    v = fair_shares(N @ N.T, torch.ones(2, dtype=torch.float64), 1.0)
    assert (v * (N @ (N.T @ v)) - 1).abs().max() <= 64 * eps() / distance**2


def test_an_extreme_power_stays_finite_in_value_and_derivative():
    C, k = problem(4, 6, 0, spread=12.0)
    for p in (1e-3, 1e3):
        assert fair_shares(C, k, p).isfinite().all()
        assert grad(lambda C, p=p: fair_shares(C, k, p).sum())(C).isfinite().all()


@pytest.mark.parametrize("p", [10.0, 20.0, 100.0, 1000.0])
def test_shares_whose_powers_overflow_are_those_without_which_no_gain_is_possible(p):
    # A short row that a long one opposes gains nothing: it takes as much of it as there is of the long one.
    C, k = torch.tensor([[1.0, -0.5], [-0.5, 1.0]], dtype=torch.float64), torch.tensor([1.0, 1e-12]).double()
    v = fair_shares(C, k, p)
    y = torch.tensor([0.75 ** (-1 / (1 + p)), 0.5 * 0.75 ** (-1 / (1 + p))], dtype=torch.float64)
    check_within(k * v, y, 16 * eps())
    f = lambda c: fair_shares(torch.stack([torch.stack([c / c, c]), torch.stack([c, c / c])]), k, p)
    slope = jacfwd(f)(C[0, 1])[0]  # of (1 - c^2)^(-1 / (1 + p)), unless the search did not converge
    if p <= 50:
        assert slope.item() == pytest.approx(2 * -0.5 / (1 + p) * 0.75 ** (-1 / (1 + p) - 1), rel=64 * p * eps())
    assert slope.isfinite()


@pytest.mark.parametrize("p", [0.01, 0.02, 0.05])
def test_a_share_that_does_not_matter_leaves_the_derivatives_of_the_others(p):
    # The last row gains more from the others than its share is worth, so that it shrinks beyond all bounds.
    C, k = problem(3, 5, 2)[0], torch.tensor([1.0, 1e-2, 1e-12], dtype=torch.float64)
    C[2] = C[:, 2] = torch.tensor([0.6, 0.2, 1.0])
    S = torch.tensor([[0.0, 0.3, -0.2], [0.3, 0.0, 0.5], [-0.2, 0.5, 0.0]], dtype=torch.float64)
    f, zero = lambda x: k * fair_shares(C + x * S, k, p), torch.zeros((), dtype=torch.float64)
    check_derivatives(jacfwd(f)(zero), f, zero)
    assert jacfwd(f)(zero).abs().max() > 1e-2


@pytest.mark.parametrize("batch", [(), (2,)])
def test_the_search_is_a_sound_operator_with_the_layout_that_compiled_code_expects(batch):
    C, k = problem(4, 6, 0)
    inputs = C.expand(*batch, 4, 4), k.expand(*batch, 4), torch.ones(*batch, 1, dtype=torch.float64)
    torch.library.opcheck(fairness._opaque_search.op, inputs)
    found, described = fairness._opaque_search.op(*inputs), fairness._fake(*inputs)
    assert [x.stride() for x in found] == [x.stride() for x in described]
