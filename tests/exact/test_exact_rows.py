"""Rules that work row by row or entry by entry, against their algorithms in 80 digits, on degenerate rows."""

from decimal import Decimal

import numpy as np
import pytest
import torch
from bounds import check_within, eps
from exact.decimals import ZERO, decimals, floats, length, lengths, precisely
from exact.rows import SOME, degenerate, resolution
from hypothesis import given
from hypothesis import strategies as st

from functional_jd import aggregate, graddrop, gradvac, pcgrad, trimmed_mean
from functional_jd.aggregation.hyper_parameters import random_visit_orders
from functional_jd.random import key, split, uniform

seeds = st.integers(0, 1000)
# Targets stay so far from -1 and 1.
MARGIN = Decimal(2) ** -40


def orders_of(state, m):
    subkey, following = split(state)
    return random_visit_orders(subkey, m).tolist(), following


@SOME
@given(degenerate(), seeds)
def test_pcgrad_projects_in_the_order_of_its_key(J, seed):
    with precisely():
        E = decimals(J)
        direction = 0 * E[0]
        orders, following = orders_of(key(seed), len(J))
        for i, order in enumerate(orders):
            p = E[i]
            for j in order:
                product = p @ E[j]
                p = p - product / (E[j] @ E[j]) * E[j] if product < 0 else p
            direction = direction + p
        result = aggregate(pcgrad(key(seed)), J)
        w = decimals(result.weights)
        assert torch.equal(result.state, following)
        assert length(w @ E - direction) <= Decimal(4 * sum(J.shape) * len(J) * eps()) * sum(lengths(E))


def bent(E, i, order, targets, beta):
    """Row i after the moves of a call, its new targets, and how near it came to nothing."""
    p, learnt, least = E[i], targets.copy(), Decimal(1)
    for j in order:
        sizes = length(p) * length(E[j])
        cosine = p @ E[j] / sizes if sizes else Decimal(0)
        target = max(MARGIN - 1, min(targets[j], 1 - MARGIN))
        learnt[j] = (1 - beta) * targets[j] + beta * cosine
        if cosine < target and sizes:
            sine = max(1 - cosine**2, Decimal(0)).sqrt()
            least = min(least, sine, (1 - target**2).sqrt())
            p = p + length(p) / length(E[j]) * (target * sine / (1 - target**2).sqrt() - cosine) * E[j]
    return p, learnt, least


@SOME
@given(
    st.integers(1, 4).flatmap(
        lambda m: st.lists(
            degenerate(rows=m, columns=6, kinds=("generic", "integers", "a row of zeros", "nearly dependent")),
            min_size=3,
            max_size=3,
        )
    ),
    st.sampled_from([0.0, 0.1, 0.5, 1.0]),
    seeds,
)
def test_gradvac_bends_in_the_order_of_its_keys_call_after_call(Js, beta, seed):
    rule, state, following = gradvac(key(seed), beta), None, key(seed)
    with precisely():
        targets = np.array([[Decimal(0)] * len(Js[0])] * len(Js[0]), dtype=object)
        condition = 1.0
        for J in Js:
            result = aggregate(rule, J, state)
            E, state = decimals(J), result.state
            orders, following = orders_of(following, len(J))
            moved = [bent(E, i, order, targets[i], Decimal(beta)) for i, order in enumerate(orders)]
            least = float(min(least for _, _, least in moved))
            if least < 1e-4:
                return  # what is cancelled all but for rounding has any cosine
            condition *= 4 / least**2
            w = decimals(result.weights)
            error = Decimal(16 * sum(J.shape) * eps() * condition)
            assert length(w @ E - sum(p for p, _, _ in moved)) <= error * (abs(w) @ lengths(E))
            targets = np.array([learnt for _, learnt, _ in moved], dtype=object)
            check_within(state.targets, floats(targets), float(error))
            assert torch.equal(state.key, following)


@SOME
@given(degenerate(), seeds, st.sampled_from([0.0, 0.25, 1.0]))
def test_graddrop_keeps_the_sign_that_its_number_picks(J, seed, leak):
    with precisely():
        E, U = decimals(J), decimals(uniform(split(key(seed))[0], (J.shape[1],)))
        size = abs(E).sum(0)
        purity = np.where(size == 0, Decimal(0), np.where(E > 0, E, Decimal(0)).sum(0) / np.where(size == 0, 1, size))
        picked = np.where(purity > U, E > 0, E < 0)
        expected = np.where(picked, E, Decimal(leak) * E).sum(0)
        found = aggregate(graddrop(key(seed), [leak] * len(J)), J).direction
        sure = abs(purity - U) > 4 * len(J) * Decimal(eps())
        bound = len(J) * eps(J.dtype) * floats(size) + 1e-320
        check_within(found, floats(np.where(sure, expected, decimals(found))), bound)


@SOME
@given(degenerate(), st.integers(0, 2))
def test_trimmed_mean_leaves_the_ends_out(J, trim):
    if len(J) < 2 * trim + 1:
        with pytest.raises(ValueError, match="trimmed_mean: expected at least"):
            aggregate(trimmed_mean(trim), J)
        return
    with precisely():
        E = np.sort(decimals(J), axis=0)[trim : len(J) - trim]
        bound = len(J) * eps(J.dtype) * floats(abs(E).sum(0) / len(E)) + 1e-320
        check_within(aggregate(trimmed_mean(trim), J).direction, floats(E.sum(0) / len(E)), bound)


@pytest.mark.parametrize("distance", [1e-5, 1e-6, 1e-8, 0.0])
def test_a_row_that_the_next_one_cancels_is_treated_alike_by_pcgrad_and_gradvac_to_1e_6(distance):
    J = torch.tensor([[1.0, 0.0, 0.0], [-1.0, distance, 0.0], [0.0, -1.0, 1.0]], dtype=torch.float64)
    assert resolution(J) >= 1e-8
    with precisely():
        for seed in range(6):
            rules = pcgrad(key(seed)), gradvac(key(seed))
            first, second = (decimals(aggregate(rule, J).weights) @ decimals(J) for rule in rules)
            bound = Decimal("1e-6") if 0 < distance <= 1e-6 else Decimal(256 * eps())
            assert length(first - second) <= bound + ZERO
