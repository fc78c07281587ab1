"""Hyper-parameters: numbers are checked, tensors are not read, and what is neither is refused by name."""

import re
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from functional_jd.core.arguments import (
    ABOVE_0_TO_1,
    BELOW_1,
    FROM_0_TO_1,
    NOT_NEGATIVE,
    POSITIVE,
    number,
)

# The same intervals, as Python writes them.
INTERVALS = [
    (POSITIVE, lambda x: 0 < x < float("inf")),
    (NOT_NEGATIVE, lambda x: 0 <= x < float("inf")),
    (FROM_0_TO_1, lambda x: 0 <= x <= 1),
    (BELOW_1, lambda x: 0 <= x < 1),
    (ABOVE_0_TO_1, lambda x: 0 < x <= 1),
]
each_interval = pytest.mark.parametrize(("domain", "contains"), INTERVALS, ids=lambda x: getattr(x, "expected", ""))


def checked(given, domain=POSITIVE):
    return number("rate", given, domain, "The default is 1.")


@each_interval
@given(x=st.floats() | st.sampled_from([0.0, 1.0, 1 + 2**-52, -0.0, 1, 0, -1]))
def test_a_number_comes_back_or_is_refused_and_a_tensor_becomes_nan(domain, contains, x):
    found = checked(torch.tensor(float(x), dtype=torch.float64), domain)
    if contains(x):
        assert checked(x, domain) is x
        assert found == x
    else:
        with pytest.raises(ValueError, match=re.escape(f"functional_jd: rate must be {domain.expected}, found {x}. ")):
            checked(x, domain)
        assert found.isnan()


@pytest.mark.parametrize("number", [np.float32(0.5), np.float64(0.5), Fraction(1, 2)])
def test_other_real_numbers_are_numbers(number):
    assert checked(number) == number


def test_a_tensor_is_widened_and_keeps_its_derivatives():
    x = torch.tensor(0.5)
    assert checked(x).dtype == torch.float64
    assert torch.func.grad(lambda x: checked(x).square())(x) == 1
    assert torch.func.jvp(lambda x: checked(x).square(), (x,), (x,))[1] == 0.5
    sweep = torch.tensor([-1.0, 0.5, 2.0])
    torch.testing.assert_close(torch.vmap(checked)(sweep).nan_to_num(7), torch.tensor([7.0, 0.5, 2.0]).double())
    assert checked(torch.nn.Parameter(x)).requires_grad


@pytest.mark.parametrize(
    ("wrong", "error", "message"),
    [
        (
            torch.tensor(1),
            TypeError,
            r"functional_jd: rate must be a number or a floating-point tensor, found torch.int64 \[\]. Convert",
        ),
        (
            torch.ones(2),
            ValueError,
            r"functional_jd: rate must be a number or a tensor \[\], found torch.float32 \[2\]. .* torch.vmap",
        ),
        ("1", TypeError, r"functional_jd: rate must be a number or a tensor \[\], found '1'. The default is 1."),
        (None, TypeError, r"functional_jd: rate must be a number or a tensor \[\], found None. The default is 1."),
        (True, TypeError, r"functional_jd: rate must be a number or a tensor \[\], found True. The default is 1."),
        ([1.0], TypeError, r"functional_jd: rate must be a number or a tensor \[\], found list. The default is 1."),
    ],
)
def test_what_is_no_number_is_refused(wrong, error, message):
    with pytest.raises(error, match=message):
        checked(wrong)
