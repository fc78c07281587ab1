"""GradNorm: the published loss of the weights, differentiated by autograd, and what it leads to."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from functional_jd.aggregation import aggregate, start
from functional_jd.aggregators.gradnorm import gradnorm
from functional_jd.testing.measures import form

torch.set_num_threads(1)

sequences = st.tuples(st.just(4), st.integers(1, 4), st.integers(1, 4)).flatmap(
    lambda shape: st.tuples(
        hnp.arrays(np.float64, shape, elements=st.integers(-3, 3)),
        hnp.arrays(np.float64, shape[:2], elements=st.integers(1, 8)),
    )
)


def number(k):
    return ((torch.arange(12).reshape(3, 4) * (k + 3) + k * k) % 11 - 5).double()


def values(k):
    return ((torch.arange(3) * (k + 2) + k) % 5 + 1).double() / 2


def by_autograd(sequence, losses, alpha, rate):
    """The weights of every call, from the derivative of the published loss, as long as there is one."""
    m = losses.shape[1]
    s = torch.zeros(m, dtype=torch.float64)
    for rows, values in zip(torch.from_numpy(sequence), torch.from_numpy(losses), strict=True):
        s.requires_grad_()
        w = m * torch.softmax(s, dim=0)
        yield w.tolist()
        lengths = torch.stack([(weight * row).norm() for weight, row in zip(w, rows, strict=True)])
        left = values / torch.from_numpy(losses[0])
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
        torch.testing.assert_close(weights.tolist(), expected, atol=1e-10, rtol=1e-10)
        torch.testing.assert_close(direction, weights @ J)
        compared += 1
    return compared


@given(sequences, st.sampled_from([0.0, 0.5, 1.5]), st.sampled_from([0.025, 0.5]))
def test_equal_to_the_derivative_of_the_published_loss(case, alpha, rate):
    check(*case, alpha, rate)


def test_equal_to_the_derivative_of_the_published_loss_over_many_calls():
    sequence, losses = (np.stack([f(k).numpy() for k in range(10)]) for f in (number, values))
    assert check(sequence, losses, 1.5, 0.5) == 10


@given(sequences)
def test_weights_are_positive_and_add_up_to_the_number_of_rows(case):
    rule, state = gradnorm(rate=1.0), None
    for rows, losses in zip(*map(torch.from_numpy, case), strict=True):
        _, weights, state = aggregate(rule, rows, state, losses=losses)
        assert (weights > 0).all()
        torch.testing.assert_close(weights.sum().item(), float(len(rows)))


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
    torch.testing.assert_close(weights.tolist(), [1.0] * 3, atol=1e-12, rtol=0)


@pytest.mark.parametrize("scale", [1e-18, 1e18])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_neither_the_scale_of_the_jacobian_nor_the_unit_of_a_loss_matters(scale, dtype):
    units, state, scaled = torch.tensor([1e-18, 1.0, 1e18], dtype=torch.float64), None, None
    for k in range(4):
        expected, state = aggregate(gradnorm(rate=0.5), number(k), state, losses=values(k))[1:]
        rows = (scale * number(k)).to(dtype)
        weights, scaled = aggregate(gradnorm(rate=0.5), rows, scaled, losses=units * values(k))[1:]
        torch.testing.assert_close(weights, expected, rtol=1e-5 if dtype == torch.float32 else 1e-12, atol=0)
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


def test_a_jacobian_that_is_not_finite_is_not_hidden():
    J = number(0)
    J[1, 2] = torch.inf
    assert not aggregate(gradnorm(), J, losses=values(0)).direction.isfinite().any()


def test_the_state_keeps_its_form_from_the_start_on():
    half = number(0).half()
    old = start(gradnorm(), half, losses=values(0).half())
    assert form(old) == form(aggregate(gradnorm(), half, old, losses=values(0).half()).state)


def third(J, losses):
    rule = gradnorm(rate=0.3)
    state = aggregate(rule, J, losses=losses).state
    state = aggregate(rule, J.sin(), state, losses=losses + 1).state
    return aggregate(rule, J * J, state, losses=losses**2).direction


def test_derivatives_are_those_of_finite_differences():
    inputs = (number(1).add(0.5).div(3).requires_grad_(), values(1).requires_grad_())
    assert torch.autograd.gradcheck(third, inputs, check_forward_ad=True)


def test_derivatives_are_finite_at_zeros():
    J = number(1)
    J[1] = 0
    assert torch.func.grad(lambda J: third(J, values(1)).sum())(J).isfinite().all()
    _, tangent = torch.func.jvp(lambda J: third(J, values(1)), (J,), (torch.ones_like(J),))
    assert tangent.isfinite().all()


def test_a_batch_is_the_loop_also_compiled():
    batch, losses = (torch.stack([f(k) for k in range(3)]) for f in (number, values))
    loop = torch.stack([third(*case) for case in zip(batch, losses, strict=True)])
    torch.testing.assert_close(torch.vmap(third)(batch, losses), loop)
    compiled = torch.compile(torch.vmap(third), fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(batch, losses), loop)


@pytest.mark.parametrize("wrong", [{"alpha": -1.0}, {"alpha": torch.nan}, {"rate": 0.0}, {"rate": torch.inf}])
def test_hyper_parameters_are_checked(wrong):
    with pytest.raises(ValueError, match=f"gradnorm: {next(iter(wrong))} must .*, found"):
        gradnorm(**wrong)


def test_losses_are_asked_for():
    with pytest.raises(ValueError, match="this rule looks at the losses, found none"):
        aggregate(gradnorm(), number(0))
