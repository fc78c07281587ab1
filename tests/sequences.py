"""Jacobians and losses that tests of rules share."""

import numpy as np
import torch
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

J3 = torch.tensor([[1.0, 2, 0, -1], [0, 1, -2, 1], [3, -1, 1, 0]], dtype=torch.float64)
DEPENDENT = torch.tensor([[1.0, 2], [-1, 1], [3, 0]], dtype=torch.float64)


def integer_jacobians(rows=(1, 6), columns=(1, 6), most=4):
    """Small integers: their Gramians are exact, and zero, equal and opposite rows are frequent."""
    return st.tuples(st.integers(*rows), st.integers(*columns)).flatmap(
        lambda shape: hnp.arrays(np.float64, shape, elements=st.integers(-most, most).map(float)).map(torch.from_numpy)
    )


def random_rows(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def sequences(least=1):
    """Four Jacobians of small integers, and losses from the least on."""
    shapes = st.tuples(st.just(4), st.integers(1, 4), st.integers(1, 4))
    return shapes.flatmap(
        lambda shape: st.tuples(
            hnp.arrays(np.float64, shape, elements=st.integers(-3, 3)),
            hnp.arrays(np.float64, shape[:2], elements=st.integers(least, 8)),
        )
    )


def number(k):
    """The k-th of some Jacobians."""
    return ((torch.arange(12).reshape(3, 4) * (k + 3) + k * k) % 11 - 5).double()


def values(k):
    """And the losses that it came with."""
    return ((torch.arange(3) * (k + 2) + k) % 5 + 1).double() / 2
