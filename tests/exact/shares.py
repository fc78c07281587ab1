"""Fair shares by Newton's method in 80 digits: whatever it starts from, the residual shows whether it arrived."""

from decimal import Decimal

import numpy as np
from exact.decimals import solved, unit_rows


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
