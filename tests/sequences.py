"""What every rule must show that looks at Jacobian and losses and remembers them, beside the laws of the kit.

`check_slopes` compares the third of three calls with finite differences, `check_batch` with loops.
"""

import numpy as np
import torch
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from functional_jd.aggregation.aggregate import aggregate, start
from functional_jd.testing.measures import structure_of


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


def third(rule):
    """The direction of the third call, as a function of Jacobian and losses."""

    def f(J, losses):
        state = aggregate(rule, J, losses=losses).state
        state = aggregate(rule, J.sin(), state, losses=losses + 1).state
        return aggregate(rule, J * J, state, losses=losses**2).direction

    return f


def check_form(rule):
    """The state keeps its form from the start on."""
    half, losses = number(0).half(), values(0).half()
    old = start(rule, half, losses=losses)
    assert structure_of(old) == structure_of(aggregate(rule, half, old, losses=losses).state)
    return old


def check_slopes(rule):
    """Derivatives are those of finite differences, and finite where a row is zero."""
    f = third(rule)
    inputs = (number(1).add(0.5).div(3).requires_grad_(), values(1).requires_grad_())
    assert torch.autograd.gradcheck(f, inputs, check_forward_ad=True)
    J = number(1)
    J[1] = 0
    assert torch.func.grad(lambda J: f(J, values(1)).sum())(J).isfinite().all()
    _, tangent = torch.func.jvp(lambda J: f(J, values(1)), (J,), (torch.ones_like(J),))
    assert tangent.isfinite().all()


def check_batch(rule):
    """A batch is the loop."""
    f = third(rule)
    batch, losses = (torch.stack([make(k) for k in range(3)]) for make in (number, values))
    loop = torch.stack([f(*case) for case in zip(batch, losses, strict=True)])
    torch.testing.assert_close(torch.vmap(f)(batch, losses), loop)
