"""The table of fronts: its problems have the fronts of the literature, and a few steps fill it."""

import math

import fronts_problems
import fronts_table
import pytest
import torch

# The area between front and reference, by hand.
WHOLE = {"ZDT1": 0.1 + 2 / 3 + 0.11, "ZDT2": 0.1 + 1 / 3 + 0.11}


@pytest.mark.parametrize("name", WHOLE)
def test_the_hypervolume_of_a_whole_front_is_that_area(name):
    assert fronts_problems.PROBLEMS[name]().whole == pytest.approx(WHOLE[name], abs=1e-3)


@pytest.mark.parametrize("first", [-2.0, 0.0, 1.5])
def test_optimal_parameters_are_on_the_front(first):
    t = 1 / (1 + math.exp(-first))
    best = torch.full((fronts_problems.SIZE,), -60.0, dtype=torch.float64)
    best[0] = first
    fronts = {"ZDT1": 1 - math.sqrt(t), "ZDT2": 1 - t**2, "ZDT3": 2 - math.sqrt(t) - t * math.sin(10 * math.pi * t)}
    for name, second in fronts.items():
        assert fronts_problems.PROBLEMS[name]().losses(best).tolist() == pytest.approx([t, second])
    ball = torch.zeros(fronts_problems.SIZE, dtype=torch.float64)  # half of each range
    ball[:2] = torch.tensor([first, 0.3])
    assert float(fronts_problems.dtlz2(ball).norm()) == pytest.approx(1)


def test_models_that_say_nothing_have_the_losses_of_that():
    fair, digits = fronts_problems.PROBLEMS["fairness"](), fronts_problems.PROBLEMS["beta-VAE"]()
    nothing = fair.losses(torch.zeros(fair.size))  # one half for everyone
    assert nothing.tolist() == pytest.approx([math.log(2), 0], abs=1e-6)
    coded = torch.zeros(digits.size)
    assert digits.losses(coded).tolist() == pytest.approx([1, 0], abs=1e-6)  # the mean digit, and no code


@pytest.mark.parametrize("method", ["hypervolume gradient", "EPO"])
def test_a_few_steps_fill_the_table(method, monkeypatch):
    monkeypatch.setattr(fronts_table, "STEPS", 4)
    monkeypatch.setattr(fronts_table, "has_peer", lambda: False)
    _, _, line = fronts_table.worth_lines(["VLMOP2"], [method])
    cells = [cell.strip() for cell in line.split("|")[1:-1]]
    assert cells[:2] == ["VLMOP2", method]
    # A step of EPO takes the gradients of both losses.
    assert 0 < float(cells[2]) < 100
    assert (float(cells[2]) < float(cells[4])) == (method == "EPO")
    assert cells[3] == cells[5] == cells[7] == "-"


def test_a_budget_of_gradients_buys_fewer_steps_where_each_takes_more(monkeypatch):
    monkeypatch.setattr(fronts_table, "STEPS", 6)
    problem = fronts_problems.PROBLEMS["ZDT1"]()._replace(whole=1.21)
    falling = [torch.tensor([[1.0 - 0.1 * step, 1.0]]) for step in range(6)]
    found = [fronts_table.share(problem, [fronts_table.Outcome(falling, [], cost)], 6) for cost in (1, 2, 3)]
    expected = [f"{(1.1 - last) * 0.1 / 1.21 * 100:.1f}" for last in (0.5, 0.8, 0.9)]
    assert found == expected
    assert fronts_table.share(problem, [fronts_table.Outcome(falling, [], 3)]) == expected[0]
    assert fronts_table.share(problem, []) == "-"
