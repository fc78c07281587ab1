"""Automatic clipping: the paper's formula by hand, its bound, its unit, and steps without rows."""

import math

import pytest
import torch
from bounds import check_within, eps
from hypothesis import given
from hypothesis import strategies as st

import functional_jd as fj
from functional_jd.testing.strategies import jacobians

J = torch.tensor([[3.0, 4.0, 0.0], [0.3, 0.0, 0.4], [0.0, 0.0, 0.0]], dtype=torch.float64)


@given(jacobians(), st.integers(1, 40).map(lambda k: k / 16))
def test_equal_to_the_formula_by_hand(rows, gamma):
    weights = fj.aggregate(fj.auto_clipped(gamma), rows).weights
    for weight, row in zip(weights.tolist(), rows.tolist(), strict=True):
        assert math.isclose(weight, 1 / (math.hypot(*row) + gamma), rel_tol=64 * eps())
    doubled = fj.aggregate(fj.auto_clipped(gamma, max_norm=torch.tensor(2.0)), rows).weights
    assert torch.equal(doubled, 2 * weights)


@given(jacobians(), st.integers(1, 40).map(lambda k: k / 16))
def test_no_row_adds_more_than_one_and_the_order_of_norms_stays(rows, gamma):
    added = fj.aggregate(fj.auto_clipped(gamma), rows).weights * rows.norm(dim=1)
    assert (added <= 1 + 64 * eps()).all()
    order = rows.norm(dim=1).argsort()
    assert (added[order].diff() >= -64 * eps()).all()


@pytest.mark.parametrize("size", [1e-3, 1e3])
def test_with_small_gamma_the_unit_of_a_loss_does_not_matter(size):
    rows, gamma = J[:2], 1e-12
    expected = fj.aggregate(fj.auto_clipped(gamma), rows).direction
    # gamma changes a row's share by gamma over its norm.
    shortest = min(size, 1) * rows.norm(dim=1).min()
    check_within(fj.aggregate(fj.auto_clipped(gamma), size * rows).direction, expected, 2 * gamma / shortest)
