"""Natural gradients against least squares by SVD, their invariances, and degenerate Gramians."""

from functools import partial

import numpy as np
import pytest
import torch
from bounds import check_within, eps
from hypothesis import given
from hypothesis import strategies as st
from sequences import random_rows

import functional_jd as fj
from functional_jd.testing.strategies import jacobians


def direction(J, r, damping, **how):
    return fj.aggregate(fj.natural_gradient(damping, **how), J, losses=r).direction


def least_squares(J, r, damping):
    """Minimize `|J d - r|^2 + damping |d|^2` in the space of parameters, by SVD of the Jacobian itself."""
    ridge = damping**0.5 * torch.eye(J.shape[1], dtype=J.dtype)
    system, right = torch.cat([J, ridge]), torch.cat([r, r.new_zeros(J.shape[1])])
    return torch.linalg.lstsq(system, right.unsqueeze(1), rcond=1e-13, driver="gelsd").solution.squeeze(1)


def damped_bound(J, r, damping):
    """The weights are off by the condition of the damped Gramian, the direction by as much times the rows."""
    condition = (J.square().sum() + damping) / damping
    return 64 * sum(J.shape) ** 2 * eps() * condition * J.norm() * r.norm() / damping


@given(jacobians((1, 6), (1, 6), wide=False), st.integers(-8, 8), st.integers(0, 99))
def test_equal_to_damped_least_squares(J, exponent, seed):
    damping, r = 4.0**exponent, random_rows(len(J), seed=seed)
    check_within(direction(J, r, damping), least_squares(J, r, damping), damped_bound(J, r, damping))


@given(jacobians((1, 6), (1, 6), wide=False), st.integers(0, 99))
def test_without_damping_the_solution_of_least_norm(J, seed):
    """Of every rank: more residuals than parameters, fewer, dependent ones, none that depends on any."""
    r = random_rows(len(J), seed=seed)
    check_within(direction(J, r, 0), torch.linalg.pinv(J, rtol=1e-10) @ r, undamped_bound(J, r))


def undamped_bound(J, r):
    """The same with the least singular value, squared, in the place of the damping."""
    kept = torch.linalg.svdvals(J)
    kept = kept[kept > 1e-10 * kept.max()]
    condition = float((kept.max() / kept.min()) ** 2 / kept.min()) if len(kept) else 1.0
    return 256 * sum(J.shape) ** 2 * eps() * condition * max(J.norm(), 1) * r.norm()


def test_one_step_solves_linear_least_squares():
    A, y = random_rows(20, 4), random_rows(20, seed=1)
    params = {"w": random_rows(4, seed=2)}
    losses = fj.per_example(lambda p, a, y: a @ p["w"] - y)
    expected = torch.linalg.lstsq(A, y.unsqueeze(1)).solution.squeeze(1)
    for engine in ("gramian", "jacobian", "auto"):
        how = {"losses": losses, "aggregator": fj.natural_gradient(0), "optimizer": fj.sgd(1.0), "engine": engine}
        state, _ = fj.step(fj.train_state(params, A, y, **how), A, y, **how)
        check_within(state.params["w"], expected, undamped_bound(A, A @ params["w"] - y))


def test_relative_damping_is_a_fraction_of_the_largest_eigenvalue_and_knows_no_unit():
    J, r = random_rows(4, 6), random_rows(4, seed=1)
    damping = float(0.1 * torch.linalg.svdvals(J)[0] ** 2)
    expected, bound = least_squares(J, r, damping), damped_bound(J, r, damping)
    for unit in (1.0, 1e-8, 1e8):
        check_within(direction(unit * J, unit * r, 0.1, relative=True), expected, bound)
    opposite = torch.tensor([[1.0, 2.0], [-1.0, -2.0]], dtype=torch.float64)
    r = torch.tensor([1.0, -1.0], dtype=torch.float64)
    found = direction(opposite, r, 0.1, relative=True)  # of the largest eigenvalue, which is 10
    expected = torch.tensor([1.0, 2.0], dtype=torch.float64) * 2 / (10 * 1.1)
    check_within(found, expected, damped_bound(opposite, r, 1.0))


@pytest.mark.parametrize("how", [{}, {"relative": True}, {"rank": 2}, {"relative": True, "rank": 2}], ids=str)
def test_derivatives_are_those_of_finite_differences(how):
    given = random_rows(3, 4), random_rows(3, seed=1), torch.tensor(0.5, dtype=torch.float64)
    given = [x.requires_grad_() for x in given]
    assert torch.autograd.gradcheck(partial(direction, **how), given, check_forward_ad=True)
    assert torch.autograd.gradgradcheck(partial(direction, **how), given)


@pytest.mark.parametrize("damping", [0, 1e-6, 1.0])
@pytest.mark.parametrize("rank", [1, 2, 4, 9])
def test_with_a_rank_the_other_singular_values_count_as_zero(rank, damping):
    """The paper's step is that with damping 0."""
    J, r = random_rows(6, 5), random_rows(6, seed=1)
    U, s, V = np.linalg.svd(J.numpy(), full_matrices=False)
    shares = np.where(np.arange(5) < rank, s / (s**2 + damping), 0)
    expected = torch.from_numpy(V.T @ (shares * (U.T @ r.numpy())))
    bound = 2**10 * eps() * float((s[0] / s[min(rank, 5) - 1]) ** 2) * float(r.norm()) / float(s[min(rank, 5) - 1])
    check_within(direction(J, r, damping, rank=rank), expected, bound)


def test_a_rank_beyond_the_rows_changes_nothing_and_ties_stay_together():
    J, r = random_rows(3, 5), random_rows(3, seed=1)
    check_within(direction(J, r, 0.5, rank=7), direction(J, r, 0.5), 2**8 * eps() * r.norm())
    r = torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64)  # of three equal singular values, none comes first
    check_within(direction(torch.eye(3).double(), r, 1.0, rank=1), r / 2, 2**8 * eps())


def by_stacked_least_squares(J, r, damping, momentum, last):
    stacked = np.vstack([J, damping**0.5 * np.eye(J.shape[1])])
    right = np.concatenate([r, damping**0.5 * momentum * last])
    return np.linalg.lstsq(stacked, right, rcond=None)[0], np.linalg.cond(stacked) ** 2  # the rule takes the Gramian


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_the_direction_with_momentum_is_that_of_least_squares(dtype):
    """Also where a parameter has as many entries as there are residuals, of which one is absent."""
    rng, damping, momentum = np.random.default_rng(0), 1e-3, 0.8
    rule, memory, last = fj.natural_gradient(damping, momentum=momentum), None, np.zeros(8)
    for k in range(4):
        J, r = (x.astype(str(dtype).removeprefix("torch.")) for x in (rng.normal(size=(4, 8)), rng.normal(size=4)))
        if k == 2:
            J[1], r[1] = 0, 0
        rows = {"a": torch.tensor(J[:, :4]), "b": torch.tensor(J[:, 4:].reshape(4, 2, 2))}
        found, _, memory = fj.aggregate(rule, rows, memory, losses=torch.tensor(r))
        last, condition = by_stacked_least_squares(J.astype(float), r.astype(float), damping, momentum, last)
        bound = (64 * eps() * condition + eps(dtype)) * np.abs(last).max()
        check_within(torch.cat([found["a"], found["b"].flatten()]), torch.tensor(last), bound)
