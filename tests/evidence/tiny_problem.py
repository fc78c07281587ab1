"""A problem so small that tests train it."""

import torch
from study_problem import Problem, apply, explained, network, splits
from study_training import draws_of

FIRST_UNIT = 1e-6


def tiny() -> Problem:
    """Two columns of a line, the first in a unit of 1e-6; thirty points, other ones in every draw."""

    def data(draw: int):
        x = torch.rand(50, 1, generator=torch.Generator().manual_seed(draw))
        return splits((x, torch.cat([x, 1 - x], dim=1)), draw)

    units = torch.tensor([FIRST_UNIT, 1.0])
    return Problem(
        data,
        lambda g: network(g, 1, 4, 2),
        lambda params, x, y: units * (apply(params, x) - y).square().mean(0),
        lambda x, y: units * y.var(0),
        lambda params, x, y: explained(apply(params, x), y),
        ("first", "second"),
        m=2,
        batch=8,
        steps=30,
        draws=2,
    )


PROBLEM = tiny()
DRAWS = draws_of(PROBLEM, 2)
RATES = torch.tensor([[0.01, 0.02], [0.03, 0.04]])
