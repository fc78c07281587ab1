"""DWA: the paper's equation in plain loops, epochs that end by a function, and the peer's numbers."""

import torch
from bounds import check_within
from hypothesis import given
from hypothesis import strategies as st
from scalarizations import (
    LOSSES,
    ROWS,
    calls,
    check_direction,
    compiled,
)
from torch.utils._pytree import tree_map

from functional_jd.aggregation.aggregate import aggregate
from functional_jd.aggregators.dwa import dwa, dwa_end_epoch

losses = st.lists(st.integers(1, 9).map(float), min_size=3, max_size=3)
epochs = st.lists(st.lists(losses, min_size=1, max_size=3), min_size=1, max_size=4)


# The last of the digits that the peer prints.
DIGITS = 1e-9
# torchjd 0.18, DWA(0.5) in float64, two calls in each of four epochs, at LOSSES[(epoch + call) % 4]: the gradients
PEER = [[1.0] * 3] * 2 + [[2.443254532, 0.319818268, 0.2369272], [1.962515945, 0.384219246, 0.653264809]]


def test_equal_to_the_peer_over_four_epochs():
    rule, state = dwa(0.5), None
    for epoch, expected in enumerate(PEER):
        weights, state = calls(rule, LOSSES.roll(-epoch, 0)[:2], state)
        check_within(weights, torch.tensor([expected] * 2, dtype=torch.float64), DIGITS)
        state = dwa_end_epoch(state)


def third_epoch():
    state = None
    for epoch in range(2):
        state = dwa_end_epoch(calls(dwa(), LOSSES[epoch : epoch + 2], state)[1])
    return state


def test_the_direction_is_the_gradient():
    check_direction(dwa(), lambda losses: losses.sum())
    state = third_epoch()
    weights = aggregate(dwa(), ROWS, state, losses=LOSSES[0]).weights
    assert (weights - 1).abs().min() > 1e-3
    check_direction(dwa(), lambda losses: losses @ weights, state)


def test_an_epoch_without_a_call_is_none():
    for state in (third_epoch(), dwa().init(LOSSES[0])):
        for expected, found in zip(state, dwa_end_epoch(state), strict=True):
            assert torch.equal(expected, found)


@given(st.lists(st.floats(1e-9, 1e9), min_size=3, max_size=3))
def test_the_units_of_the_losses_do_not_matter(units):
    scales = torch.tensor(units, dtype=torch.float64)
    state, scaled = (dwa_end_epoch(calls(dwa(), LOSSES[:2] * c)[1]) for c in (1, scales))
    state, scaled = (dwa_end_epoch(calls(dwa(), LOSSES[2:] * c, s)[1]) for c, s in ((1, state), (scales, scaled)))
    torch.testing.assert_close(state.ratio, scaled.ratio)
    assert (state.ratio - 1).abs().min() > 0.01


def test_a_loss_that_was_zero_in_an_epoch_counts_as_unchanged():
    zero = LOSSES * torch.tensor([0.0, 1.0, 1.0])
    state = dwa_end_epoch(calls(dwa(), LOSSES[1:], dwa_end_epoch(calls(dwa(), zero)[1]))[1])
    assert state.ratio.isfinite().all()
    assert state.ratio[0] == 1


def twice(losses):
    state = dwa_end_epoch(calls(dwa(0.5), [losses, losses.flip(0)])[1])
    state = dwa_end_epoch(calls(dwa(0.5), [losses.square()], state)[1])
    return calls(dwa(0.5), [losses], state)[0][0]


def test_ending_an_epoch_composes_with_every_transform():
    loop = torch.stack([twice(losses) for losses in LOSSES])
    torch.testing.assert_close(torch.vmap(twice)(LOSSES), loop)
    torch.testing.assert_close(compiled(torch.vmap(twice))(LOSSES), loop)
    assert torch.autograd.gradcheck(twice, LOSSES[1].clone().requires_grad_(), check_forward_ad=True)


def test_ending_an_epoch_changes_nothing_that_it_is_given():
    state = calls(dwa(), LOSSES)[1]
    before = tree_map(torch.clone, state)
    dwa_end_epoch(state)
    assert all(torch.equal(x, y) for x, y in zip(state, before, strict=True))
