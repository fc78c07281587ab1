"""EPO: its programs solved by SciPy."""

import numpy as np
import pytest
import torch
from bounds import eps, half_the_digits
from scipy.optimize import linprog

import functional_jd as jd


def expected_gain(L, G, u, tolerance=1e-4):
    """The programs of the paper: gains, constraints and the best value, or None where nothing is allowed."""
    m, weighted = len(L), u * L
    shares = weighted / weighted.sum()
    mu = np.sum(shares * np.log(m * shares))
    a = u * (np.log(m * shares) - mu)
    pull, more = G @ a, []
    if mu > tolerance:
        gains, least = pull, np.zeros(m)
        if (pull > 0).any():
            least = np.where(pull > 0, -np.inf, pull)
            least[weighted.argmax()] = 0
    else:
        gains, least = G.sum(0), np.zeros(m)
        more = [(-pull, -min(0, pull.max()))]
    more += [(-row, -bound) for row, bound in zip(G, least, strict=True) if bound > -np.inf]
    rows, limits = np.array([row for row, _ in more]), np.array([limit for _, limit in more])
    found = linprog(-gains, A_ub=rows, b_ub=limits, A_eq=np.ones((1, m)), b_eq=[1], bounds=(0, None))
    return gains, rows, limits, -found.fun if found.status == 0 else None


@pytest.mark.parametrize("near", [False, True])
@pytest.mark.parametrize("m", [2, 3, 5, 8])
def test_weights_are_as_good_as_scipys_and_allowed(m, near):
    random, compared = np.random.default_rng(m), 0
    for _ in range(15):
        J, u = random.normal(size=(m, 6)), random.dirichlet(np.ones(m)) + 1e-2
        L = (1 + 1e-4 * random.normal(size=m)) / u if near else random.uniform(0.01, 3, m)
        G = J @ J.T
        w = jd.aggregate(jd.epo(u.tolist()), torch.tensor(J), losses=torch.tensor(L)).weights.numpy()
        gains, rows, limits, best = expected_gain(L, G, u)
        assert w.min() >= -64 * m * eps()
        assert w.sum() == pytest.approx(1, abs=64 * m * eps())
        if best is not None:
            compared += 1
            assert (rows @ w - limits).max() <= half_the_digits(np.abs(G).max())
            assert gains @ w == pytest.approx(best, abs=half_the_digits(np.abs(gains).max()))
    assert compared >= 10


@pytest.mark.parametrize("solver", ["host", "device"])
def test_the_search_ends_for_many_nearly_dependent_rows(solver):
    """Rounding makes an objective that is done look as if it could gain: the search went round between two of them."""
    for seed in range(5):
        J, L = (torch.from_numpy(x) for x in nearly_dependent(128, 1e7, seed))
        w = jd.aggregate(jd.epo([1 / 128] * 128, solver=solver), J, losses=L).weights
        gains, rows, limits, best = expected_gain(L.numpy(), (J @ J.mT).numpy(), np.full(128, 1 / 128))
        assert (rows @ w.numpy() - limits).max() <= half_the_digits(1.0)
        assert gains @ w.numpy() == pytest.approx(best, abs=half_the_digits(np.abs(gains).max()))


def nearly_dependent(m, condition, seed):
    draw = np.random.default_rng(seed)
    left, right = (np.linalg.qr(draw.normal(size=(m, m)))[0] for _ in range(2))
    return left * condition ** -np.linspace(0, 1, m) @ right, draw.uniform(size=m)


def test_losses_of_zero_are_in_proportion():
    J = torch.eye(2).double()
    done = jd.aggregate(jd.epo([0.5, 0.5]), J, losses=torch.zeros(2)).weights  # in proportion: all may fall
    assert done.sum() == pytest.approx(1)
