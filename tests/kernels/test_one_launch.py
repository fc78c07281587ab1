"""The search in one launch against the host's, run by Triton's interpreter: `make test-kernels`. It needs no GPU."""

import os
from functools import partial
from importlib.util import find_spec

import pytest
import torch
from bounds import check_same, check_within, cone_bound, eps
from sequences import rows_of_kind

import functional_jd as fj
from functional_jd.core.safe import cosines
from functional_jd.solvers import lcp
from functional_jd.solvers.lcp import can_be_launched, linear_complementarity

if find_spec("triton") is None or os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("needs Triton and its interpreter", allow_module_level=True)

from functional_jd.solvers.one_launch import solve_in_one_launch

# Of the slack of signs, in units of `1 + sum(s)`.
SLACK = 2 * 1e-13


def problem(J, k):
    """Cosines, k right-hand sides, and what is free, as of `row_multipliers`; unit rows."""
    C, norms = cosines(J @ J.mT)
    return C, C[:k], ~torch.eye(len(J), dtype=torch.bool)[:k], J / norms[:, None]


@pytest.mark.parametrize("kind", ["random", "conflicting", "dependent", "opposite", "zeros", "integers", "ill"])
@pytest.mark.parametrize("m", [2, 3, 5, 8, 13, 32, 64])
def test_one_launch_finds_what_the_host_finds(kind, m):
    J = rows_of_kind(kind, m)
    C, q, free, N = problem(J, min(m, 3))
    (s,), (inverse,) = solve_in_one_launch(C[None], q[None], free[None], inverses=True)
    expected = linear_complementarity(C, q, free)
    w, size = q + s @ C, 1 + s.sum(-1, keepdim=True)
    assert (s >= -SLACK * size).all()
    assert (s[~free] == 0).all()
    assert (w[free] >= -SLACK * size.expand_as(w)[free]).all()
    assert ((s * w).abs() <= SLACK * size**2).all()
    check_within(s @ N, expected @ N, cone_bound(J[J.any(1)]) * size)
    # The inverse belongs to independent rows that carry the solution.
    active = inverse.diagonal(dim1=-2, dim2=-1) != 0
    assert (active | (s.abs() <= SLACK * size)).all()
    if kind != "ill":
        one = torch.where(active[:, :, None] & active[:, None, :], C, 0) @ inverse
        check_within(
            one, torch.diag_embed(active.double()), 1e-3 * eps() ** 0.5 * inverse.abs().amax((1, 2), True) ** 2
        )


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of the interpreter, which computes by NumPy
def test_several_matrices_with_an_entry_that_is_not_finite():
    several = [problem(rows_of_kind("conflicting", 5, seed), 5) for seed in range(3)]
    C, q, free = (torch.stack(x) for x in list(zip(*several, strict=True))[:3])
    expected = linear_complementarity(C, q, free)
    for poison in (torch.nan, torch.inf, -torch.inf):
        bad_q, bad_C = q.clone(), C.clone()
        bad_q[1, 2, 3], bad_C[2, 0, 1] = poison, poison
        s, inverse = solve_in_one_launch(bad_C, bad_q, free, inverses=True)
        assert s[1, 2].isnan().all()
        assert s[2].isnan().all()
        assert inverse.isfinite().all()
        kept = ~s.isnan().any(-1)
        assert kept.sum() == 9
        check_same(s[kept], expected[kept])


def test_a_launch_ends_with_nan_where_there_is_no_solution():
    """The objective has no minimum: q is not in the range of the matrix."""
    C = torch.tensor([[1.0, -1.0], [-1.0, 1.0]], dtype=torch.float64)
    q = torch.tensor([[-1.0, -1.0], [-1.0, 0.5]], dtype=torch.float64)
    s, _ = solve_in_one_launch(C[None], q[None], torch.ones(1, 2, 2, dtype=torch.bool), inverses=False)
    assert s.isnan().all()


@pytest.mark.parametrize("rule", [fj.upgrad, fj.dualproj, fj.mgda])
def test_rows_that_are_opposite_up_to_rounding_have_the_answer_of_the_host(rule):
    for seed in range(20):
        J = torch.randn(3, 1000, generator=torch.Generator().manual_seed(seed))
        J[1] = -(0.5 + seed / 10) * J[0]
        found, expected = (fj.aggregate(rule(solver=solver), J).direction for solver in ("device", "host"))
        check_within(found, expected, 1e-6 * J.norm(dim=1).sum())  # half of the digits of float64, and float32


def test_which_problems_are_launched(monkeypatch):
    assert can_be_launched(torch.zeros(1, 64))
    assert can_be_launched(torch.zeros([]))  # of a rule of one's own
    assert not can_be_launched(torch.zeros(1, 65))
    monkeypatch.setattr(lcp, "_INTERPRETS", False)
    assert not can_be_launched(torch.zeros(1, 64))


def length(solver):
    def f(J, q):
        C, _ = cosines(J @ J.mT)
        return (linear_complementarity(C, q @ C, solver=solver) @ J).square().sum()

    return f


@pytest.fixture
def no_rounds(monkeypatch):
    monkeypatch.setattr(lcp, "solve_by_pivots", lambda *_: pytest.fail("not launched"))


def test_derivatives_are_those_of_the_host(no_rounds):
    J, q = rows_of_kind("conflicting", 4), rows_of_kind("random", 4, seed=1)[:2, :4]
    assert length("host")(J, q) > 0
    condition = torch.linalg.cond(cosines(J @ J.mT)[0])  # each derivative solves once more
    for order, derivative in ((1, torch.func.grad), (2, torch.func.hessian)):
        found, expected = (derivative(length(solver))(J, q) for solver in ("device", "host"))
        check_same(found, expected, roundings=2**8 * int(condition) ** order)
    batch = torch.stack([J, J.flip(0)])
    found, expected = (torch.vmap(torch.func.grad(length(s)), (0, None))(batch, q) for s in ("device", "host"))
    check_same(found, expected, roundings=2**8 * int(condition))


@pytest.mark.parametrize("rule", [fj.upgrad, fj.dualproj, fj.mgda, partial(fj.mgda, cap=0.4), fj.pcd, fj.cagrad])
@pytest.mark.parametrize("m", [3, 6])
def test_rules_are_served(rule, m, no_rounds):
    J = rows_of_kind("conflicting", m)
    more = (0.5,) if rule is fj.cagrad else ()
    found, expected = (fj.aggregate(rule(*more, solver=solver), J).direction for solver in ("device", "host"))
    check_within(found, expected, 4 * cone_bound(J) * J.norm(dim=1).sum())
