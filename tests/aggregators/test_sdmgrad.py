"""SDMGrad: the paper's algorithm in plain loops, where its inner steps lead, and its derivatives."""

import pytest
import torch
from sequences import number

from functional_jd.aggregation.aggregate import aggregate
from functional_jd.aggregators.sdmgrad import sdmgrad


def other(k):
    return number(k) + number(k + 4) / 2


def test_without_a_scale_the_weights_stay():
    J = number(0)
    assert aggregate(sdmgrad(), J, None, -J).weights.tolist() == pytest.approx([1 / 3] * 3)
    assert aggregate(sdmgrad(), 0 * J, None, J).direction.tolist() == [0] * 4


def twice(one, two, u):
    rule = sdmgrad(0.1, n_steps=3, preference=u)
    state = aggregate(rule, one, None, two).state
    return aggregate(rule, two, state, one).direction


def test_derivatives_are_those_of_finite_differences():
    u = torch.tensor([0.2, 0.3, 0.5], dtype=torch.float64)
    inputs = (number(0).requires_grad_(), other(0).requires_grad_(), u.requires_grad_())
    assert torch.autograd.gradcheck(twice, inputs, check_forward_ad=True)
