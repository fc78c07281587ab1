"""Public reports on float16, bfloat16, loss scales and values that are not finite: see README.md."""

from functools import partial

import pytest
import torch
from bounds import check_within, eps
from torch.nn import functional

import functional_jd as jd


def method(losses, optimizer=None, rule=None):
    return {"losses": losses, "aggregator": rule or jd.upgrad(), "optimizer": optimizer or jd.sgd(0.1)}


def test_sums_over_more_pixels_than_float16_has_numbers():
    x, y = torch.ones(1, 512, 512), torch.ones(1, 512, 512)

    def losses(p, x, y):
        scores = functional.conv2d(x[None], p["w"])[0]
        z = torch.sigmoid(scores)
        overlap = 2 * (z * y).sum() / (z.sum() + y.sum())
        return {"cross entropy": functional.binary_cross_entropy_with_logits(scores, y), "dice": 1 - overlap}

    start = {"w": torch.full((1, 1, 1, 1), 0.5)}
    values, found = jd.autocast(losses)(start, x, y), losses(start, x, y)
    for name in found:
        check_within(values[name], found[name], 8 * eps(torch.float16))
    how = method(jd.autocast(losses))
    _, info = jd.step(jd.train_state(start, x, y, scale=jd.scale_state(shape=(2,)), **how), x, y, **how)
    assert info.moved
    by_hand = method(lambda p, x: {"dice": 1 - (x * p).half().sum() / x.sum().half(), "size": p.square().sum()})
    state = jd.train_state(torch.ones(()), x, scale=jd.scale_state(shape=(2,)), **by_hand)
    with pytest.raises(jd.TrainingStalled, match="losses were not finite themselves: dice"):
        jd.fit(partial(jd.step, **by_hand), state, [(x,)] * 5, patience=3)


@pytest.mark.parametrize("scale", [None, jd.scale_state()])
def test_steps_that_are_too_long_are_left_out_and_the_scale_goes_on(scale):
    def cautious(inner, largest):
        def update(direction, state, params):
            length = jd.optimizers.global_norm(direction)
            return jd.precision.select(length < largest, inner.update(direction, state, params), (params, state))

        return jd.Optimizer(inner.init, update)

    how = method(lambda p, x: (p * x).square().sum()[None], cautious(jd.sgd(0.1), 5.0))
    state, x = jd.train_state(torch.ones(2), torch.ones(2), scale=scale, **how), torch.ones(2)
    after, _ = jd.step(state, x, **how)
    same, _ = jd.step(after, 100 * x, **how)
    again, _ = jd.step(same, x, **how)
    check_within(after.params, torch.full((2,), 0.8), 8 * eps(torch.float32))
    assert torch.equal(same.params, after.params)
    check_within(again.params, torch.full((2,), 0.64), 8 * eps(torch.float32))


@pytest.mark.parametrize("guilty", ["root", "where"])
def test_a_branch_that_is_not_taken_and_a_root_at_zero_name_their_loss(guilty):
    """Their derivatives are NaN in torch. Other losses keep their rows, flags and scales."""
    named = {"root": lambda p: p.square().sum().sqrt(), "where": lambda p: torch.where(p < 0, torch.sqrt(p), p).sum()}
    losses = lambda p: {"a": p.norm(), "b": (p - 1).square().sum(), guilty: named[guilty](p)}
    zero = torch.zeros(3)
    J, _ = jd.jacobian_fn(losses, mode="loop")(zero)
    assert J.isfinite().all(1).tolist() == [True, True, False]
    assert torch.equal(J[0], zero)
    how = method(losses)
    state, info = jd.step(jd.train_state(zero, scale=jd.scale_state(shape=(3,)), **how), **how)
    assert info.finite.tolist() == [True, True, False]
    assert state.scale.scale.tolist() == [2.0**16, 2.0**16, 2.0**15]
    assert torch.equal(state.params, zero)


@pytest.mark.parametrize("optimizer", [jd.adamw(6e-4), jd.sgd(6e-4)], ids=["adamw", "sgd"])
def test_small_updates_need_parameters_in_float32(optimizer):
    """An update below half the distance to the next bfloat16 number rounds away; limits.md tells it."""
    losses = jd.autocast(lambda p: {"a": p.sum(), "b": 2 * p.sum()}, torch.bfloat16)
    how = method(losses, optimizer)
    for dtype, moves in ((torch.bfloat16, False), (torch.float32, True)):
        state = jd.train_state(torch.ones(4, dtype=dtype), **how)
        for _ in range(20):
            state, _ = jd.step(state, **how)
        assert bool((state.params < 1).all()) == moves
