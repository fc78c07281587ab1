"""Rules that invert the cosines or the Gramian, against eigenvalues in 80 digits, on degenerate rows."""

from decimal import Decimal

import numpy as np
import torch
from bounds import eps
from exact.decimals import ZERO, decimals, eigen, length, lengths, precisely, root, unit_rows
from exact.rows import KINDS, SOME, degenerate, gaussian, preferences
from hypothesis import given
from hypothesis import strategies as st

from functional_jd import aggregate, aligned_mtl, config, imtl_g


def spectrum(A):
    """What is kept: eigenvalues, eigenvectors as rows; and the least one relative to the largest, None if in doubt."""
    values, vectors = eigen(A)
    cut = 8 * len(A) * Decimal(eps()) * max(values)
    kept = values > max(cut, 0)
    doubtful = ((values > cut / 8) & (values < 8 * cut)).any()
    gap = None if doubtful else float(min(values[kept]) / max(values)) if kept.any() else 1.0
    return values[kept], vectors.T[kept], gap


def error_of(J, gap, *sizes):
    return Decimal(64 * sum(J.shape) * eps() / gap) * sum(sizes)


@SOME
@given(degenerate(), preferences)
def test_config(J, preference):
    with precisely():
        E, u = decimals(J), decimals(preference(len(J)))
        N, norms = unit_rows(E)
        values, V, gap = spectrum(N @ N.T)
        w = decimals(aggregate(config([float(x) for x in u]), J).weights)
        if gap is None:
            return
        attained = V.T @ (V @ u) if len(V) else 0 * u
        if max(abs(attained)) < Decimal("0.9e-10") * max(u):
            assert (w == 0).all()
        elif max(abs(attained)) > Decimal("1.1e-10") * max(u):
            best = (V.T @ (V @ u / values)) @ N
            total = (norms @ attained) / length(best)
            # Relative to the projections that are summed, which may cancel, and to the preference, of which little
            # may be attainable.
            lost = 0 if len(values) == len(u) else sum(norms) * max(u)
            size = abs(total) + (norms @ abs(attained) + lost) / length(best)
            error = error_of(J, gap, size) * max(u) / max(abs(attained))
            assert length(w @ E - total * best / length(best)) <= error


@SOME
@given(degenerate())
def test_imtl_g(J):
    with precisely():
        E = decimals(J)
        nonzero = (E != 0).any(1)
        w = decimals(aggregate(imtl_g(), J).weights)
        if not nonzero.any():
            assert (w == 0).all()
            return
        N, norms = unit_rows(E[nonzero])
        values, V, gap = spectrum(N @ N.T)
        if gap is None:
            return
        if len(values) == len(N):
            v, attained = (V.T @ (V.sum(1) / values)) / norms, 1
        else:
            values, V, gap = spectrum(E @ E.T)
            if gap is None:
                return
            v, nonzero = V.T @ (V @ lengths(E) / values), slice(None)
            attained = max(abs(V.T @ (V @ lengths(E)))) / max(lengths(E))
        total, terms = sum(v), sum(abs(v))
        rounding = Decimal(64 * sum(J.shape) * eps() / gap)
        if attained < Decimal("1e-11") or abs(total) < Decimal("1e-15") * terms:
            assert (w == 0).all()
        elif attained > Decimal("1e-9") and abs(total) > max(rounding, Decimal("1e-12")) * terms * 4:
            expected = (v / total) @ E[nonzero]
            size = (abs(v) @ lengths(E[nonzero])) / abs(total)
            error = rounding * size * terms / abs(total) / attained
            assert length(w @ E - expected) <= error


def test_imtl_g_has_no_weights_for_rows_that_sum_to_zero():
    for seed in range(60):  # the exact weights sum to zero, the computed ones to the rounding of an inverse
        near = torch.tensor([[1, 0], [1, 10.0 ** -(2 + seed % 3)]], dtype=torch.float64)
        turned = torch.kron(near, torch.eye(3).double() - 1 / 3) @ torch.linalg.qr(gaussian(seed, 6, 6))[0]
        for J in (KINDS["stationary"](gaussian(seed, 6, 5), seed), turned):
            assert not aggregate(imtl_g(), J).weights.any()


@SOME
@given(degenerate(), preferences, st.sampled_from(["min", "median", "rmse"]))
def test_aligned_mtl(J, preference, mode):
    with precisely():
        E, u = decimals(J), decimals(preference(len(J)))
        values, V, gap = spectrum(E @ E.T)
        w = decimals(aggregate(aligned_mtl([float(x) for x in u], mode), J).weights)
        if not len(values):
            assert (w == 0).all()
        if gap is None or not len(values):
            return
        values_ascending = sorted(values)
        s = {"min": values_ascending[0], "median": values_ascending[(len(values) - 1) // 2]}.get(
            mode, sum(values) / len(values)
        )
        expected = s.sqrt() * ((V.T @ (V @ u / root(values))) @ E)
        assert length(w @ E - expected) <= error_of(J, gap, s.sqrt() * length(u)) + ZERO * np.max(abs(E))
