"""Numbers of the user: copied, checked by name, and one per loss."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from functional_jd.solvers.per_objective import one_each

LOSSES = torch.zeros(3, dtype=torch.float64)


@given(st.lists(st.floats(-1e9, 1e9), min_size=1, max_size=4), st.booleans())
def test_what_is_accepted_comes_back_and_nothing_else_is(numbers, shares):
    if shares and (min(numbers) < 0 or max(numbers) == 0):
        with pytest.raises(ValueError, match="rule: numbers must not be negative"):
            one_each(numbers, "rule", "numbers", shares=shares)
        return
    found = one_each(numbers, "rule", "numbers", shares=shares)(torch.zeros(len(numbers)))
    assert found.dtype == torch.float64
    assert found.tolist() == numbers


def test_a_tensor_is_copied_and_widened():
    given = torch.ones(3)
    of = one_each(given, "rule", "numbers")
    given.zero_()
    assert torch.equal(of(LOSSES), torch.ones(3, dtype=torch.float64))


def test_derivatives_reach_what_was_given_also_batched():
    f = lambda given: one_each(given, "rule", "numbers", shares=True)(LOSSES).square().sum()
    given = torch.tensor([[1.0, 2.0, 3.0], [0.0, 1.0, 0.0]])
    torch.testing.assert_close(torch.vmap(torch.func.grad(f))(given), 2 * given)
    torch.compiler.reset()  # the graphs of other tests count against the limit of this one
    compiled = torch.compile(torch.vmap(f), fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(given), torch.tensor([14.0, 1.0], dtype=torch.float64))


@pytest.mark.parametrize("wrong", [[], [[1.0]], 1.0, [math.nan], [math.inf, 0.0]])
def test_shapes_and_values_are_checked(wrong):
    with pytest.raises(ValueError, match=r"rule: numbers must .*, found"):
        one_each(wrong, "rule", "numbers")


def test_integers_and_other_lengths_are_refused():
    with pytest.raises(TypeError, match=r"rule: numbers must be a floating-point tensor, found torch.int64"):
        one_each(torch.ones(3, dtype=torch.int64), "rule", "numbers")
    with pytest.raises(ValueError, match="rule: expected one of numbers per loss, found 2 and 3 losses"):
        one_each([1.0, 2.0], "rule", "numbers")(LOSSES)
