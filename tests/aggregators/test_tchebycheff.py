"""Tchebycheff: a loop over the objectives, its subgradients, and the limit of the smooth one."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scalarizations import LOSSES, calls, check_direction, check_slopes, check_transforms, hidden

from functional_jd.aggregators.stch import stch
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


@given(numbers)
def test_it_is_the_limit_of_the_smooth_one_also_where_objectives_are_equally_bad(losses):
    losses = torch.tensor(losses, dtype=torch.float64)
    torch.testing.assert_close(calls(tchebycheff(), [losses])[0], calls(stch(1e-3), [losses])[0])


def test_the_direction_is_the_gradient():
    u, z = torch.tensor(U, dtype=torch.float64), torch.tensor(Z, dtype=torch.float64)
    check_direction(tchebycheff(), lambda losses: losses.max() / 3)
    check_direction(tchebycheff(U, Z), lambda losses: (u * (losses - z)).max())
    check_slopes(tchebycheff(U, Z), lambda losses: (u * (losses - z)).max(), LOSSES[1])


def test_composes_with_every_transform():
    check_transforms(tchebycheff(U, Z))


def test_a_loss_that_is_nan_is_not_hidden():
    assert not hidden(tchebycheff(), torch.tensor([1.0, math.nan, 2.0], dtype=torch.float64))


@pytest.mark.parametrize("wrong", [{"weights": [1.0, -1.0, 1.0]}, {"reference": [0.0, math.inf, 0.0]}])
def test_what_belongs_to_objectives_is_checked(wrong):
    with pytest.raises(ValueError, match=f"tchebycheff: {next(iter(wrong))} must"):
        tchebycheff(**wrong)
    with pytest.raises(ValueError, match="tchebycheff: reference must be one per row, found 2 and 3 rows"):
        calls(tchebycheff(reference=[1.0, 2.0]), LOSSES)
