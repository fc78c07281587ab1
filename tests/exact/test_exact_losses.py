"""Rules that look at the losses, against their formulas in 80 digits, for losses of all units."""

from decimal import Decimal

import numpy as np
import pytest
import torch
from bounds import check_within, eps
from exact.decimals import decimals, exp, floats, length, log, precisely, root, softmax
from exact.rows import SOME, gaussian
from hypothesis import given
from hypothesis import strategies as st

import functional_jd as fj
from functional_jd.random import key, normal, split

KINDS = {
    "of order one": lambda x: x.abs() + 0.1,
    "tiny": lambda x: (x.abs() + 0.1) * 2.0**-100,
    "huge": lambda x: (x.abs() + 0.1) * 2.0**100,
    "whose squares vanish": lambda x: (x.abs() + 0.1) * 2.0**-660,
    "whose squares overflow": lambda x: (x.abs() + 0.1) * 2.0**660,
    "wide": lambda x: (x.abs() + 0.1) * 2.0 ** (60 * x).round(),
    "equal": lambda x: 0 * x + 0.75,
    "nearly equal": lambda x: 1 + 1e-9 * x,
}


@st.composite
def losses(draw, calls=1):
    """Positive losses `[m]`, one for each call."""
    m, kind, seed = draw(st.integers(1, 6)), draw(st.sampled_from(list(KINDS))), draw(st.integers(0, 999))
    return [KINDS[kind](gaussian(seed + 1000 * call, m)) for call in range(calls)]


preferences = st.sampled_from(
    [lambda m: [1.0] * m, lambda m: [0.5**k for k in range(m)], lambda m: [1e-12 ** (k % 2) for k in range(m)]]
)
references = st.sampled_from([0.0, 0.5, 0.999, -1e6, 2.0])


def weights(rule, L, state=None):
    """The weights of a call, which are those of the identity's rows, as decimals; and the state."""
    result = fj.aggregate(rule, torch.eye(len(L), dtype=torch.float64), state, losses=L)
    assert result.weights.isfinite().all()
    return decimals(result.weights), result.state


def check(found, expected, bound):
    assert np.all(abs(found - expected) <= (Decimal(bound) if np.ndim(bound) == 0 else bound))


@SOME
@given(losses())
def test_geometric_mean(Ls):
    with precisely():
        L = decimals(Ls[0])
        expected = (sum(log(L)) / len(L)).exp() / (len(L) * L)
        if max(expected) < Decimal("1e300"):
            bound = 4 * Decimal(eps()) * (1 + max(abs(log(L)))) * expected
            check(weights(fj.geometric_mean(), Ls[0])[0], expected, bound)


@SOME
@given(losses(), preferences, references, st.sampled_from([1e-300, 1e-12, 0.01, 1.0, 1e12, 1e300]))
def test_stch(Ls, preference, reference, mu):
    u, z = preference(len(Ls[0])), Ls[0] * reference
    with precisely():
        L, U, Z = decimals(Ls[0]), decimals(u), decimals(z)
        found, _ = weights(fj.stch(mu, u, z), Ls[0])
        exponents = U * (L - Z) / Decimal(mu)
        gap = np.array([max(exponents) - x for x in exponents])
        # Terms are rounded before mu divides them; what is far behind has no weight in any case.
        rounding = 4 * Decimal(eps()) * max(U * (abs(L) + abs(Z))) / Decimal(mu)
        near = np.array([Decimal(1) if g <= 800 + rounding else Decimal(0) for g in gap])
        check(found, U * softmax(exponents), max(U) * (min(rounding, Decimal(1)) * near + 8 * Decimal(eps())))


@SOME
@given(losses(), preferences, references)
def test_tchebycheff(Ls, preference, reference):
    u, z = preference(len(Ls[0])), Ls[0] * reference
    with precisely():
        L, U, Z = decimals(Ls[0]), decimals(u), decimals(z)
        found, _ = weights(fj.tchebycheff(u, z), Ls[0])
        values, chosen = U * (L - Z), found > 0
        assert max(values) - min(values[chosen]) <= 2 * Decimal(eps()) * max(U * (abs(L) + abs(Z)))
        check(found[chosen], U[chosen] / int(chosen.sum()), eps())


@SOME
@given(losses(), preferences, references, st.sampled_from([0.0, 1e-6, 5.0, 1e6]))
def test_pbi(Ls, preference, reference, theta):
    u, z = preference(len(Ls[0])), Ls[0] * reference
    with precisely():
        L, U, Z = decimals(Ls[0]), decimals(u), decimals(z)
        found, _ = weights(fj.pbi(theta, u, z), Ls[0])
        ray, offset = U / length(U), L - Z
        across = offset - (ray @ offset) * ray
        off_the_ray = float(length(across) / length(offset)) if length(offset) else 0.0
        if 0.5 < off_the_ray * 2.0**40 < 2:
            return
        far = off_the_ray > 2.0**-40
        expected = ray + Decimal(theta) * across / length(across) if far else ray
        rounding = (length(L) + length(Z)) / length(offset) if length(offset) else 1
        check(found, expected, Decimal(8 * len(L) * eps() * (1 + theta / max(off_the_ray, 2.0**-40))) * rounding)


@SOME
@given(losses(), preferences, st.sampled_from([0.0, 1e-6, 1.0, 8.0, 1e6]))
def test_cosmos(Ls, preference, reward):
    u = preference(len(Ls[0]))
    with precisely():
        L, U = decimals(Ls[0]), decimals(u)
        found, _ = weights(fj.cosmos(reward, u), Ls[0])
        turn = U / length(U) - (U @ L) / length(U) * L / length(L) ** 2
        expected = U - Decimal(reward) * turn / length(L)
        check(found, expected, Decimal(8 * len(L) * eps()) * (max(U) + Decimal(reward) / length(L)))


@pytest.mark.parametrize(("rule", "sign"), [(fj.uw, -1), (fj.imtl_l, 1)], ids=["uw", "imtl_l"])
def test_learned_scales(rule, sign):
    @SOME
    @given(losses(4), st.sampled_from([1e-3, 0.1, 10.0]))
    def steps(Ls, rate):
        state, share = None, Decimal(1) if sign > 0 else Decimal("0.5")
        with precisely():
            v = decimals(torch.zeros_like(Ls[0]))
            for losses in Ls:
                result = fj.aggregate(rule(rate), torch.eye(len(v), dtype=torch.float64), state, losses=losses)
                expected = share * exp(sign * v)
                floor = Decimal("1e-300")
                if max(expected) < Decimal("1e300"):
                    found = decimals(result.weights)
                    check(found, expected, 2 * Decimal(eps()) * (1 + max(abs(v))) * expected + floor)
                terms = Decimal(rate) * share * (exp(sign * v) * decimals(losses) + 1)
                step = sign * Decimal(rate) * share * (1 - exp(sign * v) * decimals(losses))
                found = decimals(next(iter(result.state.values())))
                check(found, v + step, 4 * Decimal(eps()) * (abs(v) + (1 + abs(v)) * terms) + floor)
                state, v = result.state, found  # every step from where the last one led

    steps()


@SOME
@given(losses(8), st.sampled_from([1e-3, 0.1, 2.0, 1e3]))
def test_dwa(Ls, temperature):
    rule, state, means = fj.dwa(temperature), None, []
    with precisely():
        for epoch in range(4):
            ratio = means[-1] / means[-2] if epoch >= 2 else decimals(torch.ones_like(Ls[0]))
            expected = len(ratio) * softmax(ratio / Decimal(temperature))
            for losses in Ls[2 * epoch : 2 * epoch + 2]:
                found, state = weights(rule, losses, state)
                check(found, expected, min(1, 16 * eps() * (1 + float(max(ratio)) / temperature)) * len(ratio))
            means.append(sum(decimals(losses) for losses in Ls[2 * epoch : 2 * epoch + 2]) / 2)
            state = fj.dwa_end_epoch(state)


@SOME
@given(losses(4), st.sampled_from([0.0, 0.025, 1.0]), st.sampled_from([0.0, 1e-3, 1.0]))
def test_famo(Ls, rate, decay):
    rule, state, before = fj.famo(rate, decay), None, None
    with precisely():
        first = second = logits = decimals(torch.zeros_like(Ls[0]))
        sensitivity = 1.0
        for call, losses in enumerate(Ls):
            found, state = weights(rule, losses, state)
            L = log(decimals(losses))
            z, fall = softmax(logits), 0 * L if before is None else before - L
            slope = z * (fall - z @ fall) + Decimal(decay) * logits
            first = Decimal("0.9") * first + Decimal("0.1") * slope
            second = Decimal("0.999") * second + Decimal("0.001") * slope**2
            t, before = max(call, 1), L
            mean, square = first / (1 - Decimal("0.9") ** t), second / (1 - Decimal("0.999") ** t)
            logits = logits - Decimal(rate) * mean / (root(square) + Decimal("1e-8"))
            # Adam divides rounding of the slopes by their size, or by its epsilon.
            size = max(float(min(root(square))), 1e-8)
            sensitivity += sensitivity * rate * (1 + float(max(abs(L)))) / size if call and rate else 0.0
            check(found, softmax(logits - L), min(2.0, 64 * eps() * sensitivity * (1 + float(max(abs(L))))))


@SOME
@given(st.integers(1, 6), st.integers(0, 999))
def test_weights_that_are_given_or_drawn(m, seed):
    with precisely():
        given_ = gaussian(seed, m)
        check(weights(fj.constant(given_), given_)[0], decimals(given_), 0)
        rule, state, following = fj.random_weights(key(seed)), None, key(seed)
        for _ in range(2):
            now, following = split(following)
            found, state = weights(rule, given_, state)
            check_within(floats(found), floats(softmax(decimals(normal(now, (m,), dtype=torch.float64)))), 16 * eps())
            assert torch.equal(state, following)
