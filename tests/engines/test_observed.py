"""Observations of rows: which rows did not overflow."""

import pytest
import torch

import functional_jd as jd

SGD = jd.sgd(1.0)


def step_of(sizes, scale, view):
    """A step along rows of one entry each, of these sizes in float64, by weights that are known."""
    weights = torch.ones(len(sizes), dtype=torch.float64)
    rule = jd.stateless(view, lambda _: weights)
    params = torch.zeros(len(sizes), dtype=torch.float64)
    state = jd.TrainState(params, (), SGD.init(params), (), scale)
    losses = lambda params: params * torch.tensor(sizes, dtype=torch.float64)
    return jd.step(state, losses=losses, aggregator=rule, optimizer=SGD, engine="jacobian")


@pytest.mark.parametrize("view", [jd.views.gramian, jd.views.norms])
@pytest.mark.parametrize("shape", [(), (2,)])
def test_squares_of_scaled_rows_in_float64_overflow_and_say_nothing_of_the_rows(view, shape):
    scale = jd.scale_state(2.0**16, shape=shape)
    after, info = step_of([1e150, 3.0], scale, view)  # the square of the first is 1e300, and scaled above 1.8e308
    assert info.finite.all()
    assert info.moved
    assert torch.equal(after.params, -torch.tensor([1e150, 3.0], dtype=torch.float64))
    assert torch.equal(after.scale.scale, scale.scale)


@pytest.mark.parametrize("view", [jd.views.gramian, jd.views.norms])
@pytest.mark.parametrize("shape", [(), (2,)])
def test_scaled_rows_in_float64_that_overflow_skip_the_step(view, shape):
    after, info = step_of([1e305, 3.0], jd.scale_state(2.0**16, shape=shape), view)
    assert torch.equal(info.finite, torch.tensor([False, True] if shape else False))
    assert not info.moved
    assert not after.params.any()
    assert torch.equal(after.scale.scale, torch.where(info.finite, 2.0**16, 2.0**15))
