"""Tchebycheff: a loop over the objectives, its subgradients, and the limit of the smooth one."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scalarizations import LOSSES, calls, check_direction, check_slopes

from functional_jd.aggregators.tchebycheff import tchebycheff, value

U, Z = [0.25, 0.5, 1.0], [0.125, -0.5, 0.25]
numbers = st.lists(st.integers(-4, 4).map(float), min_size=3, max_size=3)


@given(numbers, numbers)
def test_equal_to_a_loop_over_the_objectives(losses, reference):
    sizes = [u * (loss - z) for u, loss, z in zip(U, losses, reference, strict=True)]  # exact
    worst = [size == max(sizes) for size in sizes]
    weights, _ = calls(tchebycheff(U, reference), [torch.tensor(losses, dtype=torch.float64)])
    assert weights[0].tolist() == pytest.approx([u * w / sum(worst) for u, w in zip(U, worst, strict=True)])
    found = value(torch.tensor(losses), torch.tensor(U), torch.tensor(reference))
    assert found.item() == max(sizes)


def test_the_direction_is_the_gradient():
    u, z = torch.tensor(U, dtype=torch.float64), torch.tensor(Z, dtype=torch.float64)
    check_direction(tchebycheff(), lambda losses: losses.max() / 3)
    check_direction(tchebycheff(U, Z), lambda losses: (u * (losses - z)).max())
    check_slopes(tchebycheff(U, Z), lambda losses: (u * (losses - z)).max(), LOSSES[1])
