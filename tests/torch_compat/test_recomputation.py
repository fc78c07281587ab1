"""Modes and modules where a checkpoint runs again."""

import gc
import weakref
from contextlib import ExitStack

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.checkpoint import checkpoint

from functional_jd.torch_compat.recomputation import RecomputedMode


class Scales(RecomputedMode):
    """Doubles what `sin` returns, and counts."""

    calls = 0

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.note_checkpoints()
        y = func(*args, **(kwargs or {}))
        if func is not torch.sin:
            return y
        type(self).calls += 1
        return y * 2


class Shifts(RecomputedMode):
    """Adds one to what `sin` returns: another result inside `Scales` than around it."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.note_checkpoints()
        y = func(*args, **(kwargs or {}))
        return y + 1 if func is torch.sin else y


def chain(functions, x, depth):
    """Apply functions one after the other: as they are, or each in `depth` checkpoints inside one another."""
    for f in functions:
        for _ in range(depth):
            f = lambda x, f=f: checkpoint(f, x, use_reentrant=False)
        x = f(x)
    return x


def block(x):
    return torch.sin(x.exp()).square()


@given(st.lists(st.sampled_from([Scales, Shifts]), max_size=3), st.integers(1, 2), st.integers(1, 3))
def test_what_runs_again_runs_under_the_same_modes_in_the_same_order(modes, blocks, depth):
    gradients = []
    for nested in (0, depth):
        x = torch.tensor([0.5, -1.0], dtype=torch.float64, requires_grad=True)
        with ExitStack() as stack:
            for mode in modes:
                stack.enter_context(mode())
            y = chain([block] * blocks, x, nested).sum()
        first = torch.autograd.grad(y, x, create_graph=True)[0]
        gradients.append([first, *torch.autograd.grad(first.sum(), x)])
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))


def test_the_mode_is_active_in_the_forward_pass_and_in_each_backward_pass():
    x = torch.ones(2, requires_grad=True)
    Scales.calls = 0
    with Scales():
        y = checkpoint(block, x, use_reentrant=False).sum()
    counts = [Scales.calls]
    for _ in range(2):
        torch.autograd.grad(y, x, retain_graph=True)
        counts.append(Scales.calls)
    assert counts == [1, 2, 3]


def test_a_mode_inside_a_checkpoint_is_not_active_around_itself():
    def inside(x):
        y = torch.sin(x)
        with Scales():
            return torch.sin(y) * torch.sin(x).exp()

    x = torch.ones(2, requires_grad=True)
    expected, found = (
        torch.autograd.grad(f(x).sum(), x)[0] for f in (inside, lambda x: checkpoint(inside, x, use_reentrant=False))
    )
    assert torch.equal(found, expected)


def test_nothing_keeps_the_graph_alive():
    def run():
        x = torch.ones(2, requires_grad=True)
        w = torch.ones(2)
        with Scales():
            y = checkpoint(lambda x: torch.sin(x * w), x, use_reentrant=False)
        torch.autograd.grad(y.sum(), x)
        return weakref.ref(w)

    gc.disable()
    try:
        assert run()() is None
    finally:
        gc.enable()
