"""Problems solved by Python's numbers: what the search with tensors finds, or nothing. Exact tests: all active sets."""

import pytest
import torch
from bounds import check_within, eps

from functional_jd.solvers import lcp
from functional_jd.solvers.by_numbers import solve_by_numbers


def problem(m):
    A = torch.randn(m, m + 3, generator=torch.Generator().manual_seed(m), dtype=torch.float64)
    A = torch.nn.functional.normalize(A - 1.2 * A.mean(0))
    return A @ A.T, ~torch.eye(m, dtype=torch.bool)


@pytest.mark.parametrize("m", [1, 3, 5, 8])
def test_numbers_find_what_tensors_find(m, monkeypatch):
    M, allowed = problem(m)
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
    M, allowed = problem(3)
    inputs = M[None], M[None], allowed[None]
    with torch.utils._python_dispatch.TorchDispatchMode():
        assert solve_by_numbers(*inputs) is None
