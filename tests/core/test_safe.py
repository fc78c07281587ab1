"""Safe division: the value and the derivative are the quotient's away from zero, and finite at zero."""

import pytest
import torch
from bounds import check_derivatives, check_within, eps
from hypothesis import given
from hypothesis import strategies as st

from functional_jd.core.safe import divide, nan_unless, nonzero, sqrt_or_zero, with_nan_of

# Exact in binary, so that quotients and differences can be compared bit by bit.
numbers = st.integers(-8, 8).map(lambda n: n / 4)
AT_ZERO, AWAY = torch.zeros(1, dtype=torch.float64), torch.tensor([-3.0, -0.5, 0.25, 2.0], dtype=torch.float64)

# Each as a function of one vector, and what it is away from zero.
FUNCTIONS = {
    "nonzero": (nonzero, lambda x: x),
    "nonzero otherwise": (lambda x: nonzero(x, 2 * x + 5), lambda x: x),
    "divide by": (lambda x: divide(3.0, x), lambda x: 3 / x),
    "divide": (lambda x: divide(x.exp(), x, otherwise=1), lambda x: x.exp() / x),
    "root": (lambda x: sqrt_or_zero(x.abs(), x == 0), lambda x: x.abs().sqrt()),
    "nan unless": (lambda x: nan_unless(x.abs() < 10, x**2), lambda x: x**2),
    "with nan of": (lambda x: with_nan_of(x**2, x.exp()), lambda x: x**2),
}
each_function = pytest.mark.parametrize(("f", "plain"), FUNCTIONS.values(), ids=FUNCTIONS)


@given(numbers, numbers, numbers)
def test_a_quotient_is_the_quotient_or_the_other_number(a, b, other):
    a, b = (torch.tensor(x, dtype=torch.float64) for x in (a, b))
    expected = other if b == 0 else a.item() / b.item()
    assert divide(a, b, other).item() == expected
    assert divide(a.item(), b, other).item() == pytest.approx(expected)  # torch multiplies by the reciprocal
    assert nonzero(b, other).item() == (b.item() or other)
    assert nonzero(b).item() == (b.item() or 1)


@each_function
def test_away_from_zero_values_and_derivatives_are_those_of_the_plain_formula(f, plain):
    assert torch.equal(f(AWAY), plain(AWAY))
    gradient = torch.func.grad(lambda x: f(x).sum())(AWAY)
    check_derivatives(gradient, lambda x: plain(x).sum(), AWAY)
    check_within(torch.func.jvp(f, (AWAY,), (torch.ones_like(AWAY),))[1], gradient, 4 * eps() * gradient.abs())


@pytest.mark.parametrize(
    ("f", "value", "slope"),
    [
        (nonzero, 1.0, 0.0),
        (lambda x: nonzero(x, 2 * x + 5), 5.0, 2.0),
        (lambda x: divide(3.0, x), 0.0, 0.0),
        (lambda x: divide(x + 1, x), 0.0, 0.0),
        (lambda x: divide(x + 1, x, otherwise=7), 7.0, 0.0),
        (lambda x: divide(torch.full_like(x, torch.inf), x), 0.0, 0.0),
        (lambda x: sqrt_or_zero(x, x == 0), 0.0, 0.0),
        (lambda x: nan_unless(x == 0, x + 2), 2.0, 1.0),
    ],
)
def test_at_zero_value_and_derivative_are_finite(f, value, slope):
    assert f(AT_ZERO).tolist() == [value]
    assert torch.func.grad(lambda x: f(x).sum())(AT_ZERO).tolist() == [slope]
    assert torch.func.jvp(f, (AT_ZERO,), (torch.ones_like(AT_ZERO),))[1].tolist() == [slope]


@pytest.mark.parametrize("what", [torch.nan, torch.inf, -torch.inf])
def test_what_is_not_finite_is_shown(what):
    source = torch.tensor([[1.0, 2.0], [what, 0.0]])
    assert with_nan_of(torch.ones(2), source.sum(1)).isnan().tolist() == [False, True]
    assert with_nan_of(torch.ones(2), source.sum()).isnan().all()
    assert nan_unless(source > 0, source).isnan().tolist() == [[False, False], [what != torch.inf, True]]
    assert nonzero(torch.tensor(torch.nan)).isnan()
    assert divide(1.0, torch.tensor(torch.nan)).isnan()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_dtypes_stay(dtype):
    x = torch.zeros(2, dtype=dtype)
    for f, _ in FUNCTIONS.values():
        assert f(x).dtype == dtype
    assert nonzero(torch.zeros(2, dtype=torch.int64)).dtype == torch.int64


@each_function
def test_composes_with_vmap_and_compile(f, plain):
    x = torch.stack([AWAY, torch.zeros_like(AWAY)])
    assert torch.equal(torch.vmap(f)(x), f(x))
    torch.compiler.reset()  # the graphs of other tests count against the limit of this one
    assert torch.equal(torch.compile(f, fullgraph=True, backend="aot_eager")(x), f(x))
    slope = torch.func.grad(lambda x: f(x).sum())
    assert torch.equal(torch.compile(slope, fullgraph=True, backend="aot_eager")(x), slope(x))
