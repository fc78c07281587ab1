"""Fair shares, against Newton's method in 80 digits, on degenerate rows and over all hyper-parameters."""

from decimal import Decimal

import numpy as np
from bounds import check_within, eps
from exact.cones import least_norm_weights
from exact.decimals import decimals, floats, length, lengths, precisely, unit_rows
from exact.rows import SOME, degenerate
from exact.shares import fair_weights
from hypothesis import given
from hypothesis import strategies as st

from functional_jd.aggregation.aggregate import aggregate
from functional_jd.aggregators.fairgrad import fairgrad
from functional_jd.aggregators.nash_mtl import nash_mtl


def hull(E):
    """How near to zero the unit rows have a convex combination."""
    N, _ = unit_rows(E)
    return float(length(least_norm_weights(N) @ N))


def without_zeros(J):
    kept = (J != 0).any(1)
    return kept, J[kept]


@SOME
@given(degenerate(), st.sampled_from([0.1, 0.3, 0.5, 0.9, 1.0, 1.5, 2.0, 5.0, 10.0]))
def test_fairgrad_solves_its_equation_and_nothing_else(J, alpha):
    result = aggregate(fairgrad(alpha), J)
    kept, rows = without_zeros(J)
    assert (result.weights[~kept] == 0).all()
    if not len(rows):
        return
    with precisely():
        E, w = decimals(rows), decimals(result.weights[kept])
        distance, norms = hull(E), lengths(E)
        if distance < 0.9e-7 and (alpha >= 1 or not (w > 0).all()):
            assert (w == 0).all()
            return
        if distance < 1.1e-7 and (w == 0).all():
            return
        assert (w > 0).all()
        power = 1 / Decimal(alpha)
        wanted = w**-power
        # The Gramian is rounded, the power too, whose exponent has the size of the logarithm.
        terms = norms * (w @ norms) + wanted * (1 + max(abs(norm.ln()) for norm in norms))
        if rows.shape[1] and max(norms) <= Decimal("1e12") * min(norms):
            digits = 8 * sum(rows.shape) * eps() * max(1.0, float(power))
            assert (abs(E @ (w @ E) - wanted) <= Decimal(digits) * terms).all()
        if distance > 1e-4:
            exact = fair_weights(E, alpha, start=w, steps=100)
            size = exact @ norms
            error = 64 * sum(rows.shape) * eps() * (1 + 1 / alpha) * 70 / distance**2
            assert length(w @ E - exact @ E) <= Decimal(error) * size


@SOME
@given(
    st.integers(1, 5).flatmap(lambda m: st.lists(degenerate(rows=m, columns=5), min_size=3, max_size=3)),
    st.sampled_from([0.0, 1e-3, 1.0, 10.0]),
    st.sampled_from([1, 2]),
)
def test_nash_mtl_bargains_clips_and_repeats(Js, max_norm, every):
    rule, state = nash_mtl(max_norm, every), None
    with precisely():
        for call, J in enumerate(Js):
            result = aggregate(rule, J, state)
            E, norms = decimals(J), lengths(decimals(J))
            if call % every == 0:
                kept, rows = without_zeros(J)
                w = np.array([Decimal(0)] * len(J), dtype=object)
                if len(rows):
                    distance = hull(decimals(rows))
                    if 0.9e-7 < distance < 1e-5:
                        return
                    if distance >= 1e-5:
                        start = decimals(result.state.weights[kept])
                        assert (start > 0).all()
                        w[kept.numpy()] = fair_weights(decimals(rows), 1.0, start)
                error = 64 * sum(J.shape) * eps() / (distance**2 if w.any() else 1.0)
                found = decimals(result.state.weights)
                assert (abs(found - w) <= Decimal(error) * w).all()
                w = found  # what is repeated is what was found
            direction = w @ E
            clip = (
                min(Decimal(1), Decimal(max_norm) / length(direction)) if max_norm and length(direction) else Decimal(1)
            )
            # Rounding of w'G w: of its terms, against what is left of them.
            reach = ((w @ norms) / length(direction)) ** 2 if length(direction) else Decimal(1)
            check_within(
                result.weights, floats(w * clip), 8 * sum(J.shape) * eps() * float(reach) * floats(w * clip) + 1e-320
            )
            state = result.state
