"""All active sets at once: exact fractions, dependent rows, and what it takes: no value is read, few launches."""

from fractions import Fraction
from functools import partial
from itertools import combinations

import pytest
import torch
from bounds import check_within, eps, least_singular_value
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from torch.utils._python_dispatch import TorchDispatchMode

from functional_jd.solvers import lcp
from functional_jd.solvers.active_sets import solve_by_active_sets
from functional_jd.solvers.lcp import linear_complementarity


@st.composite
def integers(draw, most=4):
    """Rows and three offsets in their range, all integers: equal, opposite, dependent rows and zeros are frequent."""
    m, n = draw(st.integers(1, most)), draw(st.integers(1, most))
    entries = st.integers(-2, 2)
    return [draw(hnp.arrays("int64", shape, elements=entries)) for shape in ((m, n), (3, n))]


def solved_exactly(M, q):
    """Multipliers that meet the conditions, as fractions, by trying every active set of independent rows."""
    for size in range(len(M) + 1):
        for F in combinations(range(len(M)), size):
            rows = [[Fraction(int(M[i][j])) for j in F] + [-Fraction(int(q[i]))] for i in F]
            if not eliminated(rows):
                continue
            s = [Fraction(0)] * len(M)
            for i, row in zip(F, rows, strict=True):
                s[i] = row[-1]
            w = [int(q[i]) + sum(int(M[i][j]) * s[j] for j in F) for i in range(len(M))]
            if min(s) >= 0 and min(w) >= 0:
                return s
    raise AssertionError("no active set solves the problem")


def eliminated(rows):
    """Gauss and Jordan, in place; whether the matrix, positive semi-definite, has full rank."""
    for k, row in enumerate(rows):
        if row[k] == 0:
            return False
        row[:] = [x / row[k] for x in row]
        for other in rows:
            if other is not row:
                other[:] = [x - other[k] * y for x, y in zip(other, row, strict=True)]
    return True


WAYS = ["numbers", "sets", "tensors", "search"]


@pytest.fixture(params=WAYS)
def solve(request, monkeypatch):
    """The solver that may look, by numbers and by tensors, and the one that may not, by all sets and by search."""
    if request.param == "search":
        monkeypatch.setattr(lcp, "_ALL_SETS_TO", 0)
    if request.param == "tensors":
        monkeypatch.setattr(lcp, "_TENSORS_FROM", 0)
    return partial(linear_complementarity, solver="device" if request.param in ("sets", "search") else "host")


@pytest.mark.parametrize("solve", WAYS, indirect=True)
def test_exact_fractions(solve):
    @given(integers())
    def check(problem):
        A, x = problem
        M, q = A @ A.T, x @ A.T
        scale = 2.0 ** max(int(M.max()), 1).bit_length()  # a power of two, so that no entry is rounded
        order = 2.0 ** max(int(abs(q).max()), 1).bit_length()
        s = solve(torch.from_numpy(M / scale), torch.from_numpy(q / order))
        rows = torch.from_numpy(A / scale**0.5)
        limit = 512 * eps() / least_singular_value(rows) ** 2
        for found, offset in zip(s, q, strict=True):
            expected = torch.tensor([float(y) for y in solved_exactly(M, offset)], dtype=torch.float64)
            check_within(found @ rows, expected * scale / order @ rows, limit)

    check()


def nearly_opposite(angle):
    """Rows of which two cancel but for an angle, and the exact projection of the third one."""
    N = torch.tensor([[1, angle, 0], [-1, angle, 0], [0, -1, 0.5]], dtype=torch.float64)
    return torch.nn.functional.normalize(N), torch.tensor([0, 0, 0.2**0.5], dtype=torch.float64)


@pytest.mark.parametrize("angle", [1e-3, 1e-4, 1e-5, 1e-6])
def test_condition_numbers_up_to_1e12(angle, solve):
    N, expected = nearly_opposite(angle)
    s = solve(N @ N.T, (N[2] @ N.T).unsqueeze(0), torch.tensor([[True, True, False]]))
    check_within(N[2] + s[0] @ N, expected, eps() / angle**2)


def problem(m, dependent=False, seed=0):
    A = torch.randn(m, m + 3, generator=torch.Generator().manual_seed(seed + m), dtype=torch.float64)
    A = torch.nn.functional.normalize(A - 1.2 * A.mean(0))
    if dependent:
        A = torch.cat([A[:-2], -A[:1], torch.zeros_like(A[:1])])
    return A @ A.T, ~torch.eye(m, dtype=torch.bool)


@pytest.mark.parametrize("dependent", [False, True])
@pytest.mark.parametrize("m", [3, 4, 5, 6])
def test_derivatives_are_those_of_the_search(m, dependent, solve, monkeypatch):
    M, allowed = problem(m, dependent)

    def product(M, solve=linear_complementarity):
        return M @ solve(M, M, allowed).mT

    found, tangent = torch.func.jvp(partial(product, solve=solve), (M,), (M @ M,))
    gradient = torch.func.grad(lambda M: product(M, solve)[0].sum())(M)
    monkeypatch.undo()
    monkeypatch.setattr(lcp, "_TENSORS_FROM", 0)
    expected, slope = torch.func.jvp(product, (M,), (M @ M,))
    torch.testing.assert_close((found, tangent), (expected, slope), rtol=1e-9, atol=1e-11)
    if not dependent:  # else the multipliers that are not constant are others
        expected = torch.func.grad(lambda M: product(M)[0].sum())(M)
        torch.testing.assert_close(gradient, expected, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("poison", [torch.nan, torch.inf, -torch.inf])
def test_what_is_not_finite_stays_in_its_own_problem(poison, solve):
    M, allowed = problem(4)
    expected = solve(M, M, allowed)
    for entry in (1, 3):
        q = M.clone()
        q[1, entry] = poison
        s = solve(M, q, allowed)
        assert s[1].isnan().all()
        torch.testing.assert_close(s[[0, 2, 3]], expected[[0, 2, 3]])
    assert solve(M.index_fill(0, torch.tensor(2), poison), M, allowed).isnan().all()


class Launches(TorchDispatchMode):
    """Names of what is computed, views not counted."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if not func.is_view:
            self.names.append(func._schema.name)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("m", [3, 6])
def test_on_the_device_no_value_is_read_and_little_is_launched(m):
    M, allowed = problem(m)
    with Launches() as launches:
        linear_complementarity(M, M, allowed, "device")
    assert len(launches.names) <= 30
    assert "aten::_local_scalar_dense" not in launches.names


def test_all_sets_trace_batch_and_compile():
    pairs = [problem(4, seed=10 * seed) for seed in range(3)]
    M, free = (torch.stack(x).unsqueeze(1) for x in zip(*pairs, strict=True))
    loop = [solve_by_active_sets(x, x, y) for x, y in zip(M, free, strict=True)]
    expected = tuple(torch.stack(x) for x in zip(*loop, strict=True))
    batched = torch.vmap(lambda M, free: solve_by_active_sets(M, M, free))
    torch.testing.assert_close(batched(M, free), expected)
    torch._dynamo.reset()
    torch.testing.assert_close(torch.compile(batched, fullgraph=True, backend="aot_eager")(M, free), expected)
