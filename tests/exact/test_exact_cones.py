"""Rules that solve a quadratic problem or share fairly, against solutions in 80 digits, on degenerate rows."""

from decimal import Decimal

import numpy as np
import torch
from bounds import check_within, eps
from exact.cones import complementary, fair_weights, least_norm_weights, of_greatest_least_gain, on_dual_cone
from exact.decimals import decimals, floats, length, lengths, precisely, unit_rows
from exact.rows import SOME, degenerate, gaussian, preferences, resolution
from hypothesis import example, given
from hypothesis import strategies as st

from functional_jd import aggregate, cagrad, dualproj, fairgrad, mgda, nash_mtl, pcd, upgrad

# What a solver counts as a wrong sign, in roundings of its matrix.
ROUNDINGS = 512


def bound(J, multipliers, size):
    """Rounding of the Gramian moves a projection by its multipliers over the least singular value that J resolves."""
    return ROUNDINGS * eps() * (1 + float(multipliers / (size or 1))) / resolution(J)


def check_direction(J, result, expected, size, error):
    """The weights give the direction, up to an error in units of a size; what is returned is their direction."""
    E, w = decimals(J), decimals(result.weights)
    found = w @ E
    assert length(found - expected) <= Decimal(error) * size
    rounding = Decimal(len(J) * eps(J.dtype)) * (abs(w) @ abs(E))
    check_within(floats(decimals(result.direction)), floats(found), floats(rounding) + 1e-320)
    return found


@SOME
@given(degenerate(), preferences)
def test_upgrad_is_the_sum_of_the_projections(J, preference):
    u = preference(len(J))
    with precisely():
        E, U = decimals(J), decimals(u)
        projections, multipliers = on_dual_cone(E, list(E))
        size = max(s.sum() / norm if norm else 0 for s, norm in zip(multipliers, lengths(E), strict=True))
        error = bound(J, size, 1)
        found = check_direction(J, aggregate(upgrad(u), J), U @ np.array(projections), U @ lengths(E), error)
        assert (unit_rows(E)[0] @ found >= -Decimal(error) * (U @ lengths(E))).all()


@SOME
@given(degenerate(), preferences)
def test_dualproj_is_the_projection_of_the_sum(J, preference):
    u = preference(len(J))
    with precisely():
        E, U = decimals(J), decimals(u)
        (projection,), (s,) = on_dual_cone(E, [U @ E])
        size = U @ lengths(E)
        found = check_direction(J, aggregate(dualproj(u), J), projection, size, bound(J, s.sum(), size))
        assert (unit_rows(E)[0] @ found >= -Decimal(bound(J, s.sum(), size)) * size).all()


@SOME
@given(degenerate())
def test_mgda_is_the_point_of_least_norm_as_accurate_as_the_shortest_row(J):
    with precisely():
        E = decimals(J)
        expected = least_norm_weights(E) @ E
        shortest = min(lengths(E))
        # The weights sum to one: to a unit row belongs one more entry, its share of the shortest row.
        N, norms = unit_rows(E)
        extended = torch.cat([floats(N), floats(shortest / norms).unsqueeze(1)], dim=1)
        error = 2 * ROUNDINGS * eps() / min(resolution(J), resolution(extended)) ** 2
        found = check_direction(J, aggregate(mgda(), J), expected, shortest, error)
        assert (unit_rows(E)[0] @ found >= -Decimal(error) * shortest).all()


@SOME
@given(degenerate(), st.sampled_from([1e-6, 0.1, 0.4, 0.9, 0.999, 1.0, 1.001, 2.0, 10.0, 100.0]))
def test_cagrad_has_the_greatest_least_gain(J, c):
    with precisely():
        E = decimals(J)
        result = aggregate(cagrad(c), J)
        centre = E.sum(0) / len(E)
        if length(centre) <= Decimal("1.1e-7") * sum(lengths(E)) / len(E):
            assert length(centre) >= Decimal("0.9e-7") * sum(lengths(E)) / len(E) or (result.weights == 0).all()
            return
        best = of_greatest_least_gain(E, Decimal(c))
        if best is None or not (result.weights > 0).any():
            # Without a gain for all there is no only direction; rows whose hull is near zero are taken for such.
            N, _ = unit_rows(E)
            assert length(least_norm_weights(N) @ N) <= Decimal("1.1e-6")
            return
        direction, multipliers, _ = best
        size = Decimal(c) * length(centre)
        tilt = float(size / sum(lengths(E)))  # the mean is as accurate as its rows
        error = (1e-12 + bound(J, multipliers.sum(), size) / tilt) / resolution(J)
        check_direction(J, result, direction, size, error)


def compatible(N, shares, weights):
    """Whether some direction of moderate length has all shares; where clearly none has, they are left out."""
    if not max(shares):
        return True
    (s,) = complementary(N @ N.T, -shares[None] / max(shares))
    if s is None or length(s @ N) > 10**5:
        assert (weights[1:] == 0).all()
    return s is not None and length(s @ N) < 10**4


@SOME
@given(
    st.integers(1, 5).flatmap(lambda m: st.lists(degenerate(rows=m, columns=4), min_size=3, max_size=3)),
    st.sampled_from([0.0, 1e-3, 0.02, 0.3, 1.0]),
    st.sampled_from([0.0, 0.9, 0.999]),
)
@example([gaussian(k, 3, 4) for k in range(3)], 0.3, 0.9)
def test_pcd_is_the_nearest_direction_that_gives_all_their_shares(Js, tau, beta):
    rule, state = pcd(tau, beta), None
    with precisely():
        squares = np.array([Decimal(0)] * len(Js[0]), dtype=object)
        for J in Js:
            result = aggregate(rule, J, state)
            state, E = result.state, decimals(J)
            N, _ = unit_rows(E)
            squares = Decimal(beta) * squares + (1 - Decimal(beta)) * lengths(E) ** 2
            sizes = np.array([n / v.sqrt() if v else n for n, v in zip(lengths(E), squares, strict=True)])
            check_within(state["squares"], floats(squares), 16 * eps() * floats(squares))
            others = [j for j in range(1, len(J)) if sizes[j]]
            start, s = sizes[0] * N[0], np.array([Decimal(0)])
            if others:
                shares = Decimal(tau) * sizes[others]
                if not compatible(N[others], shares, result.weights):
                    continue
                offset = N[others] @ start - shares
                (s,) = complementary(N[others] @ N[others].T, offset[None] / max(sizes))
                s = s * max(sizes)
                start = start + s @ N[others]
            reach = length(start) / (sizes[0] + s.sum() or 1)
            if reach > Decimal("2e-6"):
                error = bound(J, s.sum(), sizes[0]) / float(reach) ** 2
                check_direction(J, result, start / length(start) * lengths(E)[0], lengths(E)[0], error)
            elif reach < Decimal("5e-7"):
                assert (result.weights == 0).all()


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
@example([gaussian(k, 3, 4) for k in range(3)], 1.0, 2)
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
            expected = floats(w * clip)
            check_within(result.weights, expected, 8 * sum(J.shape) * eps() * float(reach) * expected + 1e-320)
            state = result.state
