"""Jacobians by a loop of plain autograd: the expectation that engines are compared with."""

import dataclasses
from functools import cache

import pytest
import torch
from bounds import check_within, eps
from torch.utils import _pytree
from zoo import BATCH, MODELS, by_example, plain, tasks

from functional_jd.objectives import PerExample

KINDS = {"plain": plain, "by_example": by_example, "tasks": tasks}


every_kind = pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)


CASES = [(name, kind) for name in MODELS for kind in KINDS if kind != "by_example" or MODELS[name]().single]


WIDE = {torch.float64: 1e-9, torch.float32: 1e-4, torch.bool: 0.0}


def leaves(tree):
    """Dict keys sorted, all else in order."""
    if isinstance(tree, dict):
        return [leaf for key in sorted(tree) for leaf in leaves(tree[key])]
    if isinstance(tree, list | tuple):
        return [leaf for part in tree for leaf in leaves(part)]
    if dataclasses.is_dataclass(tree):
        return [leaf for field in dataclasses.fields(tree) for leaf in leaves(getattr(tree, field.name))]
    return [tree]


def gradient(value, points):
    if not value.requires_grad:
        return [None] * len(points)
    return torch.autograd.grad(value, points, retain_graph=True, allow_unused=True)


def rows_of(losses, params, *args):
    """`[m, *p]` by leaf."""
    torch.manual_seed(0)
    copies = _pytree.tree_map(lambda x: x.detach().clone().requires_grad_(), params)
    if isinstance(losses, PerExample):
        values = [losses.loss(copies, *(arg[i] for arg in args)) for i in range(BATCH)]
    else:
        values = [element for leaf in leaves(losses(copies, *args)) for element in leaf.reshape(-1)]
    points = leaves(copies)
    rows = [gradient(y, points) for y in values]
    dense = [[torch.zeros_like(x) if g is None else g.to_dense() for g, x in zip(r, points, strict=True)] for r in rows]
    return [torch.stack(column) for column in zip(*dense, strict=True)]


@cache
def case_of(name, kind):
    return KINDS[kind](MODELS[name]())


def same(found, expected, **tolerance):
    found = leaves(found)
    assert len(found) == len(expected)
    for x, y in zip(found, expected, strict=True):
        close = tolerance or {"rtol": WIDE[y.dtype], "atol": WIDE[y.dtype]}
        torch.testing.assert_close(x, y, **close)  # shape and dtype too


def same_unscaled(found, expected):
    """Unscaled rows: each entry is a few roundings of the float32 scale off, beside those of the sums."""
    found = leaves(found)
    assert len(found) == len(expected)
    for x, y in zip(found, expected, strict=True):
        assert (x.shape, x.dtype) == (y.shape, y.dtype)
        if not y.is_floating_point():
            assert torch.equal(x, y)
        elif y.numel():
            check_within(x, y, 4 * eps(torch.float32) * y.abs() + 2**8 * eps(y.dtype) * y.abs().max())


def flat(tree):
    return torch.cat([x.reshape(-1) for x in leaves(tree)])


def moved(params, direction, step):
    return _pytree.tree_map(lambda x, v: x + step * v, params, direction)
