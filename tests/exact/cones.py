"""Problems of few rows in 80 digits: quadratic ones by every set of active constraints, fair shares by Newton."""

from decimal import Decimal

import numpy as np
from exact.decimals import ZERO, length, solved, subsets, unit_rows


def complementary(M, offsets, barred=()):
    """`s >= 0, M s + q >= 0, s'(M s + q) = 0` for every row q; `barred` has one index per row that stays zero.

    Some solution lives on independent rows of M; whichever comes first is taken, as M s is the same for all.
    """
    found = [None] * len(offsets)
    for active in subsets(range(len(M))):
        asked = [k for k in range(len(offsets)) if found[k] is None and not (barred and barred[k] in active)]
        if not asked:
            continue
        part = solved(M[np.ix_(active, active)], -offsets[asked][:, active].T) if active else np.empty((0, len(asked)))
        if part is None:
            continue
        for column, k in enumerate(asked):
            s = np.array([Decimal(0)] * len(M), dtype=object)
            s[active] = part[:, column]
            least = ZERO * (1 + sum(abs(s)))
            free = [i for i in range(len(M)) if not (barred and i == barred[k])]
            if (s >= -least).all() and ((M @ s + offsets[k])[free] >= -least).all():
                found[k] = s
    return found


def on_dual_cone(J, points):
    """The projections of points on `{y: J y >= 0}`, and the multipliers of the unit rows."""
    N, _ = unit_rows(J)
    sizes = [length(x) or Decimal(1) for x in points]
    units = [x / size for x, size in zip(points, sizes, strict=True)]
    found = complementary(N @ N.T, np.array([N @ x for x in units], dtype=object))
    multipliers = [s * size for s, size in zip(found, sizes, strict=True)]
    return [x + s @ N for x, s in zip(points, multipliers, strict=True)], multipliers


def least_norm_weights(J):
    """Weights of the point of least norm in the convex hull of the rows."""
    N, norms = unit_rows(J)
    if not (J != 0).any(1).all():
        zero = ~(J != 0).any(1)
        return zero.astype(int) * Decimal(1) / int(zero.sum())
    b = norms.min() / norms
    (v,) = complementary(N @ N.T + np.outer(b, b), -b[None])
    w = v * b / (v @ b)
    d = w @ J
    assert all(d @ g - d @ d >= -ZERO * norms.min() * length(g) for g in J), "not the point of least norm"
    return w


def of_greatest_least_gain(J, c):
    """The direction in the ball around the mean whose least gain is greatest, the multipliers of the unit rows, and
    that gain; None where no direction is the only one.
    """
    nonzero = (J != 0).any(1)
    centre = J.sum(0) / len(J)
    radius = c * length(centre)
    if not radius:
        return None
    N, norms = unit_rows(J[nonzero])
    x, rho = centre / radius, norms.min() / norms
    C, beta = N @ N.T, N @ x
    for active in subsets(range(len(N)))[1:]:
        both = solved(C[np.ix_(active, active)], np.array([rho[active], beta[active]], dtype=object).T)
        if both is None:
            continue
        turn, fall = both.T  # multipliers `tau turn - fall` give the active rows the gains `tau rho`
        a, b, e = rho[active] @ turn, rho[active] @ fall, beta[active] @ fall - 1
        square = b * b - a * e
        if square < 0:
            continue
        for tau in ((b + square.sqrt()) / a, (b - square.sqrt()) / a):
            v = np.array([Decimal(0)] * len(N), dtype=object)
            v[active] = tau * turn - fall
            least = ZERO * (1 + sum(abs(v)))
            if (v >= -least).all() and (C @ v + beta - tau * rho >= -least).all():
                if tau > 0 and not nonzero.all():
                    return None  # a row of zeros gains nothing
                return centre + radius * (v @ N), v * radius, tau * radius * norms.min()
    return None


def fair_weights(J, alpha, start=None, steps=400):
    """`G w = w^(-1 / alpha)`, w > 0, for rows that are not zero; None where Newton's method does not arrive.

    With unit rows, norms and `y = norms w`: `C y = t y^-p`, `t = norms^(p - 1)`, is where a strictly convex function
    of y is least.
    """
    p = 1 / Decimal(alpha)
    N, norms = unit_rows(J)
    C = N @ N.T
    t = np.array([norm ** (p - 1) for norm in norms], dtype=object)
    y = t ** (1 / (1 + p)) if start is None else start * norms
    for _ in range(steps):
        force = t * y**-p
        gap = C @ y - force
        scale = (y / force) ** Decimal("0.5")
        H = scale[:, None] * C * scale + np.diag([p] * len(J))
        step = -solved(H / max(1, p), scale * gap) / max(1, p)
        change = step * scale / y
        longest = max(abs(change))
        bounded = change if longest < Decimal("0.1") else change / max(1, longest)
        y = y * np.where(bounded > 0, 1 + bounded, 1 / (1 + abs(bounded)))
        if longest < Decimal("1e-30"):
            return y / norms
    return None
