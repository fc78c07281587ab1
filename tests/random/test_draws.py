"""Draws at their edges: where an interval ends, and what a probability of exactly 0 or 1 does."""

import math

import pytest
import torch

from functional_jd.random.draws import DRAWS


class Given:
    """Numbers that are given, in the place of random ones."""

    def __init__(self, numbers):
        self.numbers = torch.as_tensor(numbers)

    def draw(self, _, shape, dtype, device):
        return self.numbers.to(dtype).expand(tuple(shape)).clone()

    def uniform(self, n, dtype, device):
        return self.draw("uniform", (n,), dtype, device)


def call(func, given, *args, **kwargs):
    return DRAWS[func](Given(given), *args, **kwargs)


Tensor = torch.Tensor
ALMOST_ONE = 1 - 2.0**-53


def test_an_event_of_probability_one_always_happens_and_one_of_zero_never():
    for p in (0.0, 1.0, torch.tensor(0.0), torch.tensor(1.0), torch.tensor(1.0).double()):
        for u in (0.0, 1 - 2.0**-24):
            assert call(torch.bernoulli, u, torch.empty(2), p).tolist() == [float(p)] * 2
            assert call(Tensor.bernoulli_, u, torch.empty(2), p).tolist() == [float(p)] * 2
    # Probabilities in float64 are compared with numbers in float64.
    beyond, probability = 0.5 + 2.0**-40, torch.tensor([0.5 + 2.0**-41], dtype=torch.float64)
    assert call(torch.bernoulli, torch.tensor(beyond, dtype=torch.float64), probability).item() == 0


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_uniform_never_reaches_its_upper_end(dtype):
    step = 2 * torch.finfo(dtype).eps
    for low, high in ((0.0, 1.0), (1.0, 1.0 + step), (-3.0, 5.0)):
        u = torch.tensor(0.0 if (low, high) == (0.0, 1.0) else 1 - 2.0**-24)
        found = call(Tensor.uniform_, u, torch.empty(3, dtype=dtype), low, high)
        assert (found >= low).all()
        assert (found < high).all()
    assert call(Tensor.uniform_, 0.25, torch.empty(1, dtype=dtype), -3.0, 5.0).item() == -1.0
    assert call(Tensor.uniform_, 0.25, torch.empty(1, dtype=dtype), 2.0, 2.0).item() == 2.0


def test_multinomial_takes_no_category_of_weight_zero():
    weights = torch.tensor([0.0, 0.25, 0.0, 0.75, 0.0])
    for u, expected in ((0.0, 1), (0.25 - 2.0**-30, 1), (0.25, 3), (ALMOST_ONE, 3), (1.0, 3)):
        assert call(torch.multinomial, torch.tensor(u, dtype=torch.float64), weights, 1, True).item() == expected
    # Without replacement: by waiting times, of which the shortest for its weight comes first.
    waits = torch.tensor([1.0, 1.0, 1.0, 1.0, 1.0])
    assert call(torch.multinomial, waits, weights, 2).tolist() == [3, 1]
    waits = torch.tensor([1.0, 0.1, 1.0, 0.9, 1.0])
    assert call(torch.multinomial, waits, weights, 2).tolist() == [1, 3]
    assert call(torch.multinomial, torch.ones(5), torch.arange(1.0, 6.0), 5).tolist() == [4, 3, 2, 1, 0]


def test_dropout_keeps_the_mean_and_alpha_dropout_mean_and_variance():
    x = torch.full((2, 3, 4), 2.0)
    kept, dropped = torch.tensor(0.0), torch.tensor(1 - 2.0**-24)
    assert call(torch.dropout, kept, x, 0.75, True).unique().tolist() == [8.0]
    assert call(torch.dropout, dropped, x, 0.75, True).unique().tolist() == [0.0]
    # Self-normalizing: with p of dropping, values of mean 0 and variance 1 keep both.
    p, low = 0.25, -1.7580993408473766
    a = 1 / math.sqrt((low * low * p + 1) * (1 - p))
    b = -a * p * low
    x = torch.tensor([-1.0, 0.5])
    torch.testing.assert_close(call(torch.alpha_dropout, kept, x, p, True), a * x + b)
    torch.testing.assert_close(call(torch.alpha_dropout, dropped, x, p, True), torch.full((2,), a * low + b))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_numbers_are_computed_in_float32_and_rounded_once(dtype):
    z = torch.tensor(1.2345678)
    wide, half = torch.empty(1), torch.empty(1, dtype=dtype)
    for func, parameters in ((Tensor.normal_, (3.0, 0.3)), (Tensor.uniform_, (-1.0, 0.1))):
        u = z - 1 if func is Tensor.uniform_ else z
        expected = call(func, [u], wide.clone(), *parameters).to(dtype)
        assert torch.equal(call(func, [u], half.clone(), *parameters), expected)
    z = torch.linspace(-3, 3, 101)
    assert torch.equal(call(torch.normal, z, torch.full((101,), 3.0, dtype=dtype), 10.0), (3 + 10 * z).to(dtype))


def test_normal_numbers_have_no_derivative_by_their_mean():
    mean = torch.zeros(3, requires_grad=True)
    assert not call(torch.normal, 0.5, mean, torch.ones(3, requires_grad=True)).requires_grad
