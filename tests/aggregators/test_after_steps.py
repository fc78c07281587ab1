"""FAMO, DWA and GradNorm: losses after a step and ends of epochs, against torch's Adam, autograd and the peer."""

import numpy as np
import pytest
import torch
from bounds import check_within, eps
from hypothesis import given
from hypothesis import strategies as st
from scalarizations import AFTER, LOSSES, ROWS, calls, check_direction, compiled
from sequences import number, sequences, values
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


# The last of the digits that the peer prints.
DIGITS = 1e-7
# torchjd 0.18, FAMO(3, lr, weight_decay) in float64: the gradients at LOSSES with `update(AFTER)` after each
PEER = {
    (0.025, 1e-3): [
        [0.5714286, 0.2857143, 0.1428571],
        [0.590911, 0.0984852, 0.3106038],
        [0.0975902, 0.769793, 0.1326168],
        [0.0990828, 0.0999032, 0.8010139],
    ],
    (0.5, 0.1): [
        [0.5714286, 0.2857143, 0.1428571],
        [0.3959131, 0.0659855, 0.5381014],
        [0.0938913, 0.729035, 0.1770738],
        [0.0914255, 0.1343372, 0.7742374],
    ],
}
# FAMO(3, lr=0.5, weight_decay=0.1), with `update` on the losses of the next call
PEER_WITHOUT = [
    [0.5714286, 0.2857143, 0.1428571],
    [0.5120205, 0.2319693, 0.2560102],
    [0.0702741, 0.8570191, 0.0727068],
    [0.1509162, 0.201232, 0.6478519],
]


@pytest.mark.parametrize("settings", PEER)
def test_equal_to_the_peer_over_four_steps(settings):
    weights, _ = measured(jd.famo(*settings), LOSSES, AFTER)
    check_within(weights, torch.tensor(PEER[settings], dtype=torch.float64), DIGITS)


def test_without_a_measurement_the_next_losses_stand_for_it():
    weights, _ = calls(jd.famo(0.5, 0.1), LOSSES)
    check_within(weights, torch.tensor(PEER_WITHOUT, dtype=torch.float64), DIGITS)


def test_after_a_skipped_step_the_first_measurement_stays():
    _, state = calls(jd.famo(), LOSSES[:1])
    once = jd.famo_after_step(state, AFTER[0])
    twice = jd.famo_after_step(once, AFTER[1])
    assert all(torch.equal(x, y) for x, y in zip(once, twice, strict=True))
    assert torch.equal(state.after, LOSSES[0])  # what was handed over has not changed


def test_named_losses_are_taken_in_leaf_order():
    _, state = calls(jd.famo(), LOSSES[:1])
    named = {"b": AFTER[0, 1:], "a": AFTER[0, 0]}
    assert torch.equal(jd.famo_after_step(state, named).after, AFTER[0])


@given(st.floats(1e-9, 1e9))
def test_the_unit_of_the_losses_does_not_matter(unit):
    expected, _ = measured(jd.famo(0.5), LOSSES, AFTER)
    torch.testing.assert_close(measured(jd.famo(0.5), LOSSES * unit, AFTER * unit)[0], expected)


def descended(logits, c=None):
    """The paper's number: c from the losses, but constant, or held at what it is elsewhere."""
    z = logits.exp() / logits.exp().sum()
    return lambda losses: (z @ losses.log()) / (z / (losses.detach() if c is None else c)).sum()


def test_the_direction_is_the_gradient_whatever_was_learned():
    zeros = torch.zeros(3, dtype=torch.float64)
    assert descended(zeros)(LOSSES[0]).item() == pytest.approx(1.188252, abs=10 * DIGITS)  # the paper's code
    check_direction(jd.famo(), descended(zeros))
    # A rate of zero keeps the logits: what the losses of the call would teach does not blur the comparison.
    learned = measured(jd.famo(0.5), LOSSES[:2], AFTER[:2])[1].logits
    assert learned.abs().min() > 0.01
    state = jd.famo().init(LOSSES[0])._replace(logits=learned)
    check_direction(jd.famo(0.0), descended(learned), state)


def fourth(losses):
    return measured(jd.famo(0.5, 0.1), [losses, losses.flip(0), losses.square()], AFTER[:3])[0][-1]


def test_losses_of_another_number_are_refused():
    state = jd.aggregate(jd.famo(), ROWS, losses=LOSSES[0]).state
    with pytest.raises(ValueError, match="famo_after_step: expected 3 losses, as in the step, found 2"):
        jd.famo_after_step(state, LOSSES[0, :2])


# The last of the digits that the peer prints.
EPOCH_DIGITS = 1e-9
# torchjd 0.18, DWA(0.5) in float64, two calls in each of four epochs, at LOSSES[(epoch + call) % 4]: the gradients
EPOCHS = [[1.0] * 3] * 2 + [[2.443254532, 0.319818268, 0.2369272], [1.962515945, 0.384219246, 0.653264809]]


def test_equal_to_the_peer_over_four_epochs():
    rule, state = jd.dwa(0.5), None
    for epoch, expected in enumerate(EPOCHS):
        weights, state = calls(rule, LOSSES.roll(-epoch, 0)[:2], state)
        check_within(weights, torch.tensor([expected] * 2, dtype=torch.float64), EPOCH_DIGITS)
        state = jd.dwa_end_epoch(state)


def third_epoch():
    state = None
    for epoch in range(2):
        state = jd.dwa_end_epoch(calls(jd.dwa(), LOSSES[epoch : epoch + 2], state)[1])
    return state


def test_the_direction_of_dwa_is_the_gradient():
    check_direction(jd.dwa(), lambda losses: losses.sum())
    state = third_epoch()
    weights = jd.aggregate(jd.dwa(), ROWS, state, losses=LOSSES[0]).weights
    assert (weights - 1).abs().min() > 1e-3
    check_direction(jd.dwa(), lambda losses: losses @ weights, state)


def test_an_epoch_without_a_call_is_none():
    for state in (third_epoch(), jd.dwa().init(LOSSES[0])):
        for expected, found in zip(state, jd.dwa_end_epoch(state), strict=True):
            assert torch.equal(expected, found)


@given(st.lists(st.floats(1e-9, 1e9), min_size=3, max_size=3))
def test_the_units_of_the_losses_do_not_matter(units):
    scales = torch.tensor(units, dtype=torch.float64)
    state, scaled = (jd.dwa_end_epoch(calls(jd.dwa(), LOSSES[:2] * c)[1]) for c in (1, scales))
    state, scaled = (jd.dwa_end_epoch(calls(jd.dwa(), LOSSES[2:] * c, s)[1]) for c, s in ((1, state), (scales, scaled)))
    torch.testing.assert_close(state.ratio, scaled.ratio)
    assert (state.ratio - 1).abs().min() > 0.01


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


def test_ending_an_epoch_changes_nothing_that_it_is_given():
    state = calls(jd.dwa(), LOSSES)[1]
    before = tree_map(torch.clone, state)
    jd.dwa_end_epoch(state)
    assert all(torch.equal(x, y) for x, y in zip(state, before, strict=True))


def by_autograd(sequence, losses, alpha, rate):
    """The weights of every call, from the derivative of the published loss, as long as there is one."""
    m = losses.shape[1]
    s = torch.zeros(m, dtype=torch.float64)
    for rows, found in zip(torch.from_numpy(sequence), torch.from_numpy(losses), strict=True):
        s.requires_grad_()
        w = m * torch.softmax(s, dim=0)
        yield w.tolist()
        lengths = torch.stack([(weight * row).norm() for weight, row in zip(w, rows, strict=True)])
        left = found / torch.from_numpy(losses[0])
        target = (lengths.mean() * (left / left.mean()) ** alpha).detach()
        gaps = (lengths - target).abs()
        if lengths.max() == 0 or (m > 1 and gaps.min() < 1e-6):
            return
        (slope,) = torch.autograd.grad(gaps.sum(), s)
        s = (s - rate * slope / lengths.mean()).detach()


def check(sequence, losses, alpha, rate):
    """Compare with autograd, and say how many calls could be."""
    state, compared = None, 0
    for expected, rows, seen in zip(by_autograd(sequence, losses, alpha, rate), sequence, losses, strict=False):
        J = torch.from_numpy(rows)
        direction, weights, state = jd.aggregate(jd.gradnorm(alpha, rate), J, state, losses=torch.from_numpy(seen))
        # A step is off by the rounding of lengths over their mean, and by what the last one was.
        sensitivity = 1 + 4 * rate * len(losses[0])
        check_within(
            weights, torch.tensor(expected, dtype=torch.float64), 64 * len(seen) * eps() * sensitivity ** (compared + 1)
        )
        torch.testing.assert_close(direction, weights @ J)
        compared += 1
    return compared


@given(sequences(), st.sampled_from([0.0, 0.5, 1.5]), st.sampled_from([0.025, 0.5]))
def test_equal_to_the_derivative_of_the_published_loss(case, alpha, rate):
    check(*case, alpha, rate)


def test_equal_to_the_derivative_of_the_published_loss_over_many_calls():
    sequence, losses = (np.stack([f(k).numpy() for k in range(10)]) for f in (number, values))
    assert check(sequence, losses, 1.5, 0.5) == 10


def test_without_a_restoring_force_the_weighted_rows_become_equally_long():
    J, losses, state = torch.diag(torch.tensor([1.0, 3.0, 8.0])), torch.ones(3), None
    for _ in range(2000):
        weights, state = jd.aggregate(jd.gradnorm(0.0, 0.01), J, state, losses=losses)[1:]
    lengths = weights * J.diagonal()
    assert lengths.max() / lengths.min() < 1.1


@given(st.permutations([1.0, 0.5, 0.25]))
def test_the_objective_that_lags_behind_gains_the_most_weight(losses):
    J, state = torch.eye(3), jd.aggregate(jd.gradnorm(), torch.eye(3), losses=torch.ones(3)).state
    for _ in range(20):
        weights, state = jd.aggregate(jd.gradnorm(), J, state, losses=torch.tensor(losses))[1:]
    assert weights.argsort().tolist() == torch.tensor(losses).argsort().tolist()


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


def second(J, first, later):
    state = jd.aggregate(jd.gradnorm(), J, losses=first).state
    return jd.aggregate(jd.gradnorm(), J, state, losses=later).direction


@pytest.mark.parametrize(
    ("first", "later"), [([1.0, 1.0], [1.0, -1.0]), ([1.0, 0.0], [1.0, 1.0]), ([1.0, 1.0], [1.0, torch.nan])]
)
def test_invalid_losses_give_nan_at_once(first, later):
    assert second(torch.eye(2), torch.tensor(first), torch.tensor(later)).isnan().all()
