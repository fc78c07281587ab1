"""Constant: the gradient of the weighted sum of the losses."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from functional_jd.aggregation.aggregate import aggregate
from functional_jd.aggregators.constant import constant

integers = st.integers(-9, 9).map(float)


@given(
    st.lists(
        st.tuples(integers, st.lists(integers, min_size=3, max_size=3)),
        min_size=1,
        max_size=6,
    )
)
def test_the_direction_is_the_weighted_sum_of_the_rows(weighted):
    weights, rows = [w for w, _ in weighted], [row for _, row in weighted]
    expected = [sum(w * x for w, x in zip(weights, column, strict=True)) for column in zip(*rows, strict=True)]
    for given_weights in (weights, tuple(weights), torch.tensor(weights), torch.tensor(weights, dtype=torch.float16)):
        direction = aggregate(constant(given_weights), torch.tensor(rows)).direction
        torch.testing.assert_close(direction, torch.tensor(expected))


def test_the_derivative_with_respect_to_the_weights_is_the_jacobian():
    J = torch.tensor([[1.0, 2, 3], [-4, 5, 6]])
    f = lambda weights: aggregate(constant(weights), J).direction
    torch.testing.assert_close(torch.func.jacrev(f)(torch.tensor([0.3, 0.7])), J.T)
    torch.testing.assert_close(torch.func.jvp(f, (torch.ones(2),), (torch.tensor([0.0, 1]),))[1], J[1])
    weights = torch.tensor([0.3, 0.7], requires_grad=True)
    f(weights).sum().backward()
    torch.testing.assert_close(weights.grad, J.sum(1))
