"""Checks of arguments and hyper-parameters: what they take, what they refuse, and in which words."""

import re
from fractions import Fraction

import numpy as np
import pytest
import torch
import torch._dynamo.testing
from hypothesis import given
from hypothesis import strategies as st

from functional_jd.core.arguments import (
    ABOVE_0_TO_1,
    BELOW_1,
    FROM_0_TO_1,
    NOT_NEGATIVE,
    POSITIVE,
    at_least,
    check_flag,
    check_function,
    check_integer,
    check_mapping,
    check_number,
    check_option,
    check_scalar,
    check_type,
    described,
    is_size,
    number,
)


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (torch.ones(2, 3), "torch.float32 [2, 3]"),
        (torch.eye(2).to_sparse(), "torch.float32 [2, 2] (sparse_coo)"),
        (torch.ones(4, device="meta"), "torch.float32 [4]"),
        (None, "None"),
        (True, "True"),
        (1.5, "1.5"),
        (np.float32("nan"), "nan"),
        ("name", "'name'"),
        ("x" * 100, "str that is too long to show"),
        (10**400, "int that is too long to show"),
        ([1, 2], "list"),
        (int, "the class int"),
    ],
    ids=lambda value: None if isinstance(value, str) else type(value).__name__,
)
def test_values_are_described_in_a_few_words(value, words):
    assert described(value) == words


@given(st.integers(-3, 9), st.integers(-3, 9))
def test_integers_of_a_range_pass(n, least):
    if n >= least:
        check_integer("n", n, least, "Pass 1.")
    else:
        words = rf"^functional_jd: n must be an integer of at least {least}, found {n}\. Pass 1\.$"
        with pytest.raises(ValueError, match=words):
            check_integer("n", n, least, "Pass 1.")


@given(st.floats(allow_nan=True) | st.integers())
def test_numbers_of_a_range_pass(x):
    if x >= 1:
        check_number("x", x, at_least(1), "Pass 2.")
    else:
        with pytest.raises(ValueError, match=r"^functional_jd: x must be a number >= 1, found .*\. Pass 2\.$"):
            check_number("x", x, at_least(1), "Pass 2.")


REFUSED = {
    "flag": (lambda: check_flag("x", 1), TypeError, "True or False, found 1. Pass x=True"),
    "integer": (lambda: check_integer("x", True, 0, "Pass 1."), ValueError, "at least 0, found True. Pass 1."),
    "tensor": (lambda: check_integer("x", torch.tensor(1), 0, "Pass 1."), ValueError, "at least 0, found torch.int64"),
    "large": (lambda: check_integer("x", 2**31, 0, "Pass 1."), ValueError, "at least 0, found 2147483648."),
    "no number": (lambda: check_number("x", "1", at_least(0), "Pass 1."), TypeError, ">= 0, found '1'. Pass 1."),
    "vector": (lambda: check_scalar("x", torch.ones(2), "Pass 1."), ValueError, "found torch.float32 [2]. Pass 1."),
    "function": (lambda: check_function("x", 1, "Pass len."), TypeError, "a function, found int. Pass len."),
    "record": (lambda: check_type("x", "1", int, "Pass 1."), TypeError, "a int, found '1'. Pass 1."),
    "keys": (lambda: check_mapping("x", {1: 1}, "Pass {}."), TypeError, "a dict by names, found 1. Pass {}."),
    "option": (lambda: check_option("x", 1, ("a", "b"), "Pass a."), ValueError, "one of a, b, found 1. Pass a."),
}


@pytest.mark.parametrize(("check", "error", "words"), REFUSED.values(), ids=REFUSED)
def test_what_is_not_is_refused_with_place_finding_and_cure(check, error, words):
    with pytest.raises(error, match=r"^functional_jd: x must be ") as raised:
        check()
    assert words in str(raised.value)


@given(st.integers(-(2**70), 2**70))
def test_sizes_fit_64_bits(n):
    assert is_size(n) == (-(2**63) <= n < 2**63)
    assert not is_size(True)
    assert not is_size(float(n))


def test_a_size_that_is_traced_is_one_without_a_guard():
    torch.compiler.reset()  # the graphs of other tests count against the limit of this one
    count = torch._dynamo.testing.CompileCounter()
    f = torch.compile(lambda x: x + is_size(x.shape[0]), fullgraph=True, backend=count, dynamic=True)
    for n in (3, 4, 70):
        assert torch.equal(f(torch.zeros(n)), torch.ones(n))
    assert count.frame_count == 1


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
    assert type(checked(number)) is float  # numpy's own have operators of their own


def test_a_tensor_is_widened_and_keeps_its_derivatives():
    x = torch.tensor(0.5)
    assert checked(x).dtype == torch.float64
    assert torch.func.grad(lambda x: checked(x).square())(x) == 1
    assert torch.func.jvp(lambda x: checked(x).square(), (x,), (x,))[1] == 0.5
    sweep = torch.tensor([-1.0, 0.5, 2.0])
    torch.testing.assert_close(torch.vmap(checked)(sweep).nan_to_num(7), torch.tensor([7.0, 0.5, 2.0]).double())
    assert checked(torch.nn.Parameter(x)).requires_grad


@pytest.mark.parametrize(
    ("wrong", "error", "words"),
    [
        (torch.tensor(1), TypeError, r"floating-point tensor, found torch.int64 \[\]. Convert"),
        (torch.ones(2), ValueError, r"tensor \[\], found torch.float32 \[2\]. .* torch.vmap"),
        ("1", TypeError, r"tensor \[\], found '1'. The default is 1."),
        (None, TypeError, r"tensor \[\], found None. The default is 1."),
        (True, TypeError, r"tensor \[\], found True. The default is 1."),
        ([1.0], TypeError, r"tensor \[\], found list. The default is 1."),
    ],
)
def test_what_is_no_number_is_refused(wrong, error, words):
    with pytest.raises(error, match=f"functional_jd: rate must be a number or a {words}"):
        checked(wrong)
