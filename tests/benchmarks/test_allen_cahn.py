"""The reference for Allen and Cahn's equation: it agrees with a finer one, and solves the equation."""

import allen_cahn
import pytest
import torch


def points(count, seed=0):
    """So many of (t, x), uniformly."""
    x = torch.rand(count, 2, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return x * torch.tensor([1.0, 2.0]) - torch.tensor([0.0, 1.0])


def test_half_the_step_and_twice_the_points_change_a_millionth():
    x = points(500)
    found = allen_cahn.solution(x)
    for finer in (allen_cahn.solve(2048, 1000), allen_cahn.solve(4096, 500)):
        assert (finer.at(x) - found).norm() < 1e-6 * found.norm()


def test_the_error_of_a_step_is_of_fourth_order():
    x = points(300)
    x[:, 0] = 1  # between two steps there is an error of interpolation too
    coarse, fine, exact = (allen_cahn.solve(256, steps).at(x) for steps in (40, 80, 1000))
    assert (coarse - exact).norm() / (fine - exact).norm() == pytest.approx(16, rel=0.2)


def test_differences_of_the_solution_satisfy_the_equation():
    x, h = points(200) * 0.98 + torch.tensor([0.01, 0.0]), 1e-4
    t_step, x_step = torch.tensor([h, 0.0]).double(), torch.tensor([0.0, h]).double()
    u = allen_cahn.solution(x)
    slope = (allen_cahn.solution(x + t_step) - allen_cahn.solution(x - t_step)) / (2 * h)
    bend = (allen_cahn.solution(x + x_step) - 2 * u + allen_cahn.solution(x - x_step)) / h**2
    terms = slope, -1e-4 * bend, 5 * u**3 - 5 * u
    assert sum(terms).abs().max() < 1e-3 * max(term.abs().max() for term in terms)


def test_it_starts_exactly_and_is_periodic_and_even():
    x = points(50)
    start = torch.stack([torch.zeros(50).double(), x[:, 1]], dim=1)
    torch.testing.assert_close(allen_cahn.solution(start), x[:, 1] ** 2 * torch.cos(torch.pi * x[:, 1]))
    for other in (x + torch.tensor([0.0, 2.0]), x * torch.tensor([1.0, -1.0])):
        torch.testing.assert_close(allen_cahn.solution(other), allen_cahn.solution(x))
