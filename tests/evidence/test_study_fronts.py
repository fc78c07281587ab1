"""Fronts in the study: what is trained is what is said, and measures are those of a brute force."""

import pytest
import torch
from problems_development import beta_vae
from study_fronts import (
    RATES,
    area,
    beside_sums,
    front_cell,
    on_the_front,
    preferences,
    sizes,
    utility,
    worth,
)
from study_rules import methods_for
from study_training import draws_of, train
from tiny_problem import tiny


def stored(validation, test):
    """A cell of candidates `[c][d][2]` whose scores are the same at all moments."""
    return {
        "candidates": [{"preference": i, "rate": RATES[i % len(RATES)]} for i in range(len(validation))],
        "front": {"validation": [validation] * 3, "test": [test] * 3},
        "passes": 1,
    }


def test_a_candidate_is_the_training_of_its_preference_and_rate():
    """One of the 55 in both draws, beside a training of its own on losses that are weighted by hand."""
    problem = tiny()
    draws = draws_of(problem, 2)
    cell = front_cell(problem, "sums", draws, 40)
    validation, test = (torch.tensor(cell["front"][split]) for split in ("validation", "test"))
    assert validation.shape == test.shape == (3, 55, 2, 2)
    place = next(i for i, c in enumerate(cell["candidates"]) if c == {"preference": 3, "rate": 0.016})
    weights = 2 * draws.standard * preferences()[3]  # `mean` halves the sum
    given = draws, torch.full((1, 2), 0.016), weights[None], 40
    alone = train(problem, methods_for(2)["mean"], *given, whole=True)
    for moment, steps in enumerate((10, 20, 40)):
        short = alone.parts[steps - 1, 0]
        torch.testing.assert_close(test[moment, place], short, rtol=1e-3, atol=1e-3)
        torch.testing.assert_close(
            validation[moment, place], alone.validation_parts[steps - 1, 0], rtol=1e-3, atol=1e-3
        )


def test_the_area_is_what_points_dominate():
    """Beside a count of 10^6 random points, which has a deviation of 5e-4."""
    g = torch.Generator().manual_seed(0)
    points = torch.rand(12, 2, generator=g, dtype=torch.float64)
    anywhere = torch.rand(1_000_000, 2, generator=g, dtype=torch.float64)
    count = (anywhere[:, None] <= points).all(-1).any(1).double().mean()
    assert abs(area(points) - count) < 3e-3
    expected = [not any(bool((q >= p).all() and (q > p).any()) for q in points) for p in points]
    assert on_the_front(points).tolist() == expected


def test_validation_chooses_and_test_is_shown():
    """The first candidate is best on test and worst on validation: it counts for nothing."""
    validation = [[[0.1, 0.1]], [[0.2, 0.8]], [[0.6, 0.5]]]
    cell = stored(validation, [[[1.0, 1.0]], [[0.5, 0.5]], [[0.75, 0.25]]])
    assert worth(cell).item() == 0.5 * 0.5 + 0.25 * 0.25
    # w = 0, 1/20, ... weighs the first score: 0.2 w + 0.8 (1 - w) > 0.6 w + 0.5 (1 - w) below w = 3/7.
    expected = sum(0.5 if w < 3 / 7 else 0.75 * w + 0.25 * (1 - w) for w in (i / 20 for i in range(21))) / 21
    torch.testing.assert_close(utility(cell), torch.tensor([expected], dtype=torch.float64))
    assert sizes(cell) == (2.0, 0.0)  # the rates of these two lie inside of the grid


def test_a_single_solution_stands_beside_the_front_of_sums():
    sums = stored([[[0.5, 0.5]] * 3], [[[0.5, 0.5]] * 3])
    single = torch.tensor([[0.4, 0.4], [0.75, 0.25], [0.5, 0.4]], dtype=torch.float64)
    behind, more = beside_sums(sums, single)
    assert behind.tolist() == [True, False, False]
    torch.testing.assert_close(more, torch.tensor([0.0, 0.25 * 0.25, 0.0], dtype=torch.float64))


def test_a_code_is_drawn_and_costs_its_divergence_in_nats():
    """Beside torch.distributions; without noise, the decoder gets the mean."""
    problem = beta_vae()
    params = problem.init(torch.Generator().manual_seed(0))
    data = problem.data(0)
    assert len(data.train[0]) == 8 * 1079
    assert data.train[1].shape[1] == 4
    assert abs(data.train[1].std() - 1) < 0.02
    x, noise = (column[:50] for column in data.test)
    hidden = torch.tanh(x @ params["to_w0"] + params["to_b0"])
    mean, log_variance = (hidden @ params["to_w1"] + params["to_b1"]).chunk(2, 1)
    code = torch.distributions.Normal(mean, (log_variance / 2).exp())
    nats = torch.distributions.kl_divergence(code, torch.distributions.Normal(0.0, 1.0)).sum(1).mean()
    again = torch.tanh((mean + code.scale * noise) @ params["from_w0"] + params["from_b0"])
    again = again @ params["from_w1"] + params["from_b1"]
    expected = torch.stack([(again - x).square().mean(), nats])
    torch.testing.assert_close(problem.losses(params, x, noise), expected)
    assert problem.scores(params, x, noise)[1].item() == pytest.approx(
        1 - nats.item() / 20, abs=8 * torch.finfo(torch.float32).eps
    )
