"""Mean: the gradient of the mean of the losses."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from functional_jd.aggregation.aggregate import aggregate
from functional_jd.aggregators.mean import mean


@given(st.lists(st.lists(st.integers(-9, 9).map(float), min_size=3, max_size=3), min_size=1, max_size=6))
def test_the_direction_is_the_mean_of_the_rows(rows):
    expected = [sum(column) / len(rows) for column in zip(*rows, strict=True)]
    torch.testing.assert_close(aggregate(mean(), torch.tensor(rows)).direction, torch.tensor(expected))


def test_the_direction_is_the_gradient_of_the_mean_of_the_losses():
    losses = lambda x: torch.stack([x.square().sum(), x.sin().sum(), x.prod()])
    x = torch.tensor([0.3, -1.2, 2.0])
    direction = aggregate(mean(), torch.func.jacrev(losses)(x)).direction
    torch.testing.assert_close(direction, torch.func.grad(lambda x: losses(x).mean())(x))


def test_weights_are_float64_and_sum_to_one():
    weights = aggregate(mean(), torch.ones(7, 2, dtype=torch.bfloat16)).weights
    assert weights.dtype == torch.float64
    torch.testing.assert_close(weights, torch.tensor([1 / 7] * 7, dtype=torch.float64))


def test_composes_with_every_transform():
    f = lambda J: aggregate(mean(), J).direction
    J = torch.arange(24.0).view(4, 3, 2)
    expected = J.sum(1) / 3
    torch.testing.assert_close(torch.vmap(f)(J), expected)
    torch._dynamo.reset()
    torch.testing.assert_close(torch.compile(torch.vmap(f), fullgraph=True, backend="aot_eager")(J), expected)
    grad = torch.func.grad(lambda J: f(J).sum())
    torch.testing.assert_close(torch.vmap(grad)(J), torch.full_like(J, 1 / 3))
    torch.testing.assert_close(torch.func.jvp(f, (J[0],), (J[1],))[1], expected[1])
