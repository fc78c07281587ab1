"""Jacobians and losses that tests of rules share."""

import numpy as np
import torch
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

import functional_jd as jd

J3 = torch.tensor([[1.0, 2, 0, -1], [0, 1, -2, 1], [3, -1, 1, 0]], dtype=torch.float64)
DEPENDENT = torch.tensor([[1.0, 2], [-1, 1], [3, 0]], dtype=torch.float64)


def integer_jacobians(rows=(1, 6), columns=(1, 6), most=4):
    """Small integers: their Gramians are exact, and zero, equal and opposite rows are frequent."""
    return st.tuples(st.integers(*rows), st.integers(*columns)).flatmap(
        lambda shape: hnp.arrays(np.float64, shape, elements=st.integers(-most, most).map(float)).map(torch.from_numpy)
    )


def random_rows(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def rows_of_condition(m, condition, seed=0, n=None):
    """Rows `[m, n]` with singular values from 1 to 1 / condition."""
    left, right = (torch.linalg.qr(random_rows(k, m, seed=2 * seed + i))[0] for i, k in enumerate((m, n or m + 10)))
    return left * condition ** -torch.linspace(0, 1, m, dtype=torch.float64) @ right.mT


def rows_of_kind(kind, m, seed=0):
    """Rows `[m, n]`; of `ill`, singular values from 1 to 1e-7."""
    draw = torch.Generator().manual_seed(100 * seed + m)
    normal = lambda *shape: torch.randn(shape, generator=draw, dtype=torch.float64)
    J = normal(m, max(1, m // 2) if kind == "dependent" else m + 10)
    left, right = (m + 1) // 2, m // 2
    others = {
        "conflicting": lambda: J - 1.2 * J.mean(0),
        "stationary": lambda: J - J.mean(0),
        "low rank": lambda: J[:, :left] @ normal(left, m + 5),
        "rank one": lambda: J[:, :1] * J[:1],
        "opposite": lambda: torch.cat([J[:-1], -J[:1]]),
        "halves": lambda: torch.cat([J[:left], -J[:right]]),
        "repeated": lambda: torch.cat([J[:left], J[:right]]),
        "zeros": lambda: J * (torch.arange(m) % 2)[:, None],
        "integers": lambda: torch.randint(-2, 3, (m, max(1, m - 1)), generator=draw).double(),
        "scaled": lambda: J * 10 ** (24 * torch.rand(m, 1, generator=draw, dtype=torch.float64) - 12),
        "ill": lambda: rows_of_condition(m, 1e7, seed),
    }
    return others[kind]() if kind in others else J


def number(k, columns=4):
    """The k-th of some Jacobians."""
    return ((torch.arange(3 * columns).reshape(3, columns) * (k + 3) + k * k) % 11 - 5).double()


def values(k):
    """And the losses that it came with."""
    return ((torch.arange(3) * (k + 2) + k) % 5 + 1).double() / 2


# Losses of four calls.
LOSSES = torch.tensor([[1, 2, 4], [0.5, 3, 1], [2, 0.25, 1.5], [1, 1, 0.125]], dtype=torch.float64)
# Losses after each of these steps, on its batch.
AFTER = torch.tensor([[0.9, 1.8, 4.2], [0.6, 2.5, 0.5], [1, 0.5, 1.25], [0.8, 0.9, 0.1]], dtype=torch.float64)
# Rows that tell weights apart: the direction is the weights.
ROWS = torch.eye(3, dtype=torch.float64)


def calls(rule, sequence, state=None):
    """The weights of every call, and the last state."""
    weights = []
    for losses in sequence:
        _, found, state = jd.aggregate(rule, ROWS, state, losses=losses)
        weights.append(found)
    return torch.stack(weights), state


def compiled(f):
    torch.compiler.reset()  # the graphs of other tests count against the limit of this one
    return torch.compile(f, fullgraph=True, backend="aot_eager")
