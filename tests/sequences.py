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
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def rows_of_kind(kind, m, seed=0):
    """Rows `[m, n]`; of `ill`, singular values from 1 to 1e-7."""
    draw = torch.Generator().manual_seed(100 * seed + m)
    J = torch.randn(m, max(1, m // 2) if kind == "dependent" else m + 10, generator=draw, dtype=torch.float64)
    if kind == "conflicting":
        J = J - 1.2 * J.mean(0)
    elif kind == "opposite":
        J[-1] = -J[0]
    elif kind == "zeros":
        J[::2] = 0
    elif kind == "integers":
        J = torch.randint(-2, 3, (m, max(1, m - 1)), generator=draw).double()
    elif kind == "ill":
        left, _, right = torch.linalg.svd(J, full_matrices=False)
        J = left * 10.0 ** -torch.linspace(0, 7, m, dtype=torch.float64) @ right
    return J


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
