"""Advice: every verdict on Jacobians made for it, its figures by hand, and what must not change it."""

from collections import deque

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from functional_jd.core.tree import tree_map
from functional_jd.diagnostics import Diagnosis, advise, diagnose

# Two unit vectors at right angles, and one that opposes the first at an angle of cosine -0.6.
EPS = torch.finfo(torch.float64).eps
E1, E2 = torch.eye(3, dtype=torch.float64)[:2]
OPPOSED = -0.6 * E1 + 0.8 * E2


def window(*steps):
    """Gramians `[k, m, m]` of the steps, each a list of rows."""
    return torch.stack([torch.stack(rows) @ torch.stack(rows).T for rows in steps])


STEADY = {
    "keep the mean": window([E1, E2], [E1, 2 * E2], [2 * E1, E2]),
    "rescale": window([E1, 40 * E2], [E1, 50 * E2], [E1, 60 * OPPOSED]),
    "project": window([E1, OPPOSED], [E1, 2 * OPPOSED], [E1, OPPOSED]),
    "explore the front": window([E1, 3 * OPPOSED], [E1, 4 * OPPOSED], [E1, 5 * OPPOSED]),
}


@pytest.mark.parametrize("said", STEADY)
def test_each_verdict_on_a_window_made_for_it(said):
    found = advise(STEADY[said])
    assert found.verdict == said
    assert found.reason.endswith(".")
    assert (found.rule == "mean") == (said == "keep the mean")


def test_conflict_is_counted_over_the_window_and_not_in_one_step():
    third = torch.eye(3, dtype=torch.float64)[2]
    steps = [[E1, OPPOSED, third], [E1, OPPOSED, third - 0.5 * E1], [E1, OPPOSED, third + 0.5 * E1]]
    gramians = window(*steps)
    single = [float(diagnose(gramian, gramian=True).conflict) for gramian in gramians]
    assert single == pytest.approx([1 / 3, 2 / 3, 2 / 3]), "of E1 with the third, or of OPPOSED with it"
    found = advise(gramians)
    assert (found.verdict, found.conflict) == ("keep the mean", pytest.approx(1 / 3))
    steady = [[E1, OPPOSED, third - 0.5 * E1]] * 3
    found = advise(window(*steady))
    assert (found.verdict, found.conflict) == ("keep the mean", pytest.approx(2 / 3)), "not all of the pairs"
    assert found.reason.endswith("only 67% of the pairs conflict throughout the window.")


def test_figures_by_hand():
    steps = [[E1, 4 * E2, E1], [E1, 8 * E2, OPPOSED], [E1, 6 * E2, OPPOSED]]
    found = advise(window(*steps))
    assert advise(window(*steps).flip(0)) == found
    assert found.imbalance == pytest.approx(6, rel=4 * EPS)  # medians 1, 6, 1
    # The pairs (0, 1), (0, 2), (1, 2) have the cosines 0 0 0; 1 -.6 -.6; 0 .8 .8.
    deviations = [0, 1.6 / 3**0.5, 0.8 / 3**0.5]
    assert found.noise == pytest.approx(sum(deviations) / 3, rel=16 * EPS)  # of nine cosines, each of size 1
    assert found.conflict == 0  # the mean of 1, -.6, -.6 is within two standard errors of 0
    assert found.rank == sorted(float(diagnose(G).rank) for G in window(*steps))[1] / 3
    assert found.given_up == 0
    # Of three unit rows: 2 |mean|^2 - 1, with sums of cosines of 3 + 2 (0 + 1 + 0) and 3 + 2 (0 - .6 + .8), twice.
    assert found.score == pytest.approx(2 * 3.4 / 9 - 1)


def trained(losses, steps, rate=0.05):
    """Gramians of steps under the mean."""
    w, found = torch.tensor([0.3, -0.4], dtype=torch.float64), []
    for _ in range(steps):
        jacobian = torch.func.jacrev(losses)(w)
        found.append(jacobian @ jacobian.T)
        w = w - rate * jacobian.mean(0) / jacobian.mean(0).norm()
    return torch.stack(found)


@pytest.mark.parametrize("unit", [1e-3, 0.3, 3.0, 1e3])
def test_a_front_is_explored_where_units_decide_which_loss_wins(unit):
    ends = torch.tensor([[1.0, 0.0], [-1.0, 0.0]], dtype=torch.float64)
    units = torch.tensor([1.0, unit], dtype=torch.float64)

    def conflicting(w):
        return units * (w - ends).square().sum(1)

    def agreeing(w):
        return units * torch.stack([(w - 1).square().sum(), (w - 1).square().sum() + (w[0] - 1).square()])

    found = advise(trained(conflicting, 8))
    assert (found.verdict, found.given_up) == ("explore the front", 0.5)
    assert found.rule == ("aligned_mtl" if 0.1 < unit < 10 else "nash_mtl")
    assert "50% of the losses rise along the mean" in found.reason
    found = advise(trained(agreeing, 8))
    assert (found.verdict, found.given_up) == ("keep the mean" if 0.1 < unit < 10 else "rescale", 0)


def test_nothing_is_given_up_where_any_lengths_give_up_the_same_loss_or_none():
    against_two = [[E1, E1 + 0.1 * E2, -E1], [E1, E1 + 0.2 * E2, -E1]]
    assert advise(window(*against_two)).given_up == 0
    assert advise(window([E1, -E1], [E1, -E1])).given_up == 0  # the mean vanishes


def test_a_conflict_that_comes_and_goes_with_batches_is_noise():
    steps = [[E1, OPPOSED if i % 2 else -OPPOSED] for i in range(10)]
    found = advise(window(*steps))
    assert found.verdict == "keep the mean"
    assert found.conflict == 0
    assert found.noise == pytest.approx(0.6 * (10 / 9) ** 0.5, rel=32 * EPS)  # ten squares of cosines


@given(st.permutations(range(3)), st.integers(-100, 100), st.sampled_from(sorted(STEADY)))
def test_neither_the_order_of_objectives_nor_a_unit_of_all_losses_matters(order, exponent, said):
    gramians = torch.nn.functional.pad(STEADY[said], (0, 1, 0, 1))
    gramians[:, 2, 2] = 2.0  # a third objective, apart from the others
    plain = advise(gramians)
    moved = advise(gramians[:, order][:, :, order] * 4.0**exponent)
    assert (moved.verdict, moved.rule) == (plain.verdict, plain.rule)
    for before, after in zip(plain[3:], moved[3:], strict=True):
        assert after == pytest.approx(before, rel=64 * EPS, nan_ok=True)  # sums of at most nine terms, in another order


@pytest.mark.parametrize("said", STEADY)
def test_a_window_in_another_form_gives_the_same_advice(said):
    gramians = STEADY[said]
    expected = advise(gramians)
    assert advise(torch.vmap(lambda G: diagnose(G, gramian=True))(gramians)) == expected
    for kind in (list, tuple, deque):
        assert advise(kind(diagnose(G, gramian=True) for G in gramians)) == advise(kind(gramians)) == expected
    assert advise(torch.cat([torch.full((1, 2, 2), torch.nan).double(), gramians])) == expected  # left out
    assert advise(gramians.float()).verdict == said


def test_one_objective_and_gradients_of_zero_need_no_rule():
    assert advise(torch.ones(3, 1, 1)).verdict == "keep the mean"
    assert advise(torch.zeros(3, 2, 2)).imbalance == 1
    done = STEADY["keep the mean"].clone()
    done[:, 1] = done[:, :, 1] = 0
    assert advise(done).verdict == "keep the mean"
    assert advise(window(*[[E1, 100 * E2], [E1, 0 * E2]] * 2)).imbalance == pytest.approx(50, rel=4 * EPS)


def test_advice_shows_itself():
    found = advise(STEADY["rescale"])
    assert repr(found).startswith(f"Advice: rescale: {found.rule}(). {found.reason}\n")
    assert "imbalance" in repr(found)


@pytest.mark.parametrize(
    ("arguments", "kind", "message"),
    [
        (([torch.eye(2)],), ValueError, "advise: .*at least two steps with finite gradients, found 1 of 1"),
        (([torch.eye(2), torch.eye(3)],), ValueError, r"advise: .*same objectives, found \[2, 3\]"),
        (([torch.tensor(1.0)] * 2,), TypeError, r"advise: .*Gramians \[m, m\].* found torch.float32 \[\]"),
        (([torch.eye(2, device="meta")] * 2,), TypeError, "advise: .*tensors with values"),
        (([(), ()],), TypeError, r"advise: .*found tuple\. A step has \(\) .* gramian_fn"),
        ((torch.zeros(0, 2, 2),), TypeError, r"advise: .*Gramians \[k, m, m\], found .*\[0, 2, 2\]"),
        ((torch.tensor([[[1.0, 2], [3, 4]]] * 2),), ValueError, "diagnose: .*read as a Gramian"),
        (([diagnose(torch.eye(2)), diagnose(torch.eye(3))],), ValueError, r"advise: .*same objectives, found \[2, 3\]"),
        ((STEADY["project"].to("meta"),), TypeError, "advise: .*tensors with values"),
    ],
)
def test_errors_say_what_to_do(arguments, kind, message):
    with pytest.raises(kind, match=message):
        advise(*arguments)


def test_values_are_needed():
    with pytest.raises(TypeError, match="outside vmap and torch"):
        torch.vmap(lambda G: torch.tensor(advise(G).conflict))(STEADY["project"][None])


def test_is_pure_and_takes_what_requires_grad():
    gramians = STEADY["project"].clone().requires_grad_()
    found = [diagnose(G, gramian=True) for G in gramians]
    before = [tree_map(torch.clone, tuple(one)) for one in found]
    assert advise(found).verdict == advise(gramians).verdict == "project"
    assert all(isinstance(one, Diagnosis) for one in found)
    for one, old in zip(found, before, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(one, old, strict=True))
