"""Solving by products: non-negative least squares, the conditions themselves, and what it costs in memory."""

import numpy as np
import torch
from bounds import check_within, projection_bound
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from scipy.optimize import nnls
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from functional_jd.solvers import by_products as products
from functional_jd.solvers.by_products import solve_by_products

TOLERANCE = 1e-13


def unit_rows(m, n, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.nn.functional.normalize(torch.randn(m, n, generator=generator, dtype=torch.float64), dim=1)


def found_for(A, x, allowed=None):
    """The rows and vectors as one batch of one matrix."""
    q = (x @ A.mT).unsqueeze(0)
    free = torch.ones_like(q, dtype=torch.bool) if allowed is None else allowed.unsqueeze(0)
    found = solve_by_products((A @ A.mT).unsqueeze(0), q, free, TOLERANCE)
    return products.Found(*(field[0] for field in found))


@given(
    hnp.arrays(
        np.float64,
        st.tuples(st.integers(1, 8), st.integers(1, 8)),
        elements=st.integers(-3, 3).map(float),
    ).map(torch.from_numpy)
)
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


def test_what_is_not_allowed_stays_zero():
    A = unit_rows(12, 20)
    allowed = ~torch.eye(12, dtype=torch.bool)
    found = found_for(A, A, allowed)
    assert found.solved.all()
    assert (found.s[~allowed] == 0).all()
    assert found.s.count_nonzero() > 0


def test_what_is_not_finite_changes_no_other_problem():
    A, x = unit_rows(10, 16), unit_rows(4, 16, seed=1)
    expected, x[1, 3] = found_for(A, x), torch.nan
    found = found_for(A, x)
    assert found.solved.all()
    kept = [0, 2, 3]
    torch.testing.assert_close(found.s[kept], expected.s[kept], rtol=0, atol=projection_bound(A, expected.s[0]))


class Largest(TorchDispatchMode):
    """The number of elements of the largest tensor that is made."""

    def __init__(self):
        super().__init__()
        self.numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        made = [x.numel() for x in tree_leaves(result) if isinstance(x, torch.Tensor)]
        self.numel = max([self.numel, *made])
        return result


def test_no_problem_has_a_matrix_of_its_own():
    A = unit_rows(40, 80)
    with Largest() as made:
        assert found_for(A, A).solved.all()
    assert made.numel <= 40 * 80
