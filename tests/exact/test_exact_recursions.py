"""Rules with a memory, against their recursions replayed in 80 digits, on degenerate rows that change."""

from decimal import Decimal

import numpy as np
from bounds import eps
from exact.decimals import decimals, exp, length, lengths, precisely, root, softmax, unit_rows
from exact.rows import DTYPES, SCALES, SOME, degenerate, gaussian
from hypothesis import example, given
from hypothesis import strategies as st

from functional_jd import aggregate, cr_mogm, db_mtl, excess_mtl, gradnorm, mgda, moco, modo, sdmgrad

CALLS = 3
GENERIC = [gaussian(k, 3, 4) for k in range(CALLS)]


def sequences(scales=tuple(SCALES)):
    """Jacobians of three calls, of one shape and dtype."""
    shapes = st.tuples(st.integers(1, 5), st.integers(1, 6), st.sampled_from(DTYPES))
    return shapes.flatmap(
        lambda shape: st.lists(degenerate(*shape[:2], shape[2:], scales=scales), min_size=CALLS, max_size=CALLS)
    )


def losses_for(Js, seed):
    """Positive losses of order one for every call."""
    return [gaussian(seed + call, len(J)).abs() + 0.1 for call, J in enumerate(Js)]


def zeros(*shape):
    return np.full(shape, Decimal(0), dtype=object)


def on_simplex(y):
    """The nearest point with non-negative entries that sum to one."""
    largest = sorted(y, reverse=True)
    theta = max((sum(largest[: k + 1]) - 1) / (k + 1) for k in range(len(y)))
    return np.array([max(v - theta, Decimal(0)) for v in y], dtype=object)


def check(found, expected, roundings):
    assert max(abs(found - expected)) <= min(Decimal(2), Decimal(eps()) * Decimal(roundings))


@SOME
@given(sequences(), st.sampled_from([0.0, 0.1, 0.9, 0.999]))
@example(GENERIC, 0.9)
def test_cr_mogm_averages_the_weights(Js, momentum):
    rule, state, average = cr_mogm(mgda(), momentum), None, None
    with precisely():
        for J in Js:
            result = aggregate(rule, J, state)
            state, new = result.state, decimals(aggregate(mgda(), J).weights)
            average = new if average is None else Decimal(momentum) * average + (1 - Decimal(momentum)) * new
            check(decimals(result.weights), average, 4 * CALLS)


@SOME
@given(sequences(), st.sampled_from([1e-3, 0.1, 1.0, 10.0]), st.sampled_from([0.0, 0.1, 10.0]))
@example(GENERIC, 0.1, 0.1)
def test_modo_steps_on_the_simplex(Js, rate, ridge):
    rule, state, sensitivity = modo(rate, ridge), None, Decimal(1)
    with precisely():
        w = zeros(len(Js[0])) + Decimal(1) / len(Js[0])
        for J, other in zip(Js, Js[1:] + Js[:1], strict=True):
            result = aggregate(rule, J, state, other)
            E, F = decimals(J), decimals(other)
            w = on_simplex(w - Decimal(rate) * (E @ (w @ F) + Decimal(ridge) * w))
            growth = Decimal(rate) * (sum(lengths(E)) * sum(lengths(F)) + Decimal(ridge))
            sensitivity = sensitivity * (1 + growth) + growth
            check(decimals(result.weights), w, 8 * sum(J.shape) * sensitivity)
            state = result.state


@SOME
@given(sequences(), st.sampled_from([0.01, 0.1]), st.sampled_from([0.0, 0.5]), st.sampled_from([0.0, 0.3, 10.0]))
@example(GENERIC, 0.1, 0.5, 0.3)
def test_sdmgrad_steps_on_the_simplex_with_momentum(Js, rate, momentum, pull):
    u = [1.0 + k % 2 for k in range(len(Js[0]))]
    rule, state, sensitivity = sdmgrad(rate, momentum, 3, pull, u), None, Decimal(1)
    with precisely():
        U, w = decimals(u), zeros(len(u)) + Decimal(1) / len(u)
        for J in Js:
            result = aggregate(rule, J, state, J)
            E = decimals(J)
            scale = sum(lengths(E)) / len(E)
            A = E @ E.T / (scale**2 or 1)
            v, growth = zeros(len(u)), Decimal(2 * rate) * len(E) ** 2 * (1 + Decimal(pull) * max(U))
            for _ in range(3):
                v = Decimal(momentum) * v + A @ (w + Decimal(pull) * U)
                w = on_simplex(w - Decimal(rate) * v)
                sensitivity = sensitivity * (1 + growth) + growth
            check(decimals(result.state["inner"]), w, 8 * sum(J.shape) * sensitivity)
            expected = (w + Decimal(pull) * U) / (1 + Decimal(pull))
            check(decimals(result.weights), expected, 8 * sum(J.shape) * (sensitivity + max(U)))
            state = result.state


@SOME
@given(sequences(), st.sampled_from([0.01, 1.0, 10.0]), st.sampled_from([0, 2]))
@example(GENERIC, 1.0, 2)
def test_excess_mtl_multiplies_by_the_risk_relative_to_its_baseline(Js, rate, n_warmup):
    rule, state = excess_mtl(rate, n_warmup), None
    with precisely():
        m, n = Js[0].shape
        roots, baseline, logs, exponents = zeros(m, n), zeros(m), zeros(m), Decimal(0)
        for call, J in enumerate(Js):
            result = aggregate(rule, J, state)
            E = decimals(J)
            roots = root(roots**2 + E**2)
            risk = np.where(E == 0, Decimal(0), E**2 / np.where(E == 0, 1, roots)).sum(1)
            mean = (call * baseline + risk) / (call + 1)
            baseline = mean if call < max(n_warmup, 1) else np.where(baseline == 0, risk, baseline)
            excess = Decimal(rate) * (risk if call == 0 else risk / np.where(baseline == 0, 1, baseline))
            if call >= n_warmup:
                logs, exponents = logs + excess - max(logs + excess), exponents + max(excess)
            # Roots and risks are in the dtype of the rows, at least float32.
            digits = Decimal(eps(J.dtype) if J.dtype.itemsize > 2 else 2.0**-23) / Decimal(eps())
            check(decimals(result.weights), softmax(logs), 16 * n * digits * (1 + exponents))
            state = result.state


@SOME
@given(
    sequences(("", "spread")), st.sampled_from([0.0, 0.1, 0.9]), st.sampled_from([0.0, 0.5, 2.0]), st.integers(0, 99)
)
@example(GENERIC, 0.9, 0.5, 0)
def test_db_mtl_sums_averages_of_one_length(Js, beta, decay, seed):
    rule, state = db_mtl(beta, decay), None
    with precisely():
        rows = terms = zeros(*Js[0].shape)
        for call, (J, values) in enumerate(zip(Js, losses_for(Js, seed), strict=True), start=1):
            result = aggregate(rule, J, state, losses=values)
            keep, E = Decimal(beta) / Decimal(call) ** Decimal(decay), decimals(J) / decimals(values)[:, None]
            rows, terms = keep * rows + (1 - keep) * E, keep * terms + (1 - keep) * abs(E)
            norms = lengths(rows)
            # Rows that cancel in the average keep the rounding of what has cancelled.
            lost = max((length(t) / norm for t, norm in zip(terms, norms, strict=True) if norm), default=Decimal(1))
            expected = sum(
                (max(norms) / norm * row for row, norm in zip(rows, norms, strict=True) if norm), zeros(J.shape[1])
            )
            error = 16 * sum(J.shape) * Decimal(eps(J.dtype)) * lost * len(J) * max(norms)
            if lost < Decimal("1e5"):
                assert length(decimals(result.direction) - expected) <= error
            state = result.state


@SOME
@given(
    sequences(),
    st.sampled_from([0.01, 0.5, 1.0]),
    st.sampled_from([0.0, 0.1, 10.0]),
    st.sampled_from([0.0, 1.0]),
    st.sampled_from([0.0, 0.5]),
    st.integers(0, 99),
)
@example(GENERIC, 0.5, 0.1, 1.0, 0.5, 0)
def test_moco_weighs_averages_of_the_length_of_the_losses(Js, beta, gamma, rho, decay, seed):
    rule, state = moco(beta, gamma, rho, beta_sigma=decay, gamma_sigma=decay / 2), None
    with precisely():
        m, n = Js[0].shape
        rows, w, sensitivity = zeros(m, n), zeros(m) + Decimal(1) / m, Decimal(1)
        for call, (J, values) in enumerate(zip(Js, losses_for(Js, seed), strict=True), start=1):
            result = aggregate(rule, J, state, losses=values)
            b, c = (Decimal(x) / Decimal(call) ** Decimal(y) for x, y in ((beta, decay), (gamma, decay / 2)))
            L, (N, _) = decimals(values), unit_rows(decimals(J))
            rows = rows - b * (rows - L[:, None] * N)
            w = softmax(w - c * (rows @ (w @ rows) + Decimal(rho) * w))
            sensitivity = sensitivity * (1 + c * (sum(L) ** 2 + Decimal(rho))) + c * sum(L) ** 2
            digits = Decimal(eps(J.dtype) if J.dtype.itemsize > 2 else 2.0**-23) / Decimal(eps())
            check(decimals(result.state.weights), w, 16 * (m + n) * CALLS * digits * sensitivity)
            last = Decimal(eps(J.dtype)) / Decimal(eps()) + digits * sensitivity
            error = 16 * (m + n) * CALLS * Decimal(eps()) * last * (sum(L) + 4)
            assert length(decimals(result.direction) - w @ rows) <= error
            state = result.state


@SOME
@given(sequences(), st.sampled_from([0.0, 0.5, 1.5, 10.0]), st.sampled_from([0.025, 0.5]), st.integers(0, 99))
@example(GENERIC, 1.5, 0.5, 0)
def test_gradnorm_steps_along_the_signs_of_the_excess_norms(Js, alpha, rate, seed):
    rule, state = gradnorm(alpha, rate), None
    with precisely():
        logits, initial, sensitivity = zeros(len(Js[0])), None, Decimal(1)
        for J, values in zip(Js, losses_for(Js, seed), strict=True):
            result = aggregate(rule, J, state, losses=values)
            L, state = decimals(values), result.state
            initial = L if initial is None else initial
            w = len(L) * softmax(logits)
            check(decimals(result.weights) / len(L), w / len(L), 64 * len(L) * sensitivity)
            norms = w * lengths(decimals(J))
            relative = norms / (sum(norms) / len(L) or 1)
            progress = L / initial
            target = exp(Decimal(alpha) * np.array([(q / (sum(progress) / len(L))).ln() for q in progress]))
            error = relative - target
            if any(0 < abs(e) < Decimal(2) ** -38 for e in error):
                return  # where the sign is linear, rounding is multiplied by 2^40
            slopes = np.array([Decimal(int(np.sign(e))) for e in error]) * relative
            logits = logits - Decimal(rate) * (slopes - w / len(L) * sum(slopes))
            sensitivity = sensitivity * (1 + 4 * Decimal(rate) * len(L))
