"""Backward passes that are not linear are found by a loss that is multiplied."""

import pytest
import torch
from torch.nn import functional

from functional_jd.diagnostics import linear_backward


class Unit(torch.autograd.Function):
    """Gradients of length one, as in some straight-through estimators."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, g):
        return g / (g.norm() + 1e-30)


class Clipped(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, g):
        return g.clamp(-100, 100)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_losses_behind_a_backward_pass_that_is_not_linear_are_found(dtype):
    p, x = torch.tensor([1.0, 2.0, 3.0], dtype=dtype), torch.tensor([1.0, 0.5, 0.1], dtype=dtype)

    def losses(p, x):
        """Each evaluation draws another mask: both gradients are of one."""
        return {
            "a": (p * x).square().sum(),
            "b": Unit.apply(p * x).square().sum(),
            "c": Clipped.apply(p * x).square().sum(),
            "d": functional.dropout(p, 0.5).exp().sum(),
            "e": (x.sum() * p[:1]).abs().log().sum(),
        }

    assert linear_backward(losses, p, x).tolist() == [True, False, True, True, True]
    assert linear_backward(losses, p, x, factor=2.0**10).tolist() == [True, False, False, True, True]
    assert linear_backward(lambda p, x: (losses(p, x), "aux"), p, x, has_aux=True).tolist()[:2] == [True, False]
    with pytest.raises(TypeError, match="linear_backward: has_aux"):
        linear_backward(losses, p, x, has_aux=1)
