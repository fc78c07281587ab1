"""Damped systems against NumPy, degenerate ones against the ridge that is promised; derivatives and transforms."""

import numpy as np
import pytest
import torch
from bounds import check_stable, check_within, eps
from hypothesis import given
from hypothesis import strategies as st
from torch.func import grad, jacfwd, jacrev, vmap

from functional_jd.solvers.damped import damped_solve
from functional_jd.testing.strategies import gramians


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@given(gramians((1, 6), (1, 6), wide=False), st.integers(-12, 6))
def test_numpy_has_the_same_solution(G, exponent):
    damping, b = 2.0**exponent, torch.arange(1.0, len(G) + 1, dtype=torch.float64)
    x = damped_solve(G, b, damping)
    expected = np.linalg.solve(G.numpy() + damping * np.eye(len(G)), b.numpy())
    condition = (G.trace() + damping) / damping
    check_within(x, torch.from_numpy(expected), 64 * len(G) ** 2 * eps() * condition * b.norm() / damping)


@given(gramians((2, 5), 1))
def test_without_damping_a_degenerate_matrix_has_a_solution_still(G):
    """Of a right-hand side in the range, up to the ridge."""
    b = G.sum(1)
    x = damped_solve(G, b, 0.0)
    assert x.isfinite().all()
    size = G.diagonal().max()
    check_within(G @ x, b, 1e3 * len(G) ** 3 * eps() * size)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
@pytest.mark.parametrize("where", ["matrix", "last entry", "b", "damping"])
def test_what_is_not_finite_gives_nan_everywhere(where, bad):
    G, b, damping = torch.eye(3, dtype=torch.float64), torch.ones(3, dtype=torch.float64), torch.tensor(1.0).double()
    if where == "matrix":
        G[0, 1] = G[1, 0] = bad
    elif where == "last entry":
        G[2, 2] = bad
    elif where == "b":
        b[1] = bad
    else:
        damping = damping * bad
    found = damped_solve(G, b, damping)
    assert not found.isfinite().all()
    if where != "b":
        assert found.isnan().all()


def test_derivatives_are_those_of_finite_differences():
    J, b, damping = normal(3, 4), normal(3, seed=1), torch.tensor(0.5, dtype=torch.float64)
    f = lambda J, b, damping: damped_solve(J @ J.mT, b, damping)
    inputs = [x.clone().requires_grad_() for x in (J, b, damping)]
    assert torch.autograd.gradcheck(f, inputs, check_forward_ad=True)
    assert torch.autograd.gradgradcheck(f, inputs)
    for argument in range(3):
        check_stable(jacfwd(f, argument)(J, b, damping), jacrev(f, argument), J, b, damping)


def test_a_batch_is_the_loop_and_compiles_with_its_derivatives():
    batch = torch.stack([normal(3, 3, seed=seed) @ normal(3, 3, seed=seed).T for seed in range(3)])
    b, dampings = normal(3), torch.tensor([0.25, 1.0, 4.0], dtype=torch.float64)
    f = lambda G, damping: damped_solve(G, b, damping)
    loop = lambda batch, dampings: torch.stack([f(*at) for at in zip(batch, dampings, strict=True)])
    check_stable(vmap(f)(batch, dampings), loop, batch, dampings)
    both = vmap(grad(lambda G, damping: f(G, damping).square().sum(), argnums=(0, 1)))
    torch.compiler.reset()
    compiled = torch.compile(both, fullgraph=True, backend="aot_eager")
    check_stable(compiled(batch, dampings), both, batch, dampings)
