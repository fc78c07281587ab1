"""FAMO, DWA and GradNorm: losses after a step and ends of epochs; their formulas are in `tests/exact`."""

import pytest
import torch
from bounds import check_within, eps
from hypothesis import given
from hypothesis import strategies as st
from sequences import AFTER, LOSSES, calls, compiled, number, values
from torch.utils._pytree import tree_map

import functional_jd as jd

positive = st.lists(st.floats(0.1, 10), min_size=3, max_size=3)
pairs_of_losses = st.lists(st.tuples(positive, positive), min_size=1, max_size=5)


def measured(rule, losses, after):
    """The weights of every call, with the losses after every step."""
    weights, state = [], None
    for before, behind in zip(losses, after, strict=True):
        found, state = calls(rule, [before], state)
        weights.append(found[0])
        state = jd.famo_after_step(state, behind)
    return torch.stack(weights), state


def with_adam(sequence, rate, decay):
    """The weights of every call, with the logits a parameter of torch.optim.Adam."""
    logits = torch.nn.Parameter(torch.zeros(3, dtype=torch.float64))
    adam = torch.optim.Adam([logits], lr=rate, weight_decay=decay)
    for before, after in sequence:
        parts = torch.softmax(logits.detach(), 0) / before
        yield (parts / parts.sum()).tolist()
        adam.zero_grad()
        (torch.softmax(logits, 0) @ (before / after).log()).backward()
        adam.step()


@given(pairs_of_losses, st.sampled_from([0.025, 0.5]), st.sampled_from([0.0, 1e-3, 0.5]))
def test_equal_to_torch_s_adam_on_the_logits(sequence, rate, decay):
    pairs = torch.tensor(sequence, dtype=torch.float64)
    weights, _ = measured(jd.famo(rate, decay), pairs[:, 0], pairs[:, 1])
    # Where all losses fall alike the slope is rounding, which Adam divides by its epsilon.
    steps = len(sequence) * rate * 64 * eps() / torch.optim.Adam([torch.zeros(1)]).defaults["eps"]
    check_within(weights, torch.tensor(list(with_adam(pairs, rate, decay)), dtype=torch.float64), 64 * eps() + steps)


def test_after_a_skipped_step_the_first_measurement_stays():
    _, state = calls(jd.famo(), LOSSES[:1])
    once = jd.famo_after_step(state, AFTER[0])
    twice = jd.famo_after_step(once, AFTER[1])
    assert all(torch.equal(x, y) for x, y in zip(once, twice, strict=True))
    assert torch.equal(state.after, LOSSES[0])  # what was handed over has not changed


def test_named_losses_are_taken_in_leaf_order_and_counted():
    _, state = calls(jd.famo(), LOSSES[:1])
    named = {"b": AFTER[0, 1:], "a": AFTER[0, 0]}
    assert torch.equal(jd.famo_after_step(state, named).after, AFTER[0])
    with pytest.raises(ValueError, match="famo_after_step: expected 3 losses, as in the step, found 2"):
        jd.famo_after_step(state, LOSSES[0, :2])


def fourth(losses):
    return measured(jd.famo(0.5, 0.1), [losses, losses.flip(0), losses.square()], AFTER[:3])[0][-1]


def test_an_epoch_without_a_call_is_none_and_an_end_changes_nothing_that_it_is_given():
    second = jd.dwa_end_epoch(calls(jd.dwa(), LOSSES[:2])[1])
    third = jd.dwa_end_epoch(calls(jd.dwa(), LOSSES[1:3], second)[1])
    for state in (third, jd.dwa().init(LOSSES[0])):
        assert all(map(torch.equal, state, jd.dwa_end_epoch(state)))
    state = calls(jd.dwa(), LOSSES)[1]
    before = tree_map(torch.clone, state)
    jd.dwa_end_epoch(state)
    assert all(map(torch.equal, state, before))


def test_a_loss_that_was_zero_in_an_epoch_counts_as_unchanged():
    zero = LOSSES * torch.tensor([0.0, 1.0, 1.0])
    state = jd.dwa_end_epoch(calls(jd.dwa(), LOSSES[1:], jd.dwa_end_epoch(calls(jd.dwa(), zero)[1]))[1])
    assert state.ratio.isfinite().all()
    assert state.ratio[0] == 1


def twice(losses):
    state = jd.dwa_end_epoch(calls(jd.dwa(0.5), [losses, losses.flip(0)])[1])
    state = jd.dwa_end_epoch(calls(jd.dwa(0.5), [losses.square()], state)[1])
    return calls(jd.dwa(0.5), [losses], state)[0][0]


@pytest.mark.parametrize("f", [fourth, twice])
def test_they_compose_with_every_transform(f):
    loop = torch.stack([f(losses) for losses in LOSSES])
    torch.testing.assert_close(torch.vmap(f)(LOSSES), loop)
    torch.testing.assert_close(compiled(torch.vmap(f))(LOSSES), loop)
    assert torch.autograd.gradcheck(f, LOSSES[1].clone().requires_grad_(), check_forward_ad=True)


def test_norms_that_hit_their_targets_stay_though_they_round():
    J, state = torch.ones(3, 1) * torch.tensor([[0.1], [-0.1], [0.1]]), None
    for _ in range(3):
        weights, state = jd.aggregate(jd.gradnorm(rate=10.0), J, state, losses=torch.full((3,), 0.3))[1:]
    check_within(weights, torch.ones(3), 8 * eps())


@pytest.mark.parametrize("scale", [1e-18, 1e18])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_neither_the_scale_of_the_jacobian_nor_the_unit_of_a_loss_matters(scale, dtype):
    units, state, scaled = torch.tensor([1e-18, 1.0, 1e18], dtype=torch.float64), None, None
    for k in range(4):
        expected, state = jd.aggregate(jd.gradnorm(rate=0.5), number(k), state, losses=values(k))[1:]
        rows = (scale * number(k)).to(dtype)
        weights, scaled = jd.aggregate(jd.gradnorm(rate=0.5), rows, scaled, losses=units * values(k))[1:]
        check_within(weights, expected, 64 * eps(dtype) * expected)
    assert (weights - 1).abs().max() > 0.1


def test_zeros_are_no_trouble():
    state = None
    for J in (torch.zeros(3, 2), number(0)[:, :2], torch.zeros(3, 2)):
        for losses in (torch.ones(3), torch.zeros(3), torch.tensor([0.0, 1.0, 2.0])):
            direction, _, state = jd.aggregate(jd.gradnorm(), J, state, losses=losses)
            assert direction.isfinite().all()
            assert state.logits.isfinite().all()


@pytest.mark.parametrize(
    ("first", "later"), [([1.0, 1.0], [1.0, -1.0]), ([1.0, 0.0], [1.0, 1.0]), ([1.0, 1.0], [1.0, torch.nan])]
)
def test_invalid_losses_give_nan_at_once(first, later):
    state = jd.aggregate(jd.gradnorm(), torch.eye(2), losses=torch.tensor(first)).state
    assert jd.aggregate(jd.gradnorm(), torch.eye(2), state, losses=torch.tensor(later)).direction.isnan().all()
