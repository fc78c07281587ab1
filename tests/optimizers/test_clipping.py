"""Clipping against torch's own in-place functions; its laws, its range, its transforms."""

import math
from fractions import Fraction

import pytest
import torch
from bounds import check_same, check_within, eps
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import nn

from functional_jd import autocast
from functional_jd.optimizers import clip_by_norm, global_norm

numbers = st.lists(st.integers(-50, 50).map(float), min_size=5, max_size=5)
bounds = st.integers(1, 400).map(lambda k: k / 4)
POWERS = [1.0, 2.0, 3.0, math.inf]


# What torch adds to a norm.
TORCH = 1e-6


def tree_of(vector):
    """Five numbers as a direction of three leaves, one of them a single number."""
    a, b, c = vector.split([2, 2, 1])
    return {"w": a.reshape(1, 2), "rest": [b, c[0]]}


def tree(values, dtype=torch.float64):
    return tree_of(torch.tensor(values, dtype=dtype))


def flat(direction):
    return torch.cat([leaf.reshape(-1) for leaf in (direction["w"], *direction["rest"])])


def by_torch(clip, direction, *args, **kwargs):
    """What an in-place function of `torch.nn.utils` makes of a direction, as one vector, and what it returns."""
    parameters = [nn.Parameter(torch.zeros_like(leaf)) for leaf in (direction["w"], *direction["rest"])]
    for parameter, leaf in zip(parameters, (direction["w"], *direction["rest"]), strict=True):
        parameter.grad = leaf.clone()
    found = clip(parameters, *args, **kwargs)
    return torch.cat([parameter.grad.reshape(-1) for parameter in parameters]), found


@pytest.mark.parametrize("power", POWERS)
@given(values=numbers, bound=bounds)
def test_clipping_by_norm_is_that_of_torch(values, bound, power):
    expected, norm = by_torch(nn.utils.clip_grad_norm_, tree(values), bound, norm_type=power)
    check_within(global_norm(tree(values), power), norm, 16 * eps() * norm)
    # The norm is at least 1 here unless all is zero.
    check_within(flat(clip_by_norm(tree(values), bound, power)), expected, (TORCH + 16 * eps()) * expected.abs())


@given(numbers, bounds)
def test_what_is_short_enough_keeps_its_bits_and_the_rest_gets_the_length(values, bound):
    direction = tree(values)
    clipped = flat(clip_by_norm(direction, bound))
    assert torch.equal(clipped, flat(clip_by_norm(direction, bound)))
    assert flat(direction).tolist() == values
    if sum(Fraction(value) ** 2 for value in values) <= Fraction(bound) ** 2:
        assert clipped.tolist() == values
    else:
        length = math.sqrt(sum(Fraction(value) ** 2 for value in clipped.tolist()))
        assert length == pytest.approx(bound, rel=16 * eps())
        assert torch.equal(clipped.sign(), torch.tensor(values).sign())


@pytest.mark.parametrize(
    ("dtype", "size"), [(torch.float32, 3e38), (torch.float32, 1e-38), (torch.float64, 1e308), (torch.float64, 1e-300)]
)
def test_neither_huge_nor_tiny_entries_leave_the_range(dtype, size):
    direction = tree([-size, -size, -size, -size, 0.0], dtype)
    clipped = clip_by_norm(direction, size / 4)
    expected = torch.tensor([-1, -1, -1, -1, 0], dtype=dtype) * size / 8
    check_within(flat(clipped), expected, 8 * eps(dtype) * expected.abs())
    squares, _ = by_torch(nn.utils.clip_grad_norm_, direction, size / 4)
    assert not ((squares - expected).abs() <= expected.abs() / 2).all()  # what torch makes of it
    halved = tree([0.6 * size, 0.8 * size, 0.0, 0.0, 0.0], dtype)
    check_within(global_norm(halved), torch.tensor(size, dtype=dtype), 8 * eps(dtype) * size)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_leaves_keep_their_dtype_and_norms_are_at_least_single(dtype):
    direction = tree([60000.0, -60000.0, 0.0, 0.0, 60000.0], dtype)
    clipped = clip_by_norm(direction, torch.tensor(300.0, dtype=torch.float64))
    assert {leaf.dtype for leaf in (flat(clipped), clipped["rest"][1])} == {dtype}
    rounding = eps(dtype) / 2 + 8 * eps(torch.promote_types(dtype, torch.float32))
    assert flat(clipped).norm(dtype=torch.float64).item() == pytest.approx(300.0, rel=rounding)
    assert global_norm(direction).dtype == torch.promote_types(dtype, torch.float32)
    assert global_norm(direction).item() == pytest.approx(60000 * math.sqrt(3), rel=rounding)


def test_leaves_of_different_dtypes_have_one_norm():
    direction = [torch.tensor([3e-30]), torch.tensor([4e-30], dtype=torch.float64), torch.zeros(1)]
    clipped = clip_by_norm(direction, 1e-30)
    assert [leaf.dtype for leaf in clipped] == [torch.float32, torch.float64, torch.float32]
    assert torch.cat(clipped).tolist() == pytest.approx([6e-31, 8e-31, 0.0], rel=8 * eps(torch.float32), abs=0)
    zeros, minute = clip_by_norm([torch.zeros(2), torch.tensor([1e-300], dtype=torch.float64)], 5e-301)
    assert zeros.tolist() == [0.0, 0.0]
    assert minute.item() == pytest.approx(5e-301, rel=8 * eps(), abs=0)  # no float32 number


def test_zero_and_nothing_stay():
    assert torch.equal(flat(clip_by_norm(tree([0.0] * 5), 0.0)), torch.zeros(5, dtype=torch.float64))
    assert flat(clip_by_norm(tree([1.0] * 5), 0.0)).tolist() == [0.0] * 5
    hollow = {"w": torch.zeros(0, 3), "b": torch.zeros(0)}
    assert global_norm(hollow) == 0
    assert clip_by_norm(hollow, 1.0)["w"].shape == (0, 3)
    assert global_norm({"w": torch.zeros(0, 3), "b": torch.tensor(-2.0)}) == 2


@pytest.mark.parametrize("poison", [math.inf, -math.inf, math.nan])
def test_what_is_not_finite_is_never_hidden_by_the_norm(poison):
    direction = tree([1.0, poison, 2.0, 3.0, 4.0])
    _, norm = by_torch(nn.utils.clip_grad_norm_, direction, 1.0)
    torch.testing.assert_close(global_norm(direction), norm, equal_nan=True)
    assert not flat(clip_by_norm(direction, 1.0)).isfinite().all()


@pytest.mark.parametrize("power", POWERS[:3])
@settings(settings.get_profile("few"))
@given(values=numbers, bound=bounds)
def test_derivatives_match_finite_differences(values, bound, power):
    values = torch.tensor(values, dtype=torch.float64) + torch.linspace(0.2, 0.4, 5, dtype=torch.float64)
    bound = torch.tensor(bound, dtype=torch.float64)
    norm = torch.linalg.vector_norm(values, power)
    assume(abs(norm - bound) > 1e-3)
    by_norm = lambda values, bound: flat(clip_by_norm(tree_of(values), bound, power))
    inputs = values.clone().requires_grad_(), bound.clone().requires_grad_()
    torch.autograd.gradcheck(by_norm, inputs)
    forward, reverse = (road(by_norm, argnums=(0, 1)) for road in (torch.func.jacfwd, torch.func.jacrev))
    check_same(forward(values, bound), reverse(values, bound))
    torch.autograd.gradcheck(lambda values: global_norm(tree_of(values), power), values.clone().requires_grad_())


def test_second_derivatives_match_finite_differences():
    values = torch.tensor([3.0, -1.0, 0.5, 2.0, 1.0], dtype=torch.float64, requires_grad=True)
    torch.autograd.gradgradcheck(lambda values: flat(clip_by_norm(tree_of(values), 1.5)), values)
    torch.autograd.gradgradcheck(lambda values: global_norm(tree_of(values)), values)


@pytest.mark.parametrize("bound", [0.0, 1.0, math.inf])
def test_derivatives_at_zero_are_finite(bound):
    zero = torch.zeros(5, dtype=torch.float64)
    assert torch.equal(torch.func.grad(lambda v: global_norm(tree_of(v)))(zero), zero)
    whole = torch.func.jacrev(lambda v: flat(clip_by_norm(tree_of(v), bound)))(zero)
    assert torch.equal(whole, torch.eye(5, dtype=torch.float64))
    assert torch.func.hessian(lambda v: flat(clip_by_norm(tree_of(v), bound)))(zero).isfinite().all()


def test_one_graph_serves_every_direction_and_bound():
    clip = lambda values, bound: (flat(clip_by_norm(tree_of(values), bound)),)
    torch._dynamo.reset()
    compiled = torch.compile(clip, fullgraph=True, backend="aot_eager")
    for values in ([3.0, 4.0, 0.0, 0.0, 0.0], [3e38] * 5, [0.0] * 5):
        for bound in (0.0, 2.0, 1e38):
            values, bound = torch.as_tensor(values), torch.tensor(bound)
            check_same(compiled(values, bound), clip(values, bound))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("kept", [torch.float32, torch.float64])
def test_autocast_around_it_changes_nothing(dtype, kept):
    direction = tree([3.3, 4.4, 5.5, 0.0, 0.1], kept)
    everything = lambda: (flat(clip_by_norm(direction, 1.0)), global_norm(direction))
    with torch.autocast("cpu", dtype):
        native = everything()
    for found in (native, autocast(everything, dtype)()):
        assert all(torch.equal(a, b) and a.dtype == kept for a, b in zip(found, everything(), strict=True))
