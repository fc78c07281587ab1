"""GradNorm: the published loss of the weights, differentiated by autograd, and what it leads to."""

import numpy as np
import pytest
import torch
from bounds import check_within, eps
from hypothesis import given
from hypothesis import strategies as st
from sequences import number, sequences, values

from functional_jd.aggregation.aggregate import aggregate
from functional_jd.aggregators.gradnorm import gradnorm


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
        direction, weights, state = aggregate(gradnorm(alpha, rate), J, state, losses=torch.from_numpy(seen))
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
        weights, state = aggregate(gradnorm(0.0, 0.01), J, state, losses=losses)[1:]
    lengths = weights * J.diagonal()
    assert lengths.max() / lengths.min() < 1.1


@given(st.permutations([1.0, 0.5, 0.25]))
def test_the_objective_that_lags_behind_gains_the_most_weight(losses):
    J, state = torch.eye(3), aggregate(gradnorm(), torch.eye(3), losses=torch.ones(3)).state
    for _ in range(20):
        weights, state = aggregate(gradnorm(), J, state, losses=torch.tensor(losses))[1:]
    assert weights.argsort().tolist() == torch.tensor(losses).argsort().tolist()


def test_norms_that_hit_their_targets_stay_though_they_round():
    J, state = torch.ones(3, 1) * torch.tensor([[0.1], [-0.1], [0.1]]), None
    for _ in range(3):
        weights, state = aggregate(gradnorm(rate=10.0), J, state, losses=torch.full((3,), 0.3))[1:]
    check_within(weights, torch.ones(3), 8 * eps())


@pytest.mark.parametrize("scale", [1e-18, 1e18])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_neither_the_scale_of_the_jacobian_nor_the_unit_of_a_loss_matters(scale, dtype):
    units, state, scaled = torch.tensor([1e-18, 1.0, 1e18], dtype=torch.float64), None, None
    for k in range(4):
        expected, state = aggregate(gradnorm(rate=0.5), number(k), state, losses=values(k))[1:]
        rows = (scale * number(k)).to(dtype)
        weights, scaled = aggregate(gradnorm(rate=0.5), rows, scaled, losses=units * values(k))[1:]
        check_within(weights, expected, 64 * eps(dtype) * expected)
    assert (weights - 1).abs().max() > 0.1


def test_zeros_are_no_trouble():
    state = None
    for J in (torch.zeros(3, 2), number(0)[:, :2], torch.zeros(3, 2)):
        for losses in (torch.ones(3), torch.zeros(3), torch.tensor([0.0, 1.0, 2.0])):
            direction, _, state = aggregate(gradnorm(), J, state, losses=losses)
            assert direction.isfinite().all()
            assert state.logits.isfinite().all()


def second(J, first, later):
    state = aggregate(gradnorm(), J, losses=first).state
    return aggregate(gradnorm(), J, state, losses=later).direction


@pytest.mark.parametrize(
    ("first", "later"), [([1.0, 1.0], [1.0, -1.0]), ([1.0, 0.0], [1.0, 1.0]), ([1.0, 1.0], [1.0, torch.nan])]
)
def test_invalid_losses_give_nan_at_once(first, later):
    assert second(torch.eye(2), torch.tensor(first), torch.tensor(later)).isnan().all()
